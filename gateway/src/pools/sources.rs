//! Worker sources of a model.
//!
//! Maps settings to discovery sources and updates the sources at a reload. A source with an unchanged setting
//! continues; after a change, the former workers stay until the new source publishes a set. The library probes and
//! reconciles.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use pointsman::error::{Down, StartError};
use pointsman::protocol::{WorkerConfig, WorkerMap};
use pointsman::{
    DiscoveryError, DiscoverySource, DnsNames, NamedWorker, ProbeOptions, ProbedUrls, Router, RouterBuilder,
    StaticList, WatchedFile, worker_map,
};
use tokio::sync::watch;

#[cfg(feature = "kubernetes")]
use super::pods::PodSource;
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
        let fixed = worker_map(fixed.map(|worker| (worker.id, worker.config.clone())))?;
        let nothing_known = WorkerConfig::at("");
        let mut probed: Vec<_> = settings.workers.iter().filter(|worker| worker.probe).cloned().collect();
        for url in &settings.worker_urls {
            probed.push(NamedWorker { probe: true, ..NamedWorker::at(url, &nothing_known)? });
        }
        let fixed_too = fixed.iter().map(|(id, config)| (Some(*id), config.clone()));
        worker_map(probed.iter().map(|worker| (worker.id, worker.config.clone())).chain(fixed_too))?;
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
    /// Adds all defined sources to a router before its start.
    pub(crate) fn follow(
        &self,
        builder: RouterBuilder,
        definitions: &Definitions,
        options: &ProbeOptions,
    ) -> Result<RouterBuilder, DiscoveryError> {
        let mut builder = Some(builder);
        self.set(definitions, options, &mut |source| {
            builder = builder.take().map(|builder| source.add_to(builder));
            Ok(())
        })?;
        Ok(builder.expect("the builder is always restored"))
    }

    /// Applies new definitions to a running router.
    ///
    /// # Errors
    /// Router down, or invalid definitions as in [`Definitions::of`].
    pub(crate) fn change(
        &self,
        router: &Router,
        definitions: &Definitions,
        options: &ProbeOptions,
    ) -> Result<(), DiscoveryError> {
        self.set(definitions, options, &mut |source| source.follow_in(router))
    }

    fn set(
        &self,
        definitions: &Definitions,
        options: &ProbeOptions,
        add: &mut dyn FnMut(AnySwitched) -> Result<(), Down>,
    ) -> Result<(), DiscoveryError> {
        let down = |down: Down| DiscoveryError::Other(down.to_string());
        // Each slot is consistent after every statement.
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Definitions { fixed, probed, file, names, .. } = definitions;
        if let Some(fixed) = changed(&mut slots.fixed, fixed) {
            let list = StaticList::new(fixed.iter().map(|(id, config)| (Some(*id), config.clone())))?;
            add(AnySwitched::Fixed(Switched::over(list, &mut slots.fixed, fixed, set_list))).map_err(down)?;
        }
        if let Some(probed) = changed(&mut slots.probed, probed) {
            let urls = ProbedUrls::named(probed.clone(), options.clone())?;
            let set = |urls: &mut ProbedUrls, probed: Vec<NamedWorker>| urls.set(probed);
            add(AnySwitched::Probed(Box::new(Switched::over(urls, &mut slots.probed, probed, set)))).map_err(down)?;
        }
        if let Some(file) = changed(&mut slots.file, file) {
            let watched = WatchedFile::new(file, options.clone())?;
            let set = |watched: &mut WatchedFile, file: PathBuf| watched.set(file);
            add(AnySwitched::File(Box::new(Switched::over(watched, &mut slots.file, file, set)))).map_err(down)?;
        }
        if let Some(names) = changed(&mut slots.names, names) {
            let dns = DnsNames::new(names)?.probing(options.clone());
            let set = |dns: &mut DnsNames, names: Vec<String>| dns.set(names);
            add(AnySwitched::Names(Box::new(Switched::over(dns, &mut slots.names, names, set)))).map_err(down)?;
        }
        #[cfg(feature = "kubernetes")]
        if let Some(pods) = changed(&mut slots.pods, &definitions.pods) {
            let source = PodSource::new(pods, options.clone());
            let set = |source: &mut PodSource, pods: KubernetesSettings| {
                source.set(&pods);
                Ok(())
            };
            add(AnySwitched::Pods(Box::new(Switched::over(source, &mut slots.pods, pods, set)))).map_err(down)?;
        }
        Ok(())
    }
}

/// Passes a changed definition to the slot's source. Returns the definition if no source exists yet.
fn changed<'a, D: Clone + PartialEq>(slot: &mut Slot<D>, definition: &'a Option<D>) -> Option<&'a D> {
    let Some(slot) = slot else { return definition.as_ref() };
    slot.send_if_modified(|known| {
        let is_new = known != definition;
        if is_new {
            known.clone_from(definition);
        }
        is_new
    });
    None
}

fn set_list(list: &mut StaticList, workers: WorkerMap) -> Result<(), DiscoveryError> {
    *list = StaticList::new(workers.into_iter().map(|(id, config)| (Some(id), config)))?;
    Ok(())
}

/// Probe options for engines of a model.
pub(crate) fn probe_options(settings: &ModelSettings, access: &WorkerAccess) -> ProbeOptions {
    let options = ProbeOptions::of(&settings.router).model(settings.upstream_name());
    ProbeOptions { client: Arc::new(access.clone()), ..options }
}

enum AnySwitched {
    Fixed(Switched<StaticList, WorkerMap>),
    Probed(Box<Switched<ProbedUrls, Vec<NamedWorker>>>),
    File(Box<Switched<WatchedFile, PathBuf>>),
    Names(Box<Switched<DnsNames, Vec<String>>>),
    #[cfg(feature = "kubernetes")]
    Pods(Box<Switched<PodSource, KubernetesSettings>>),
}

impl AnySwitched {
    fn add_to(self, builder: RouterBuilder) -> RouterBuilder {
        match self {
            Self::Fixed(source) => builder.discovery(source),
            Self::Probed(source) => builder.discovery(*source),
            Self::File(source) => builder.discovery(*source),
            Self::Names(source) => builder.discovery(*source),
            #[cfg(feature = "kubernetes")]
            Self::Pods(source) => builder.discovery(*source),
        }
    }

    fn follow_in(self, router: &Router) -> Result<(), Down> {
        match self {
            Self::Fixed(source) => router.follow(source),
            Self::Probed(source) => router.follow(*source),
            Self::File(source) => router.follow(*source),
            Self::Names(source) => router.follow(*source),
            #[cfg(feature = "kubernetes")]
            Self::Pods(source) => router.follow(*source),
        }
    }
}

/// A source with a replaceable definition. Without a definition it publishes an empty set.
struct Switched<S, D> {
    source: S,
    definition: watch::Receiver<Option<D>>,
    set: fn(&mut S, D) -> Result<(), DiscoveryError>,
    is_on: bool,
    /// Whether the empty set of a disabled source is still to be published.
    gives_none: bool,
}

impl<S: DiscoverySource, D: Clone + Send + Sync + 'static> Switched<S, D> {
    /// Puts a source with this definition into an empty slot.
    fn over(source: S, slot: &mut Slot<D>, definition: &D, set: fn(&mut S, D) -> Result<(), DiscoveryError>) -> Self {
        let (sender, definition) = watch::channel(Some(definition.clone()));
        *slot = Some(sender);
        Self { source, definition, set, is_on: true, gives_none: false }
    }

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

impl<S: DiscoverySource, D: Clone + Send + Sync + 'static> DiscoverySource for Switched<S, D> {
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
