//! Fields read from Kubernetes objects.

use std::borrow::Cow;
use std::collections::BTreeMap;

use kube::Resource;
use kube::core::{ApiResource, DynamicResourceScope, GroupVersionKind, ObjectMeta};
use serde::Deserialize;
use serde_json::Value;

use crate::discovery::{KV_EVENTS_PORT, KV_REPLAY_PORT, PodFacts};

/// A pod or an InferencePool, with the fields that are read. One type for both, because the watch and its decoders are
/// compiled for each type, and the complete type of pods has thousands of fields.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct WatchedObject {
    metadata: ObjectMeta,
    spec: Option<Spec>,
    status: Option<Status>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    host_network: Option<bool>,
    /// Of a pool, read later: an invalid pool is no failure of the watch.
    selector: Value,
    target_ports: Value,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    phase: Option<String>,
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    conditions: Option<Vec<Condition>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Condition {
    r#type: String,
    status: String,
}

impl Resource for WatchedObject {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn kind(resource: &ApiResource) -> Cow<'_, str> {
        resource.kind.as_str().into()
    }

    fn group(resource: &ApiResource) -> Cow<'_, str> {
        resource.group.as_str().into()
    }

    fn version(resource: &ApiResource) -> Cow<'_, str> {
        resource.version.as_str().into()
    }

    fn plural(resource: &ApiResource) -> Cow<'_, str> {
        resource.plural.as_str().into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

pub(super) fn pod_resource() -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Pod"))
}

pub(super) fn pod_facts(pod: WatchedObject) -> PodFacts {
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
        is_ready: conditions.iter().any(|condition| condition.r#type == "Ready" && condition.status == "True"),
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
struct PoolSelector {
    match_labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct TargetPort {
    number: u16,
}

/// # Errors
/// A pool without a usable specification, by name.
pub(super) fn pool_facts(pool: WatchedObject) -> Result<PoolFacts, String> {
    let name = pool.metadata.name.unwrap_or_default();
    let unusable = |error: serde_json::Error| format!("the InferencePool {name} cannot be used: {error}");
    let spec = pool.spec.unwrap_or_default();
    let selector: PoolSelector = serde_json::from_value(spec.selector).map_err(unusable)?;
    let ports: Vec<TargetPort> = serde_json::from_value(spec.target_ports).map_err(unusable)?;
    if selector.match_labels.is_empty() || ports.is_empty() {
        return Err(format!("the InferencePool {name} cannot be used: no selector.matchLabels or no targetPorts"));
    }
    let labels: Vec<String> = selector.match_labels.iter().map(|(label, value)| format!("{label}={value}")).collect();
    Ok(PoolFacts { selector: labels.join(","), ports: ports.iter().map(|port| port.number).collect() })
}
