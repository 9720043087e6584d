//! Discovery of workers by watching the pods of a Kubernetes cluster.
//!
//! Watches pods by label, or an InferencePool and the pods that it selects. Ready pods are probed for their
//! configuration. A pod that is no longer an endpoint is drained, and a deleted one leaves the set, both without waiting
//! for probes.

mod client;
mod objects;
mod watch;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use kube::runtime::watcher;
use kube::{Api, Client};
use tokio::time::{Instant, sleep_until};

use super::prober::{ProbeOptions, Prober};
use super::source::DiscoverySource;
use crate::config::PoolRole;
use crate::discovery::{
    Changes, DiscoveryError, EngineError, PodFacts, PodPorts, PodRole, PodWorkers, draining_workers, workers_of_pods,
};
use crate::protocol::{WorkerId, WorkerMap};
use client::ApiAccess;
use objects::{PoolFacts, pod_facts, pod_resource, pool_facts, pool_resource};
use watch::ObjectWatch;

/// Selection of the pods of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
enum PodSelection {
    /// Pods by a label selector in the notation of `kubectl --selector`.
    Labels {
        /// The selector.
        selector: String,
        /// Ports for requests, as in [`PodPorts::targets`].
        ports: Vec<u16>,
    },
    /// Pods and ports of the InferencePool (`inference.networking.k8s.io/v1`) of this name.
    InferencePool(String),
}

/// Pods of one namespace. Each ready pod without `deletionTimestamp` is a worker per port, probed periodically for its
/// configuration. Workers of other pods are drained until the pod is deleted. While the API server does not respond, the
/// last received pods stay.
///
/// The address and the credentials of the API server come from the kubeconfig file ([`kubeconfig`](Self::kubeconfig),
/// `KUBECONFIG`, `~/.kube/config`), or from the service account of the pod.
///
/// ```
/// use pointsman::{KubernetesPods, ProbeOptions, RouterConfig};
///
/// let options = ProbeOptions::of(&RouterConfig::default());
/// let source = KubernetesPods::labelled("app=engine", vec![8000], options).namespace("llm");
/// ```
pub struct KubernetesPods {
    selection: PodSelection,
    namespace: Option<String>,
    role: Option<PodRole>,
    kv_events_port: Option<u16>,
    kv_replay_port: Option<u16>,
    access: ApiAccess,
    watches: Option<Watches>,
    prober: Prober,
    next_at: Instant,
    engine_errors: Vec<EngineError>,
    /// Last published set.
    published: Option<WorkerMap>,
    changes: Changes,
}

impl KubernetesPods {
    /// Pods by a label selector in the notation of `kubectl --selector`, with these ports for requests, in the default
    /// namespace of the kubeconfig context or of the service account.
    #[must_use]
    pub fn labelled(selector: impl Into<String>, ports: Vec<u16>, options: ProbeOptions) -> Self {
        Self::new(PodSelection::Labels { selector: selector.into(), ports }, options)
    }

    /// Pods and ports of the InferencePool (`inference.networking.k8s.io/v1`) of this name, likewise.
    #[must_use]
    pub fn of_inference_pool(name: impl Into<String>, options: ProbeOptions) -> Self {
        Self::new(PodSelection::InferencePool(name.into()), options)
    }

    fn new(selection: PodSelection, options: ProbeOptions) -> Self {
        Self {
            selection,
            namespace: None,
            role: None,
            kv_events_port: None,
            kv_replay_port: None,
            access: ApiAccess::default(),
            watches: None,
            prober: Prober::new(options),
            next_at: Instant::now(),
            engine_errors: Vec::new(),
            published: None,
            changes: Changes::default(),
        }
    }

    /// Sets the namespace.
    #[must_use]
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// Selects only pods whose label `llm-d.ai/role` fits a pool of this role; all for an aggregated one.
    #[must_use]
    pub fn role(mut self, role: PoolRole) -> Self {
        self.role = match role {
            PoolRole::Aggregated => None,
            PoolRole::Prefill => Some(PodRole::Prefill),
            PoolRole::Decode => Some(PodRole::Decode),
        };
        self
    }

    /// Sets the KV event ports of rank 0, for pods without annotations: of the publisher, and of the replay socket if
    /// there is one. By default the probe of the engine determines them. vLLM before 0.31 does not report them; its
    /// default port is used if a publisher is there.
    #[must_use]
    pub fn kv_event_ports(mut self, events: u16, replay: Option<u16>) -> Self {
        (self.kv_events_port, self.kv_replay_port) = (Some(events), replay);
        self
    }

    /// Sets the client of the API server.
    #[must_use]
    pub fn client(mut self, client: Client) -> Self {
        self.access = ApiAccess::of_client(client);
        self
    }

    /// Sets the kubeconfig file. It is read when the source starts, and again after an error in it.
    #[must_use]
    pub fn kubeconfig(mut self, file: impl Into<PathBuf>) -> Self {
        self.access = ApiAccess::of_file(file.into());
        self
    }

