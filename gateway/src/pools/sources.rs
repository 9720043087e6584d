//! Worker sources of a model.
//!
//! Maps settings to discovery sources and updates the sources at a reload. A source with an unchanged setting
//! continues; after a change, the former workers stay until the new source publishes a set. The library probes and
//! reconciles.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use pointsman::error::{Down, StartError};
use pointsman::protocol::{WorkerConfig, WorkerMap};
use pointsman::{
    DiscoveryError, DiscoverySource, DnsNames, NamedWorker, ProbeOptions, ProbedUrls, Router, RouterBuilder,
    StaticList, WatchedFile,
};
use tokio::sync::watch;

#[cfg(feature = "kubernetes")]
use super::pods::watched_pods;
use crate::net::upstream::WorkerAccess;
use crate::settings::{KubernetesSettings, ModelSettings};

/// Source definitions of a model; `None` for unused kinds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Definitions {
    fixed: Option<WorkerMap>,
    probed: Option<Vec<NamedWorker>>,
    file: Option<PathBuf>,
    names: Option<Vec<String>>,
    pods: Option<KubernetesSettings>,
}

impl Definitions {
    /// Parses the settings.
    ///
    /// # Errors
    /// Two workers with one id or engine, or an invalid address or name.
    pub(crate) fn of(settings: &ModelSettings) -> Result<Self, DiscoveryError> {
        let fixed = settings.workers.iter().filter(|worker| !worker.probe);
        let fixed = StaticList::new(fixed.map(|worker| (worker.id, worker.config.clone())))?.into_workers();
        let nothing_known = WorkerConfig::at("");
        let mut probed: Vec<_> = settings.workers.iter().filter(|worker| worker.probe).cloned().collect();
        for url in &settings.worker_urls {
            probed.push(NamedWorker { probe: true, ..NamedWorker::at(url, &nothing_known)? });
        }
        let fixed_too = fixed.iter().map(|(id, config)| (Some(*id), config.clone()));
        StaticList::new(probed.iter().map(|worker| (worker.id, worker.config.clone())).chain(fixed_too))?;
        DnsNames::new(&settings.worker_names)?;
        Ok(Self {
            fixed: (!fixed.is_empty()).then_some(fixed),
            probed: (!probed.is_empty()).then_some(probed),
            file: settings.workers_file.clone(),
            names: (!settings.worker_names.is_empty()).then(|| settings.worker_names.clone()),
            pods: settings.kubernetes.clone(),
        })
    }

    /// Error if a router with these workers alone would wait for more workers forever.
    pub(crate) fn too_few(&self, wanted: u32) -> Option<StartError> {
        let has_lists = self.probed.is_some() || self.names.is_some();
        let is_complete = !has_lists && self.file.is_none() && self.pods.is_none();
        let registered = self.fixed.as_ref().map_or(0, WorkerMap::len);
        let is_too_few = is_complete && registered > 0 && registered < wanted as usize;
        is_too_few.then_some(StartError::SourceClosed { registered, wanted })
    }
}

/// Sources followed by a router.
#[derive(Default)]
pub(crate) struct ModelSources(Mutex<Slots>);

#[derive(Default)]
struct Slots {
    fixed: Slot<WorkerMap>,
    probed: Slot<Vec<NamedWorker>>,
    file: Slot<PathBuf>,
    names: Slot<Vec<String>>,
    #[cfg(feature = "kubernetes")]
    pods: Slot<KubernetesSettings>,
}

/// A followed source and its definition; absent until a setting uses it.
type Slot<D> = Option<watch::Sender<Option<D>>>;

impl ModelSources {
    /// Applies definitions: those of new kinds to `router`, changed ones to their sources.
    ///
    /// # Errors
    /// Router down, or invalid definitions as in [`Definitions::of`].
    pub(crate) fn apply<R: Following>(
        &self,
        router: R,
        definitions: &Definitions,
        options: &ProbeOptions,
    ) -> Result<R, DiscoveryError> {
        // Each slot is consistent after every statement.
        let mut slots = self.0.lock();
        let Definitions { fixed, probed, file, names, .. } = definitions;
        let router = router.with(&mut slots.fixed, fixed, static_list, |list, workers| {
            *list = static_list(workers)?;
            Ok(())
        })?;
        let new = |workers| ProbedUrls::named(workers, options.clone());
        let router = router.with(&mut slots.probed, probed, new, ProbedUrls::set)?;
        let new = |file| WatchedFile::new(file, options.clone());
        let router = router.with(&mut slots.file, file, new, WatchedFile::set)?;
        let new = |names| Ok(DnsNames::new(names)?.probing(options.clone()));
        let router = router.with(&mut slots.names, names, new, DnsNames::set)?;
        #[cfg(feature = "kubernetes")]
        let router = {
            let options = options.clone();
            let new = move |settings| Ok(watched_pods(settings, options.clone()));
            let again = new.clone();
            router.with(&mut slots.pods, &definitions.pods, new, move |pods, settings| {
                *pods = again(settings)?;
                Ok(())
            })?
        };
        Ok(router)
    }
}

