//! Workers of Kubernetes pods: endpoints, ids and annotations.
//!
//! Maps pods to workers and reports pods with unusable fields. The reflected set of a watch is in [`ReflectedSet`].
//! Connections to the API server are the task of the actors.

mod reflected;

use core::net::{IpAddr, SocketAddr};
use std::collections::{BTreeMap, BTreeSet};

pub use reflected::{ReflectedEvent, ReflectedSet};

use super::{EngineError, FirstRankEvents, NamedWorker};
use crate::protocol::{KvEventsConfig, WorkerConfig, WorkerId};

/// Annotation of a pod: port of the KV event publisher of its first rank.
pub const KV_EVENTS_PORT: &str = "pointsman.dev/kv-events-port";

/// Annotation of a pod: port of the KV event replay socket of its first rank.
pub const KV_REPLAY_PORT: &str = "pointsman.dev/kv-replay-port";

/// Default port of vLLM's KV event publisher of rank 0. vLLM has no default replay socket.
pub const VLLM_KV_EVENTS_PORT: u16 = 5557;

/// Label of a pod: role in disaggregated serving, `prefill`, `decode` or `both`, as llm-d sets it.
pub const ROLE_LABEL: &str = "llm-d.ai/role";

/// Selection of pods by the label [`ROLE_LABEL`], for pools of disaggregated serving. Pods with the value `both` belong to
/// both roles.
///
/// ```
/// use pointsman::internals::discovery::PodRole;
///
/// assert_eq!(PodRole::Prefill.requirement(), "llm-d.ai/role in (prefill,both)");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodRole {
    /// Pods with the value `prefill` or `both`.
    Prefill,
    /// Pods with another value than `prefill`, or without the label.
    Decode,
}

impl PodRole {
    /// Requirement of a label selector.
    #[must_use]
    pub fn requirement(self) -> String {
        match self {
            Self::Prefill => format!("{ROLE_LABEL} in (prefill,both)"),
            Self::Decode => format!("{ROLE_LABEL} notin (prefill)"),
        }
    }
}

/// The fields of a pod that determine its workers.
///
/// ```
/// use pointsman::internals::discovery::{workers_of_pods, PodFacts, PodPorts};
///
/// let pod = PodFacts { ip: Some("fd00::7".to_owned()), is_ready: true, ..PodFacts::named("llm", "engine-0", "u1") };
/// let found = workers_of_pods([&pod], &PodPorts { targets: vec![8000], ..PodPorts::default() });
/// assert_eq!(found.workers[0].config.endpoint, "http://[fd00::7]:8000");
/// assert!(found.problems.is_empty());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodFacts {
    /// Namespace.
    pub namespace: String,
    /// Name, unique in the namespace at any time.
    pub name: String,
    /// Unique id of this incarnation of the name.
    pub uid: String,
    /// Annotations of this project.
    pub annotations: BTreeMap<String, String>,
    /// First address.
    pub ip: Option<String>,
    /// Whether the pod has the network of its machine, so that other processes may use its ports.
    pub has_host_network: bool,
    /// Whether the condition `Ready` is true.
    pub is_ready: bool,
    /// Whether the pod has a `deletionTimestamp`.
    pub is_terminating: bool,
    /// Whether all containers have ended for good (phase `Succeeded` or `Failed`).
    pub has_ended: bool,
}

impl PodFacts {
    /// A pod without address that is not ready.
    #[must_use]
    pub fn named(namespace: impl Into<String>, name: impl Into<String>, uid: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into(), uid: uid.into(), ..Self::default() }
    }

    /// Whether the pod may receive new requests.
    #[must_use]
    pub fn is_endpoint(&self) -> bool {
        self.is_ready && !self.is_terminating && !self.has_ended
    }

    /// Id of the worker at a target port.
    fn worker_id(&self, target: u16) -> WorkerId {
        let Self { namespace, name, uid, .. } = self;
        WorkerId::derived(&format!("kubernetes:{namespace}/{name}/{uid}:{target}"))
    }

    /// `port` unless the annotation names another one.
    fn annotated_port(&self, annotation: &str, port: Option<u16>) -> Result<Option<u16>, String> {
        let Some(value) = self.annotations.get(annotation) else { return Ok(port) };
        match value.parse::<u16>() {
            Ok(port) if port > 0 => Ok(Some(port)),
            Ok(_) | Err(_) => Err(format!("annotation {annotation} is {value:?}, must be a port from 1 to 65535")),
        }
    }
}

