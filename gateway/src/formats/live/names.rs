//! Names of workers and ranks for people.
//!
//! A worker is named by its address as the operator gave it, without scheme and credentials: `10.0.0.7:8000`, or
//! `engines.local/a` behind a path. A rank has its number after that. Addresses of two workers differ, so names do.

/// Name of a worker with this endpoint.
///
/// ```
/// use pointsman_gateway::formats::live::names::worker_name;
///
/// assert_eq!(worker_name("http://user:secret@10.0.0.7:8000/"), "10.0.0.7:8000");
/// assert_eq!(worker_name("https://engines.local/a"), "engines.local/a");
/// ```
pub fn worker_name(endpoint: &str) -> &str {
    let address = endpoint.split_once("://").map_or(endpoint, |(_, address)| address).trim_end_matches('/');
    let path_at = address.find('/').unwrap_or(address.len());
    let host_at = address[..path_at].rfind('@').map_or(0, |at| at + 1);
    &address[host_at..]
}

/// Name of a rank of that worker.
///
/// ```
/// use pointsman_gateway::formats::live::names::rank_name;
///
/// assert_eq!(rank_name("http://10.0.0.7:8000", 1), "10.0.0.7:8000/1");
/// ```
pub fn rank_name(endpoint: &str, rank: u32) -> String {
    format!("{}/{rank}", worker_name(endpoint))
}
