//! Process limits: descriptors and memory, and the resulting limits for clients.
//!
//! Raises the descriptor limit, and reserves descriptors for operators, probes, events and workers. The listener and
//! the request budget enforce the limits.

use std::fmt;

use pointsman::{Router, RouterConfig};

use super::cores::COUNT;
use crate::observe::process;
use crate::settings::Settings;

/// Divisor of the memory for requests. A request in flight takes up to four times its body: the received body,
/// the edited body, and the prompt as text and as tokens.
const BODY_MEMORY_SHARE: u64 = 8;

/// Minimum budget, in bodies of maximum length.
const BODIES_MIN: u64 = 4;

/// Assumed memory if the system does not report it.
const MEMORY_BYTES_UNKNOWN: u64 = 8 << 30;

/// Limit of operator connections.
pub(crate) const ADMIN_CONNECTIONS_MAX: u32 = 64;

/// Limit of concurrent requests of one.
pub(crate) const ADMIN_STREAMS_MAX: u32 = 8;

/// Connections above the client limit that receive one response and are closed.
pub(crate) const OVERFLOW_CONNECTIONS_MAX: u32 = 32;

/// Descriptors of the process itself: log, listeners, timers, reloaded files.
const OWN_DESCRIPTORS: u64 = 32;

/// Descriptors of the runtime of a core: events, wake-ups and signals.
const DESCRIPTORS_PER_CORE: u64 = 3;

/// Descriptors per worker besides requests: three for the KV events of each of two ranks, health probe, load,
/// tokenizer.
const DESCRIPTORS_PER_WORKER: u64 = 10;

/// Workers reserved for a model with discovery.
const DISCOVERED_WORKERS: u64 = 8;

/// Descriptors per client connection: its own and the one to the worker.
const DESCRIPTORS_PER_CONNECTION: u64 = 2;

/// Minimum client connections, regardless of descriptors.
const CONNECTIONS_MIN: u64 = 8;

/// Maximum requests in flight without a limit of descriptors.
const REQUESTS_MAX: u64 = 1 << 23;

/// Process limits and derived limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessLimits {
    /// Memory budget of all requests in flight, in bytes.
    pub request_budget_bytes: u64,
    /// Origin of that value.
    request_budget_origin: String,
    /// Memory limit of the index of a model without `index.bytes_max`, in bytes.
    pub index_bytes_max: u64,
    /// Maximum open descriptors; `None` without a limit.
    pub descriptors: Option<u64>,
    /// Client connections: `connections_max`, or fewer if descriptors are short.
    pub connections_max: u32,
    /// Requests in flight: one connection to a worker each.
    pub requests_max: u64,
    connections_wanted: u32,
    descriptors_wanted: u64,
}

impl ProcessLimits {
    /// Raises the descriptor limit to its maximum and derives the other limits.
    #[must_use]
    pub fn of(settings: &Settings) -> Self {
        Self::derive(settings, Router::memory_bytes(), raise_descriptors())
    }

    fn derive(settings: &Settings, memory_bytes: Option<u64>, descriptors: Option<u64>) -> Self {
        let gateway = &settings.gateway;
        let (request_budget_bytes, request_budget_origin) = match (gateway.request_budget_bytes, memory_bytes) {
            (Some(bytes), _) => (bytes, "gateway.request_budget_bytes".to_owned()),
            (None, memory) => {
                let share = memory.unwrap_or(MEMORY_BYTES_UNKNOWN) / BODY_MEMORY_SHARE;
                let origin = match memory {
                    Some(bytes) => format!("an eighth of {bytes} bytes of memory"),
                    None => "the memory's size is unknown".to_owned(),
                };
                (share.max(BODIES_MIN * gateway.body_bytes_max), origin)
            }
        };
        let reserve = reserved_descriptors(settings);
        let wanted = u64::from(gateway.connections_max);
        let free =
            descriptors.map(|limit| limit.saturating_sub(reserve).max(DESCRIPTORS_PER_CONNECTION * CONNECTIONS_MIN));
        let connections = free.map_or(wanted, |free| wanted.min(free / DESCRIPTORS_PER_CONNECTION));
        Self {
            request_budget_bytes,
            request_budget_origin,
            index_bytes_max: RouterConfig::index_bytes_max(memory_bytes, settings.models.len()),
            descriptors,
            connections_max: u32::try_from(connections).unwrap_or(u32::MAX),
            requests_max: free.map_or(REQUESTS_MAX, |free| (free - connections).min(REQUESTS_MAX)),
            connections_wanted: gateway.connections_max,
            descriptors_wanted: reserve + DESCRIPTORS_PER_CONNECTION * wanted,
        }
    }

    /// Description of short resources.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        let descriptors = self.descriptors.filter(|_| self.connections_max < self.connections_wanted)?;
        Some(format!(
            "the process may open {descriptors} descriptors: gateway.connections_max is lowered from {} to {}; {} \
             descriptors are needed (ulimit -n, or LimitNOFILE of the systemd unit)",
            self.connections_wanted, self.connections_max, self.descriptors_wanted
        ))
    }

    /// Logs the limits, with a warning for short resources.
    pub(crate) fn log(&self) {
        tracing::info!(
            request_budget_bytes = self.request_budget_bytes,
            index_bytes_max = self.index_bytes_max,
            connections_max = self.connections_max,
            descriptors = self.descriptors,
            "limits of the process"
        );
        if let Some(warning) = self.warning() {
            tracing::warn!("{warning}");
        }
    }
}