/// Ports of the pods of one source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodPorts {
    /// Ports for requests. Each is a worker. With several ports, port `n` serves data-parallel rank `n`.
    pub targets: Vec<u16>,
    /// Port of the KV event publisher of rank 0, for pods without the annotation [`KV_EVENTS_PORT`]. `None`: as probed,
    /// and for vLLM [`VLLM_KV_EVENTS_PORT`] if a publisher is there.
    pub kv_events: Option<u16>,
    /// Port of the replay socket of rank 0, for pods without the annotation [`KV_REPLAY_PORT`].
    pub kv_replay: Option<u16>,
}

/// Ids of the workers of the pods that exist and may not receive new requests: not ready, or terminating. Their requests
/// in progress may still run.
///
/// ```
/// use pointsman::internals::discovery::{draining_workers, PodFacts};
///
/// let pod = PodFacts { is_terminating: true, ..PodFacts::named("llm", "engine-0", "u1") };
/// assert_eq!(draining_workers([&pod], &[8000, 8001]).len(), 2);
/// ```
#[must_use]
pub fn draining_workers<'a>(pods: impl IntoIterator<Item = &'a PodFacts>, targets: &[u16]) -> BTreeSet<WorkerId> {
    let draining = pods.into_iter().filter(|pod| !pod.is_endpoint() && !pod.has_ended);
    draining.flat_map(|pod| targets.iter().map(|target| pod.worker_id(*target))).collect()
}

/// Workers of pods, and pods with unusable fields.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodWorkers {
    /// Workers, to be probed. Their ids are [derived](WorkerId::derived) from namespace, name and uid of the pod and the port, so
    /// a new pod at an old address is a new worker.
    pub workers: Vec<NamedWorker>,
    /// KV event endpoints of the first rank of each worker. The worker of target port `n` uses the ports plus `n`.
    pub events: BTreeMap<WorkerId, FirstRankEvents>,
    /// Pods with unusable fields.
    pub problems: Vec<EngineError>,
}

/// Workers of the pods that are endpoints.
#[must_use]
pub fn workers_of_pods<'a>(pods: impl IntoIterator<Item = &'a PodFacts>, ports: &PodPorts) -> PodWorkers {
    let mut all = PodWorkers::default();
    for pod in pods.into_iter().filter(|pod| pod.is_endpoint()) {
        match workers_of(pod, ports) {
            Ok(of_pod) => {
                for (id, worker, events) in of_pod {
                    all.workers.push(worker);
                    all.events.extend(events.map(|events| (id, events)));
                }
            }
            Err(reason) => {
                all.problems.push(EngineError { url: format!("pod {}/{}", pod.namespace, pod.name), reason });
            }
        }
    }
    all
}

type PodWorker = (WorkerId, NamedWorker, Option<FirstRankEvents>);

