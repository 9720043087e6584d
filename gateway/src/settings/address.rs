//! Addresses in settings: hosts with ports, and servers of NATS.

use std::net::IpAddr;
use std::str::FromStr as _;

use async_nats::ServerAddr;

/// Whether the host of `HOST:PORT` is this machine.
pub(crate) fn is_loopback(address: &str) -> bool {
    let host = host_of(address);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The host in `HOST:PORT`, without the brackets of an IPv6 address.
pub(crate) fn host_of(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// Whether the text is `nats://HOST:PORT` or `tls://HOST:PORT`, without a password.
pub(crate) fn is_server_url(url: &str) -> bool {
    let address = url.strip_prefix("nats://").or_else(|| url.strip_prefix("tls://"));
    let parts = address.and_then(|address| address.rsplit_once(':'));
    let is_complete = parts.is_some_and(|(host, port)| {
        !host.is_empty() && !host.contains(['@', '/', '?']) && port.parse::<u16>().is_ok_and(|port| port > 0)
    });
    is_complete && ServerAddr::from_str(url).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_without_port_and_brackets() {
        for (address, host) in [("a.b:1", "a.b"), ("[::1]:2", "::1"), ("10.0.0.1:3", "10.0.0.1")] {
            assert_eq!(host_of(address), host);
        }
        for (address, expected) in [("localhost:1", true), ("[::1]:2", true), ("127.9.9.9:3", true), ("a:4", false)] {
            assert_eq!(is_loopback(address), expected, "{address}");
        }
    }

    #[test]
    fn servers_have_a_scheme_and_no_password() {
        assert!(is_server_url("nats://127.0.0.1:4222") && is_server_url("tls://nats.llm:4222"));
        for url in ["127.0.0.1:4222", "http://a:1", "nats://", "nats://user:secret@a:4222"] {
            assert!(!is_server_url(url), "{url}");
        }
    }
}