    /// The watches, started on first use.
    async fn connect(&mut self) -> Result<(), DiscoveryError> {
        if self.watches.is_some() {
            return Ok(());
        }
        let client = self.access.client().await?;
        let namespace = self.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
        self.watches = Some(Watches::new(client, &namespace, &self.selection, self.role));
        Ok(())
    }

    /// The workers of the watched objects.
    fn wanted(&self) -> Option<Wanted> {
        let watches = self.watches.as_ref()?;
        let targets = watches.targets(&self.selection)?;
        let ports = PodPorts { targets, kv_events: self.kv_events_port, kv_replay: self.kv_replay_port };
        let pods = watches.pods.as_ref()?.set.objects();
        let found = workers_of_pods(pods.values(), &ports);
        Some(Wanted { found, draining: draining_workers(pods.values(), &ports.targets) })
    }

    /// The published workers of pods that still exist, with drains for pods that are no endpoints any more.
    fn remaining(&self, wanted: &Wanted) -> WorkerMap {
        let ids: BTreeSet<WorkerId> = wanted.found.workers.iter().filter_map(|worker| worker.id).collect();
        let mut remaining = self.published.clone().unwrap_or_default();
        remaining.retain(|id, _| ids.contains(id) || wanted.draining.contains(id));
        for (id, config) in &mut remaining {
            config.drain |= wanted.draining.contains(id);
        }
        remaining
    }

    /// Reports a new set, or the last one, with the errors of watches, pods and engines.
    fn report(
        &mut self,
        found: Option<WorkerMap>,
        errors: Vec<EngineError>,
    ) -> Option<Result<WorkerMap, DiscoveryError>> {
        let watch_error = self.watches.as_ref().and_then(Watches::error);
        let complaint = watch_error.or((!errors.is_empty()).then_some(DiscoveryError::Engines(errors)));
        if found.is_some() {
            self.published = found;
        }
        self.changes.look(self.published.clone(), complaint)
    }

    /// Advances watches and probes by one step.
    async fn step(&mut self) -> Option<Result<WorkerMap, DiscoveryError>> {
        if let Err(error) = self.connect().await {
            return self.changes.look(None, Some(error));
        }
        let Some(wanted) = self.wanted() else {
            if let Some(watches) = &mut self.watches {
                watches.advance().await;
            }
            return self.report(None, Vec::new());
        };
        let mut remaining = self.remaining(&wanted);
        let PodWorkers { workers: wanted, events, mut problems } = wanted.found;
        if self.published.as_ref().is_some_and(|published| *published != remaining) {
            problems.append(&mut self.engine_errors.clone());
            return self.report(Some(remaining), problems);
        }
        let watches = self.watches.as_mut()?;
        let seen = watches.state();
        while Instant::now() < self.next_at {
            tokio::select! {
                biased;
                () = watches.advance() => if watches.state().differs(&seen) {
                    self.next_at = Instant::now();
                    problems.append(&mut self.engine_errors.clone());
                    return self.report(None, problems);
                },
                () = sleep_until(self.next_at) => {}
            }
        }
        let interval = self.prober.options.interval;
        let answer = {
            let mut probes = pin!(self.prober.ask_with(&wanted, &events));
            loop {
                tokio::select! {
                    biased;
                    // Additions wait for the end of the round. Removals and errors do not.
                    () = watches.advance() => if !watches.state().extends(&seen) {
                        break None;
                    },
                    answer = &mut probes => break Some(answer),
                }
            }
        };
        let is_latest = !watches.state().differs(&seen);
        self.next_at = Instant::now() + if is_latest { interval } else { Duration::ZERO };
        let Some((workers, errors)) = answer else {
            problems.append(&mut self.engine_errors.clone());
            return self.report(None, problems);
        };
        self.engine_errors.clone_from(&errors);
        problems.extend(errors);
        // A pod that is ready again drains until its engine has responded.
        remaining.retain(|_, config| config.drain);
        remaining.extend(workers.into_iter().filter_map(|(id, config)| Some((id?, config))));
        self.report(Some(remaining), problems)
    }
}

impl DiscoverySource for KubernetesPods {
    fn name(&self) -> String {
        let namespace = self.namespace.as_deref().map(|namespace| format!("{namespace}/")).unwrap_or_default();
        let role = self.role.map(|role| format!(",{}", role.requirement())).unwrap_or_default();
        match &self.selection {
            PodSelection::Labels { selector, .. } => format!("kubernetes:{namespace}{selector}{role}"),
            PodSelection::InferencePool(pool) => format!("kubernetes:{namespace}inferencepool/{pool}{role}"),
        }
    }

    async fn next(&mut self) -> Option<Result<WorkerMap, DiscoveryError>> {
        loop {
            if let Some(complaint) = self.changes.pending() {
                return Some(Err(complaint));
            }
            let news = self.step().await;
            if news.is_some() {
                return news;
            }
        }
    }

    fn rewind(&mut self) {
        self.changes.forget();
        self.next_at = Instant::now();
    }
}

