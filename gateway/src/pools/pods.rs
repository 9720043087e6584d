//! Pods of a Kubernetes cluster as workers of a model.

use pointsman::{KubernetesPods, PodRole, PodSelection, ProbeOptions};

use crate::settings::{KubernetesSettings, PodRoleChoice};

/// The pods that the settings select.
pub(crate) fn watched_pods(settings: KubernetesSettings, options: ProbeOptions) -> KubernetesPods {
    let selection = match settings.inference_pool {
        Some(pool) => PodSelection::InferencePool(pool),
        None => PodSelection::Labels { selector: settings.selector.unwrap_or_default(), ports: settings.ports },
    };
    let mut pods = KubernetesPods::new(selection, options);
    if let Some(namespace) = &settings.namespace {
        pods = pods.namespace(namespace);
    }
    if let Some(role) = settings.role {
        pods = pods.role(match role {
            PodRoleChoice::Prefill => PodRole::Prefill,
            PodRoleChoice::Decode => PodRole::Decode,
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
