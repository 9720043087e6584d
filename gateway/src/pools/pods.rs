//! Pods of a Kubernetes cluster as workers of a model.

use pointsman::protocol::WorkerMap;
use pointsman::{DiscoveryError, DiscoverySource, KubernetesPods, PodRole, PodSelection, ProbeOptions};

use crate::settings::{KubernetesSettings, PodRoleChoice};

/// Watched pods with replaceable settings.
pub(crate) struct PodSource {
    options: ProbeOptions,
    pods: KubernetesPods,
}

impl PodSource {
    pub(crate) fn new(settings: &KubernetesSettings, options: ProbeOptions) -> Self {
        Self { pods: watched(settings, options.clone()), options }
    }

    /// Watches other pods. The former workers stay until their set is known.
    pub(crate) fn set(&mut self, settings: &KubernetesSettings) {
        self.pods = watched(settings, self.options.clone());
    }
}

fn watched(settings: &KubernetesSettings, options: ProbeOptions) -> KubernetesPods {
    let KubernetesSettings {
        namespace,
        selector,
        ports,
        inference_pool,
        role,
        kv_events_port,
        kv_replay_port,
        kubeconfig_file,
    } = settings;
    let selection = match inference_pool {
        Some(pool) => PodSelection::InferencePool(pool.clone()),
        None => PodSelection::Labels { selector: selector.clone().unwrap_or_default(), ports: ports.clone() },
    };
    let mut pods = KubernetesPods::new(selection, options);
    if let Some(namespace) = namespace {
        pods = pods.namespace(namespace);
    }
    if let Some(role) = role {
        pods = pods.role(match role {
            PodRoleChoice::Prefill => PodRole::Prefill,
            PodRoleChoice::Decode => PodRole::Decode,
        });
    }
    let port = |port: Option<u32>| port.and_then(|port| u16::try_from(port).ok());
    if let Some(events) = port(*kv_events_port) {
        pods = pods.kv_event_ports(events, port(*kv_replay_port));
    }
    match kubeconfig_file {
        Some(file) => pods.kubeconfig(file),
        None => pods,
    }
}

impl DiscoverySource for PodSource {
    fn name(&self) -> String {
        self.pods.name()
    }

    async fn next(&mut self) -> Option<Result<WorkerMap, DiscoveryError>> {
        self.pods.next().await
    }

    fn rewind(&mut self) {
        self.pods.rewind();
    }
}
