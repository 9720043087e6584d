//! Conversion of an engine's listening addresses to reachable addresses.

use super::HttpUrl;
use crate::protocol::{LoadSource, WorkerConfig};

/// Hosts that represent all interfaces.
const WILDCARDS: &[&str] = &["*", "0.0.0.0", "[::]", "::"];

/// `host`, in brackets if it is an IPv6 address; the worker's host if it is a wildcard.
pub(super) fn reachable_host(host: &str, url: &HttpUrl) -> String {
    if WILDCARDS.contains(&host) {
        return url.host_in_url().to_owned();
    }
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.to_owned() }
}

/// Replaces wildcard hosts in the worker's socket addresses by its own host.
pub(super) fn reach(config: &mut WorkerConfig, url: &HttpUrl) {
    let replace = |endpoint: &mut String| {
        let Some((scheme, rest)) = endpoint.split_once("://") else { return };
        let wildcard =
            WILDCARDS.iter().find(|host| rest.strip_prefix(**host).is_some_and(|rest| rest.starts_with(':')));
        if let Some(host) = wildcard {
            *endpoint = format!("{scheme}://{}{}", url.host_in_url(), &rest[host.len()..]);
        }
    };
    for kv_events in config.kv_events.iter_mut().chain(config.kv_events_by_rank.values_mut()) {
        replace(&mut kv_events.endpoint);
        kv_events.replay_endpoint.as_mut().map(replace);
    }
    match &mut config.load {
        Some(LoadSource::Metrics(url) | LoadSource::Socket(url)) => replace(url),
        None => {}
    }
}
