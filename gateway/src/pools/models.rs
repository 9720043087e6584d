//! Served models and their routers.
//!
//! Resolves names: a configured name takes precedence over an adapter name, and of two models with an equal adapter
//! name the first. Routers select ranks; [`sources`](super::sources) provides workers.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use ahash::AHashMap;
use parking_lot::{Mutex, MutexGuard};
use pointsman::{ReplicaBus, Router, RouterConfig, WorkerEntry};

use super::disaggregation::PrefillPool;
use super::model::{Model, ModelError, PrefillSide, SHUTDOWN_WAIT};
use crate::net::upstream::Upstream;
use crate::observe::clock::unix_time;
use crate::settings::{ModelRole, ModelSettings, role_of};

/// All models by name.
pub(crate) struct Models {
    all: Vec<Arc<Model>>,
    by_name: AHashMap<String, usize>,
    /// Start of the gateway in Unix seconds, the creation date of its models.
    pub(crate) created: u64,
    adapters: Mutex<Adapters>,
    /// Bus to other gateways, for all routers.
    bus: Option<Arc<dyn ReplicaBus>>,
}

/// Adapters of the workers.
#[derive(Default)]
struct Adapters {
    /// Worker lists of the last scan, by model.
    seen: Vec<Arc<[WorkerEntry]>>,
    by_name: AHashMap<String, usize>,
    /// Adapter names of two models that have been logged.
    shared: BTreeSet<String>,
}

impl Models {
    /// `snapshots` is the directory of index snapshots. The routers share their load over `bus`.
    ///
    /// # Errors
    /// A model that fails to start; models started before it are stopped.
    pub(crate) async fn start(
        settings: &[ModelSettings],
        upstream: &Upstream,
        snapshots: Option<&Path>,
        bus: Option<Arc<dyn ReplicaBus>>,
    ) -> Result<Self, ModelError> {
        Self::load(None, settings, upstream, snapshots, (bus, unix_time().as_secs())).await
    }

    /// Models for new settings: served models keep their routers, others are started. Served models stay unchanged
    /// until [`Model::follow_settings`].
    ///
    /// # Errors
    /// As [`Self::start`].
    pub(crate) async fn reloaded(
        &self,
        settings: &[ModelSettings],
        upstream: &Upstream,
        snapshots: Option<&Path>,
    ) -> Result<Self, ModelError> {
        Self::load(Some(&self.all), settings, upstream, snapshots, (self.bus.clone(), self.created)).await
    }

    async fn load(
        known: Option<&[Arc<Model>]>,
        settings: &[ModelSettings],
        upstream: &Upstream,
        snapshots: Option<&Path>,
        (bus, created): (Option<Arc<dyn ReplicaBus>>, u64),
    ) -> Result<Self, ModelError> {
        let mut started = Vec::new();
        let index_bytes_max = RouterConfig::index_bytes_max(Router::memory_bytes(), settings.len());
        let all = async {
            let mut all = Vec::new();
            for new in settings {
                let role = role_of(new, settings);
                let is_same = |model: &&Arc<Model>| model.settings.name == new.name && model.role == role.0;
                if let Some(model) = known.and_then(|known| known.iter().find(is_same)) {
                    all.push(model.with(new).await?);
                    continue;
                }
                // A reload does not wait for workers, because other models are being served.
                let wanted = if known.is_none() { new.router.min_initial_workers } else { 0 };
                let model = Model::start(new, role, upstream, snapshots, bus.as_ref(), wanted, index_bytes_max).await?;
                started.push(model.router.clone());
                all.push(model);
            }
            Ok::<_, ModelError>(all)
        };
        let models = all.await.and_then(|all| Self::of(all, bus.clone(), created));
        if models.is_err() {
            for router in started {
                router.shutdown(SHUTDOWN_WAIT).await;
            }
        }
        models
    }

    fn of(all: Vec<Model>, bus: Option<Arc<dyn ReplicaBus>>, created: u64) -> Result<Self, ModelError> {
        let all = linked(all)?;
        let mut by_name = AHashMap::new();
        // The model of a prefill pool serves no client.
        let of_clients = all.iter().enumerate().filter(|(_, model)| model.role != ModelRole::Prefill);
        for (n, model) in of_clients {
            for name in std::iter::once(&model.settings.name).chain(&model.settings.aliases) {
                by_name.insert(name.clone(), n);
            }
        }
        Ok(Self { all, by_name, created, adapters: Mutex::default(), bus })
    }

    pub(crate) fn all(&self) -> &[Arc<Model>] {
        &self.all
    }

