//! Fields read from Kubernetes objects.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde::Deserialize;

use crate::discovery::{KV_EVENTS_PORT, KV_REPLAY_PORT, PodFacts};

pub(super) fn pod_facts(pod: Pod) -> PodFacts {
    let status = pod.status.unwrap_or_default();
    // Other annotations may change at any time.
    let mut annotations = pod.metadata.annotations.unwrap_or_default();
    annotations.retain(|name, _| [KV_EVENTS_PORT, KV_REPLAY_PORT].contains(&name.as_str()));
    let has_ended = status.phase.as_deref().is_some_and(|phase| ["Succeeded", "Failed"].contains(&phase));
    let conditions = status.conditions.unwrap_or_default();
    PodFacts {
        namespace: pod.metadata.namespace.unwrap_or_default(),
        name: pod.metadata.name.unwrap_or_default(),
        uid: pod.metadata.uid.unwrap_or_default(),
        annotations,
        ip: status.pod_ip,
        is_ready: conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True"),
        is_terminating: pod.metadata.deletion_timestamp.is_some(),
        has_ended,
        has_host_network: pod.spec.and_then(|spec| spec.host_network).unwrap_or(false),
    }
}

/// The fields of an InferencePool that determine its endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PoolFacts {
    /// Label selector in the notation of the API server.
    pub(super) selector: String,
    pub(super) ports: Vec<u16>,
}

/// `inference.networking.k8s.io/v1`, Gateway API Inference Extension.
pub(super) fn pool_resource() -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("inference.networking.k8s.io", "v1", "InferencePool"))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PoolSpec {
    selector: PoolSelector,
    target_ports: Vec<TargetPort>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PoolSelector {
    match_labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct TargetPort {
    number: u16,
}

/// # Errors
/// A pool without a usable specification, by name.
pub(super) fn pool_facts(pool: DynamicObject) -> Result<PoolFacts, String> {
    let name = pool.metadata.name.unwrap_or_default();
    let spec = pool.data.get("spec").cloned().unwrap_or_default();
    let spec: PoolSpec =
        serde_json::from_value(spec).map_err(|error| format!("the InferencePool {name} cannot be used: {error}"))?;
    if spec.selector.match_labels.is_empty() || spec.target_ports.is_empty() {
        return Err(format!("the InferencePool {name} cannot be used: no selector.matchLabels or no targetPorts"));
    }
    let labels: Vec<String> =
        spec.selector.match_labels.iter().map(|(label, value)| format!("{label}={value}")).collect();
    Ok(PoolFacts { selector: labels.join(","), ports: spec.target_ports.iter().map(|port| port.number).collect() })
}