/// The watches of one source.
struct Watches {
    client: Client,
    namespace: String,
    role: Option<PodRole>,
    /// Watch of the pool, if the selection is one.
    pool: Option<ObjectWatch<Result<PoolFacts, String>>>,
    /// Last usable specification of the pool. An unusable or deleted pool is reported and changes nothing.
    last_pool: Option<PoolFacts>,
    /// Absent until the selector is known.
    pods: Option<ObjectWatch<PodFacts>>,
}

/// Workers of watched pods.
struct Wanted {
    /// Workers of endpoints, to be probed.
    found: PodWorkers,
    /// Workers of other pods, to be drained if they have been published.
    draining: BTreeSet<WorkerId>,
}

/// The watched state that determines workers and errors.
struct WatchState {
    endpoints: BTreeSet<PodFacts>,
    /// Names and uids of the pods that have not ended.
    existing: BTreeSet<(String, String)>,
    pool: Option<PoolFacts>,
    error: Option<DiscoveryError>,
}

impl WatchState {
    /// Whether the workers or the errors of this state differ from those of `earlier`.
    fn differs(&self, earlier: &Self) -> bool {
        !self.extends(earlier) || self.endpoints != earlier.endpoints
    }

    /// Whether this state differs from `earlier` at most by further pods.
    fn extends(&self, earlier: &Self) -> bool {
        self.pool == earlier.pool
            && self.error == earlier.error
            && earlier.endpoints.is_subset(&self.endpoints)
            && earlier.existing.is_subset(&self.existing)
    }
}

impl Watches {
    fn new(client: Client, namespace: &str, selection: &PodSelection, role: Option<PodRole>) -> Self {
        let namespace_owned = namespace.to_owned();
        let mut watches = Self { client, namespace: namespace_owned, role, pool: None, last_pool: None, pods: None };
        match selection {
            PodSelection::Labels { selector, .. } => watches.watch_pods(selector),
            PodSelection::InferencePool(name) => {
                let api = Api::namespaced_with(watches.client.clone(), namespace, &pool_resource());
                let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
                let resource = format!("inferencepool {namespace}/{name}");
                watches.pool = Some(ObjectWatch::new(api, config, resource, pool_facts));
            }
        }
        watches
    }

    fn watch_pods(&mut self, selector: &str) {
        let role = self.role.map(PodRole::requirement);
        let requirements: Vec<&str> = [selector].into_iter().chain(role.as_deref()).collect();
        let config = watcher::Config::default().labels(&requirements.join(","));
        match &mut self.pods {
            Some(pods) => pods.restart(config),
            None => {
                let api = Api::namespaced_with(self.client.clone(), &self.namespace, &pod_resource());
                let resource = format!("pods of namespace {}", self.namespace);
                self.pods = Some(ObjectWatch::new(api, config, resource, pod_facts));
            }
        }
    }

    /// Target ports, once ports and pods are known. Unknown after a change of the selector, until the new list is
    /// complete.
    fn targets(&self, selection: &PodSelection) -> Option<Vec<u16>> {
        self.pods.as_ref().filter(|pods| pods.is_current)?;
        match selection {
            PodSelection::Labels { ports, .. } => Some(ports.clone()),
            PodSelection::InferencePool(_) => Some(self.last_pool.as_ref()?.ports.clone()),
        }
    }

    fn error(&self) -> Option<DiscoveryError> {
        let of_pods = || self.pods.as_ref()?.error.clone();
        let Some(pool) = &self.pool else { return of_pods() };
        let of_pool = pool.error.clone().or_else(|| match pool.set.objects().values().next() {
            Some(Err(reason)) => Some(DiscoveryError::Other(reason.clone())),
            None if pool.is_current => Some(DiscoveryError::Other(format!("{} does not exist", pool.resource))),
            Some(Ok(_)) | None => None,
        });
        of_pool.or_else(of_pods)
    }

    fn state(&self) -> WatchState {
        let pods = || self.pods.iter().flat_map(|pods| pods.set.objects().values());
        let endpoints = pods().filter(|pod| pod.is_endpoint()).cloned().collect();
        let existing = pods().filter(|pod| !pod.has_ended).map(|pod| (pod.name.clone(), pod.uid.clone())).collect();
        WatchState { endpoints, existing, pool: self.last_pool.clone(), error: self.error() }
    }

    /// Applies the next event of a watch, and a new selector of the pool. Cancel-safe.
    async fn advance(&mut self) {
        match (&mut self.pool, &mut self.pods) {
            (Some(pool), Some(pods)) => tokio::select! {
                biased;
                () = pool.advance() => {}
                () = pods.advance() => {}
            },
            (Some(pool), None) => pool.advance().await,
            (None, Some(pods)) => pods.advance().await,
            (None, None) => std::future::pending().await,
        }
        let pool = self.pool.as_ref().and_then(|pool| pool.set.objects().values().next());
        let Some(Ok(facts)) = pool.cloned() else { return };
        let selector = self.last_pool.as_ref().map(|pool| &pool.selector);
        let is_new = selector != Some(&facts.selector);
        if is_new {
            self.watch_pods(&facts.selector);
        }
        self.last_pool = Some(facts);
    }
}