    /// Resolves `name` to a model, and its adapter if the name is an adapter's.
    pub(crate) fn find<'a>(&self, name: &'a str) -> Option<(&Arc<Model>, Option<&'a str>)> {
        if let Some(n) = self.by_name.get(name) {
            return Some((&self.all[*n], None));
        }
        let n = *self.adapters().by_name.get(name)?;
        Some((&self.all[n], Some(name)))
    }

    /// The model with this name or alias, whether clients can request it or not.
    pub(crate) fn named(&self, name: &str) -> Option<&Arc<Model>> {
        let is_named = |model: &&Arc<Model>| {
            model.settings.name == name || model.settings.aliases.iter().any(|alias| alias == name)
        };
        self.all.iter().find(is_named)
    }

    /// Models that clients can request.
    pub(crate) fn of_clients(&self) -> impl Iterator<Item = &Arc<Model>> {
        self.all.iter().filter(|model| model.role != ModelRole::Prefill)
    }

    /// The only model for clients, if there is exactly one.
    pub(crate) fn only(&self) -> Option<&Arc<Model>> {
        let mut models = self.of_clients();
        models.next().filter(|_| models.next().is_none())
    }

    /// Adapter names with their models, sorted by name.
    pub(crate) fn adapter_names(&self) -> Vec<(String, &Arc<Model>)> {
        let adapters = self.adapters();
        let mut names: Vec<_> = adapters.by_name.keys().cloned().collect();
        names.sort_unstable();
        names.into_iter().map(|name| (adapters.by_name[&name], name)).map(|(n, name)| (name, &self.all[n])).collect()
    }

    /// Current adapters of the workers.
    fn adapters(&self) -> MutexGuard<'_, Adapters> {
        // The table is replaced as a whole.
        let mut adapters = self.adapters.lock();
        let workers = || self.all.iter().map(|model| model.router.workers());
        let is_current = adapters.seen.len() == self.all.len()
            && adapters.seen.iter().zip(workers()).all(|(seen, now)| Arc::ptr_eq(seen, &now));
        if !is_current {
            let seen: Vec<_> = workers().collect();
            adapters.read(seen, &self.by_name, &self.all);
        }
        adapters
    }

    pub(crate) async fn shutdown(&self) {
        for model in &self.all {
            model.router.clone().shutdown(SHUTDOWN_WAIT).await;
        }
    }
}

impl Adapters {
    fn read(&mut self, seen: Vec<Arc<[WorkerEntry]>>, names: &AHashMap<String, usize>, models: &[Arc<Model>]) {
        let mut by_name: AHashMap<String, usize> = AHashMap::new();
        let serves_clients = |(n, _): &(usize, _)| models[*n].role != ModelRole::Prefill;
        for (n, workers) in seen.iter().enumerate().filter(serves_clients) {
            for adapter in workers.iter().flat_map(|worker| &worker.config.lora_adapters) {
                let first = names.get(adapter).or_else(|| by_name.get(adapter)).copied();
                match first {
                    None => drop(by_name.insert(adapter.clone(), n)),
                    Some(first) if first == n && !names.contains_key(adapter) => {}
                    Some(first) => {
                        if self.shared.insert(adapter.clone()) {
                            let (model, first) = (&models[n].settings.name, &models[first].settings.name);
                            tracing::warn!(adapter, model, "requests for this adapter go to model {first:?}");
                        }
                    }
                }
            }
        }
        (self.seen, self.by_name) = (seen, by_name);
    }
}

/// The models, those of the role `Decode` with their prefill pools.
fn linked(all: Vec<Model>) -> Result<Vec<Arc<Model>>, ModelError> {
    let prefill: Vec<Arc<Model>> =
        all.iter().filter(|model| model.role == ModelRole::Prefill).cloned().map(Arc::new).collect();
    let link = |mut model: Model| {
        let name = &model.settings.name;
        if let Some(shared) = prefill.iter().find(|prefill| prefill.settings.name == *name) {
            return Ok(Arc::clone(shared));
        }
        let Some(settings) = model.settings.disaggregation.clone() else { return Ok(Arc::new(model)) };
        if let Some(pool) = prefill.iter().find(|pool| pool.settings.name == settings.prefill) {
            let transfers = PrefillPool::new(pool.router.clone(), model.router.clone(), settings);
            let transfers = transfers.map_err(|errors| ModelError::new(name, errors))?;
            model.prefill = Some(PrefillSide { model: Arc::clone(pool), pool: Arc::new(transfers) });
        }
        Ok(Arc::new(model))
    };
    all.into_iter().map(link).collect()
}