/// TOML comments, for `check-config`.
impl fmt::Display for ProcessLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "# limits of this process on this machine")?;
        writeln!(f, "# request budget: {} bytes ({})", self.request_budget_bytes, self.request_budget_origin)?;
        writeln!(
            f,
            "# index: {} bytes for each model without index.bytes_max (a quarter of the memory for all models)",
            self.index_bytes_max
        )?;
        match self.descriptors {
            Some(limit) => writeln!(f, "# descriptors: {limit}, of which {} are needed", self.descriptors_wanted)?,
            None => writeln!(f, "# descriptors: no limit")?,
        }
        writeln!(f, "# connections of clients: {}, requests in flight: {}", self.connections_max, self.requests_max)
    }
}

/// Descriptors reserved from client connections.
fn reserved_descriptors(settings: &Settings) -> u64 {
    let workers = settings.models.iter().map(|model| {
        let named = model.workers.len() + model.worker_urls.len();
        let has_lists = model.workers_file.is_some() || !model.worker_names.is_empty();
        let discovers = has_lists || model.kubernetes.is_some() || named == 0;
        named as u64 + if discovers { DISCOVERED_WORKERS } else { 0 }
    });
    let of_workers = workers.sum::<u64>() * DESCRIPTORS_PER_WORKER;
    let own = OWN_DESCRIPTORS + DESCRIPTORS_PER_CORE * *COUNT as u64;
    own + u64::from(ADMIN_CONNECTIONS_MAX + OVERFLOW_CONNECTIONS_MAX) + of_workers
}

/// Raises the soft limit to the hard one and returns it. A fixed limit stays unchanged.
fn raise_descriptors() -> Option<u64> {
    let raised = rlimit::increase_nofile_limit(rlimit::INFINITY);
    // A sandbox may forbid the system calls that change or read limits.
    let limit = raised.or_else(|_| rlimit::Resource::NOFILE.get_soft()).ok().or_else(process::fds_max)?;
    Some(limit).filter(|limit| *limit < rlimit::INFINITY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::ModelSettings;

    fn settings(workers: usize) -> Settings {
        let worker_urls = (0..workers).map(|n| format!("http://10.0.0.{n}:8000")).collect();
        Settings { models: vec![ModelSettings { worker_urls, ..ModelSettings::named("m") }], ..Settings::default() }
    }

    #[test]
    fn the_request_budget_is_a_share_of_the_memory_with_a_floor() {
        let derived = |memory| ProcessLimits::derive(&settings(1), memory, None).request_budget_bytes;
        assert_eq!(derived(Some(16 << 30)), 2 << 30);
        assert_eq!(derived(Some(128 << 20)), 64 << 20, "four bodies of 16 MiB");
        assert_eq!(derived(None), 1 << 30);
        let mut given = settings(1);
        given.gateway.request_budget_bytes = Some(17 << 20);
        assert_eq!(ProcessLimits::derive(&given, Some(16 << 30), None).request_budget_bytes, 17 << 20);
    }

    #[test]
    fn indexes_share_a_quarter_of_the_memory() {
        let index_bytes_max = RouterConfig::index_bytes_max;
        assert_eq!(index_bytes_max(Some(16 << 30), 1), 4 << 30);
        assert_eq!(index_bytes_max(Some(16 << 30), 4), 1 << 30);
        assert_eq!(index_bytes_max(None, 2), 512 << 20);
        assert_eq!(index_bytes_max(Some(1 << 20), 100), 1 << 20);
        let limits = ProcessLimits::derive(&settings(1), Some(16 << 30), None);
        assert_eq!(limits.index_bytes_max, 4 << 30);
        assert!(limits.to_string().contains("# index: 4294967296 bytes"), "{limits}");
    }

    #[test]
    fn client_connections_leave_descriptors_for_other_uses() {
        let derived = |workers, descriptors| ProcessLimits::derive(&settings(workers), None, Some(descriptors));
        let cores = DESCRIPTORS_PER_CORE * *COUNT as u64;
        let enough = derived(4, 65_536 + cores);
        assert_eq!((enough.connections_max, enough.warning()), (16_384, None));
        // Connections of HTTP/2 have more than one request.
        assert_eq!(enough.requests_max, 65_536 - 168 - 16_384);
        // 32 for the process, 96 for operators and overflow, 40 for four workers.
        let short = derived(4, 256 + cores);
        assert_eq!((short.connections_max, short.requests_max), (44, 44), "each of 88 descriptors");
        let warning = short.warning().expect("the limit is too low");
        assert!(warning.contains(&(256 + cores).to_string()) && warning.contains("16384"), "{warning}");
        assert_eq!(u64::from(derived(400, 1024).connections_max), CONNECTIONS_MIN);
    }
}