fn workers_of(pod: &PodFacts, ports: &PodPorts) -> Result<Vec<PodWorker>, String> {
    let mut workers = Vec::with_capacity(ports.targets.len());
    let ip = pod.ip.as_deref().ok_or("the pod is ready without an address")?;
    let ip: IpAddr = ip.parse().map_err(|_| format!("podIP is {ip:?}, must be an IP address"))?;
    let kv_events = pod.annotated_port(KV_EVENTS_PORT, ports.kv_events)?;
    let kv_replay = pod.annotated_port(KV_REPLAY_PORT, ports.kv_replay)?;
    for (rank, target) in (0..).zip(&ports.targets) {
        let url = format!("http://{}", SocketAddr::new(ip, *target));
        let endpoint = |port: u16| format!("tcp://{}", SocketAddr::new(ip, port));
        let events = |port: u16| {
            let replay_endpoint = kv_replay.map(endpoint);
            KvEventsConfig { endpoint: endpoint(port), replay_endpoint, topic: String::new() }.of_rank(rank)
        };
        let given = kv_events.map(|port| events(port).map(FirstRankEvents::Given));
        // Behind a shared address the port may belong to another engine.
        let default = || events(VLLM_KV_EVENTS_PORT).map(FirstRankEvents::IfPublished);
        let events = given.or_else(|| (!pod.has_host_network).then(default)).transpose();
        let events = events.map_err(|error| error.to_string())?;
        let worker = NamedWorker::at(&url, &WorkerConfig::at("")).map(NamedWorker::probed);
        let (id, worker) = (pod.worker_id(*target), worker.map_err(|error| error.to_string())?);
        workers.push((id, NamedWorker { id: Some(id), ..worker }, events));
    }
    Ok(workers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(name: &str, uid: &str, ip: &str) -> PodFacts {
        PodFacts { ip: Some(ip.to_owned()), is_ready: true, ..PodFacts::named("llm", name, uid) }
    }

    fn ports(targets: &[u16]) -> PodPorts {
        PodPorts { targets: targets.to_vec(), ..PodPorts::default() }
    }

    #[test]
    fn each_target_port_is_a_worker_with_the_event_port_of_its_rank() {
        let mut pod = ready("a", "1", "fd00::1");
        pod.annotations.insert(KV_EVENTS_PORT.to_owned(), "6000".to_owned());
        let with_replay = PodPorts { kv_events: Some(5557), kv_replay: Some(5657), ..ports(&[8000, 8001]) };
        let found = workers_of_pods([&pod], &with_replay);
        assert_eq!(found.problems, []);
        let seen: Vec<_> = found
            .workers
            .iter()
            .map(|worker| (&*worker.config.endpoint, &found.events[&worker.id.expect("an id")]))
            .collect();
        let expected = |n: u16| {
            FirstRankEvents::Given(KvEventsConfig {
                endpoint: format!("tcp://[fd00::1]:{}", 6000 + n),
                replay_endpoint: Some(format!("tcp://[fd00::1]:{}", 5657 + n)),
                topic: String::new(),
            })
        };
        assert_eq!(seen, [("http://[fd00::1]:8000", &expected(0)), ("http://[fd00::1]:8001", &expected(1))]);
        assert_ne!(found.workers[0].id, found.workers[1].id);
    }

    #[test]
    fn the_default_event_port_of_vllm_needs_an_address_of_the_pod() {
        let pod = ready("a", "1", "10.0.0.1");
        let events =
            |pod: &PodFacts| workers_of_pods([pod], &ports(&[8000, 8001])).events.into_values().collect::<Vec<_>>();
        let default = |n: u16| {
            let endpoint = format!("tcp://10.0.0.1:{}", VLLM_KV_EVENTS_PORT + n);
            FirstRankEvents::IfPublished(KvEventsConfig { endpoint, replay_endpoint: None, topic: String::new() })
        };
        let found = events(&pod);
        assert!(found.len() == 2 && found.contains(&default(0)) && found.contains(&default(1)), "{found:?}");
        assert_eq!(events(&PodFacts { has_host_network: true, ..pod }), []);
    }

    #[test]
    fn unusable_fields_are_reported_with_pod_and_value() {
        let mut pod = ready("a", "1", "10.0.0.1");
        pod.annotations.insert(KV_EVENTS_PORT.to_owned(), "0".to_owned());
        let found = workers_of_pods([&pod, &ready("b", "2", "10.0.0.2")], &ports(&[8000]));
        assert_eq!(found.workers.len(), 1, "other pods are not affected");
        let problem = found.problems[0].to_string();
        assert!(problem.starts_with("pod llm/a: ") && problem.contains("\"0\", must be a port"), "{problem}");
        let found = workers_of_pods([&ready("a", "1", "x")], &ports(&[8000]));
        assert!(found.problems[0].to_string().contains("podIP is \"x\""), "{:?}", found.problems);
    }
}
