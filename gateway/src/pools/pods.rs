//! Pods of a Kubernetes cluster as workers of a model.

use pointsman::config::PoolRole;
use pointsman::{KubernetesPods, ProbeOptions};

use crate::settings::{KubernetesSettings, PodRoleChoice};

/// The pods that the settings select.
pub(crate) fn watched_pods(settings: KubernetesSettings, options: ProbeOptions) -> KubernetesPods {
    let mut pods = match settings.inference_pool {
        Some(pool) => KubernetesPods::of_inference_pool(pool, options),
        None => KubernetesPods::labelled(settings.selector.unwrap_or_default(), settings.ports, options),
    };
    if let Some(namespace) = &settings.namespace {
        pods = pods.namespace(namespace);
    }
    if let Some(role) = settings.role {
        pods = pods.role(match role {
            PodRoleChoice::Prefill => PoolRole::Prefill,
            PodRoleChoice::Decode => PoolRole::Decode,
        });
    }
    let port = |port: Option<u32>| port.and_then(|port| u16::try_from(port).ok());
    if let Some(events) = port(settings.kv_events_port) {
        pods = pods.kv_event_ports(events, port(settings.kv_replay_port));
    }
    match &settings.kubeconfig_file {
        Some(file) => pods.kubeconfig(file),
        None => pods,
    }
}