fn static_list(workers: WorkerMap) -> Result<StaticList, DiscoveryError> {
    Ok(StaticList::new(workers.into_iter().map(|(id, config)| (Some(id), config)))?)
}

/// A router that can follow further sources.
pub(crate) trait Following: Sized {
    fn following(self, source: impl DiscoverySource) -> Result<Self, Down>;

    /// Passes a changed definition to the source of its slot, or follows a new source.
    fn with<S: DiscoverySource, D: Clone + PartialEq + Send + Sync + 'static>(
        self,
        slot: &mut Slot<D>,
        definition: &Option<D>,
        new: impl FnOnce(D) -> Result<S, DiscoveryError>,
        set: impl FnMut(&mut S, D) -> Result<(), DiscoveryError> + Send + 'static,
    ) -> Result<Self, DiscoveryError> {
        match (slot, definition) {
            (None, None) => Ok(self),
            (Some(slot), definition) => {
                slot.send_if_modified(|known| {
                    let is_new = known != definition;
                    known.clone_from(definition);
                    is_new
                });
                Ok(self)
            }
            (slot @ None, Some(given)) => {
                let source = new(given.clone())?;
                let (sender, definition) = watch::channel(Some(given.clone()));
                *slot = Some(sender);
                let switched = Switched { source, definition, set, is_on: true, gives_none: false };
                self.following(switched).map_err(|down| DiscoveryError::Other(down.to_string()))
            }
        }
    }
}

/// Before its start.
impl Following for RouterBuilder {
    fn following(self, source: impl DiscoverySource) -> Result<Self, Down> {
        Ok(self.discovery(source))
    }
}

impl Following for &Router {
    fn following(self, source: impl DiscoverySource) -> Result<Self, Down> {
        self.follow(source).map(|()| self)
    }
}

/// Probe options for engines of a model.
pub(crate) fn probe_options(settings: &ModelSettings, access: &WorkerAccess) -> ProbeOptions {
    let options = ProbeOptions::of(&settings.router).model(settings.upstream_name());
    ProbeOptions { client: Arc::new(access.clone()), ..options }
}

/// A source with a replaceable definition. Without a definition it publishes an empty set.
struct Switched<S, D, F> {
    source: S,
    definition: watch::Receiver<Option<D>>,
    set: F,
    is_on: bool,
    /// Whether the empty set of a disabled source is still to be published.
    gives_none: bool,
}

impl<S, D, F> Switched<S, D, F>
where
    S: DiscoverySource,
    D: Clone,
    F: FnMut(&mut S, D) -> Result<(), DiscoveryError>,
{
    /// Applies the current definition.
    fn switch(&mut self) -> Result<(), DiscoveryError> {
        let definition = self.definition.borrow_and_update().clone();
        let was_on = std::mem::replace(&mut self.is_on, definition.is_some());
        self.gives_none = !self.is_on;
        let Some(definition) = definition else { return Ok(()) };
        (self.set)(&mut self.source, definition)?;
        if !was_on {
            self.source.rewind();
        }
        Ok(())
    }
}

impl<S, D, F> DiscoverySource for Switched<S, D, F>
where
    S: DiscoverySource,
    D: Clone + Send + Sync + 'static,
    F: FnMut(&mut S, D) -> Result<(), DiscoveryError> + Send + 'static,
{
    fn name(&self) -> String {
        self.source.name()
    }

    async fn next(&mut self) -> Option<Result<WorkerMap, DiscoveryError>> {
        loop {
            if std::mem::take(&mut self.gives_none) {
                return Some(Ok(WorkerMap::new()));
            }
            let next = async {
                match self.is_on {
                    true => self.source.next().await,
                    false => None,
                }
            };
            tokio::select! {
                biased;
                changed = self.definition.changed() => {
                    // The model is gone, and so is its router.
                    changed.ok()?;
                }
                // A closed source publishes nothing until its definition changes.
                Some(given) = next => return Some(given),
                else => return None,
            }
            if let Err(error) = self.switch() {
                return Some(Err(error));
            }
        }
    }

    fn rewind(&mut self) {
        self.source.rewind();
        self.gives_none = !self.is_on;
    }
}
