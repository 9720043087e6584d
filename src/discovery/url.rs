//! Addresses of engines: `http://HOST[:PORT][/PATH]` or the same with `https`, and nothing else.
//!
//! Not `http::Uri`, which accepts 8 of the 15 texts that the tests reject, drops fragments silently, and would make `http`
//! a dependency of the core.

use core::net::{Ipv4Addr, Ipv6Addr};
use std::fmt;

/// An address for requests over HTTP, with or without TLS.
///
/// ```
/// use pointsman::HttpUrl;
///
/// let url = HttpUrl::parse("http://[::1]:8000/v1/")?;
/// assert_eq!((url.host(), url.port(), url.path()), ("::1", 8000, "/v1/"));
/// assert_eq!(url.below("/models").to_string(), "http://[::1]:8000/v1/models");
/// assert!(HttpUrl::parse("https://engine")?.is_tls());
/// assert!(HttpUrl::parse("ftp://engine").is_err());
/// # Ok::<(), pointsman::internals::discovery::HttpUrlError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HttpUrl {
    is_tls: bool,
    /// In lower case; an IPv6 address in brackets and in its short form.
    host: String,
    port: u16,
    /// Including the query; at least `/`.
    path: String,
}

/// Reason for rejecting an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("url {url:?} is refused: {rule}")]
pub struct HttpUrlError {
    /// The text [without a password](HttpUrl::without_password), truncated to [`HttpUrl::BYTES_MAX`] bytes.
    pub url: String,
    /// The violated rule.
    pub rule: String,
}

impl HttpUrl {
    /// Maximum length in bytes.
    pub const BYTES_MAX: usize = 2048;

    /// Key that is equal for all endpoints that are certainly one engine: the canonical spelling, with a fully qualified
    /// name without its last dot, and `localhost` and mapped addresses as IPv4 addresses. `None` for other endpoints than
    /// HTTP addresses, which are opaque.
    ///
    /// ```
    /// use pointsman::HttpUrl;
    ///
    /// assert_eq!(HttpUrl::engine_key("http://localhost:8000/"), HttpUrl::engine_key("http://127.0.0.1:8000"));
    /// ```
    #[must_use]
    pub fn engine_key(endpoint: &str) -> Option<String> {
        let mut parsed = Self::parse(endpoint).ok()?;
        let name = parsed.host.trim_end_matches('.');
        let mapped = parsed.host().parse::<Ipv6Addr>().ok().and_then(|address| address.to_ipv4_mapped());
        parsed.host = match mapped {
            Some(address) => address.to_string(),
            None if name == "localhost" => Ipv4Addr::LOCALHOST.to_string(),
            None => name.to_owned(),
        };
        Some(parsed.endpoint())
    }

    /// The address with `***` in place of user and password, for messages and logs. Invalid addresses lose all text before
    /// their last `@`, so that a mistyped address does not reveal a password.
    ///
    /// ```
    /// use pointsman::HttpUrl;
    ///
    /// assert_eq!(HttpUrl::without_password("http://me:secret@engine:8000/v1"), "http://***@engine:8000/v1");
    /// assert_eq!(HttpUrl::without_password("http://engine:8000/v1"), "http://engine:8000/v1");
    /// assert_eq!(HttpUrl::without_password("me:secret@engine"), "***@engine");
    /// ```
    #[must_use]
    pub fn without_password(url: &str) -> String {
        let Some((before, rest)) = url.rsplit_once('@') else { return url.to_owned() };
        match before.split_once("://") {
            Some((scheme, _)) => format!("{scheme}://***@{rest}"),
            None => format!("***@{rest}"),
        }
    }

    /// The error about an address that breaks a rule.
    #[must_use]
    pub fn refused(url: &str, rule: &str) -> HttpUrlError {
        let url = Self::without_password(url);
        let shown = url.char_indices().take_while(|(at, _)| *at < Self::BYTES_MAX).map(|(_, c)| c).collect();
        HttpUrlError { url: shown, rule: rule.to_owned() }
    }

    /// Parses an address. The default port is 80, and 443 with `https`. The default path is `/`.
    ///
    /// # Errors
    /// A scheme other than `http` and `https`, credentials, a fragment, a missing host, an invalid port, or invalid
    /// characters.
    pub fn parse(url: &str) -> Result<Self, HttpUrlError> {
        let refused = |rule: &str| Self::refused(url, rule);
        if url.len() > Self::BYTES_MAX {
            return Err(refused("it must be at most 2048 bytes long"));
        }
        let Some((scheme, rest)) = url.split_once("://") else {
            return Err(refused("it must begin with http:// or https://"));
        };
        let is_tls = scheme.eq_ignore_ascii_case("https");
        if !is_tls && !scheme.eq_ignore_ascii_case("http") {
            let scheme = Self::without_password(scheme);
            return Err(refused(&format!("its scheme is {scheme:?}, must be http or https")));
        }
        if !rest.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(refused("it must be of visible ASCII characters"));
        }
        if rest.contains('#') {
            return Err(refused("it must have no fragment"));
        }
        let path_at = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(path_at);
        if authority.contains('@') {
            return Err(refused("it must have no user or password"));
        }
        let (host, port) = split_port(authority);
        let port = match port {
            None => {
                if is_tls {
                    443
                } else {
                    80
                }
            }
            Some(port) => {
                port.parse().ok().filter(|port| *port > 0).ok_or_else(|| refused("its port must be from 1 to 65535"))?
            }
        };
        if !is_host(host) {
            return Err(refused("its host must be a name, an IPv4 address or an IPv6 address in brackets"));
        }
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        let address = host.trim_start_matches('[').trim_end_matches(']').parse::<Ipv6Addr>();
        let host = address.map_or_else(|_| host.to_ascii_lowercase(), |address| format!("[{address}]"));
        Ok(Self { is_tls, host, port, path })
    }

    /// The canonical spelling as an endpoint of a worker: scheme and host in lower case, IPv6 addresses in their short
    /// form, no default port, no slash at the end.
    ///
    /// ```
    /// use pointsman::HttpUrl;
    ///
    /// assert_eq!(HttpUrl::parse("HTTP://Engine:80/")?.endpoint(), "http://engine");
    /// assert_eq!(HttpUrl::parse("https://[fd00:0::7]:8000/v1/")?.endpoint(), "https://[fd00::7]:8000/v1");
    /// # Ok::<(), pointsman::internals::discovery::HttpUrlError>(())
    /// ```
    #[must_use]
    pub fn endpoint(&self) -> String {
        let default_port = if self.is_tls { 443 } else { 80 };
        let port = if self.port == default_port { String::new() } else { format!(":{}", self.port) };
        let (path, query) = match self.path.split_once('?') {
            Some((path, query)) => (path, format!("/?{query}")),
            None => (self.path.as_str(), String::new()),
        };
        format!("{}://{}{port}{}{query}", self.scheme(), self.host, path.trim_end_matches('/'))
    }

    /// Whether the scheme is `https`.
    #[must_use]
    pub fn is_tls(&self) -> bool {
        self.is_tls
    }

    /// The scheme.
    #[must_use]
    pub fn scheme(&self) -> &'static str {
        if self.is_tls { "https" } else { "http" }
    }

    /// The host, without brackets.
    #[must_use]
    pub fn host(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }

    /// The host with brackets around an IPv6 address.
    #[cfg(feature = "discovery")]
    pub(super) fn host_in_url(&self) -> &str {
        &self.host
    }

    /// The port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Path and query.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Host and port for the `Host` header.
    #[must_use]
    pub fn authority(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    /// The address of `path` below this one, without its query. `path` starts with `/`.
    #[must_use]
    pub fn below(&self, path: &str) -> Self {
        let base = self.path.split('?').next().unwrap_or_default().trim_end_matches('/');
        Self { path: format!("{base}{path}"), ..self.clone() }
    }
}

impl fmt::Display for HttpUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}:{}{}", self.scheme(), self.host, self.port, self.path)
    }
}

/// Host and optional port; the colons of an IPv6 address are inside brackets.
fn split_port(authority: &str) -> (&str, Option<&str>) {
    match authority.rfind(':') {
        Some(at) if !authority[at..].contains(']') => (&authority[..at], Some(&authority[at + 1..])),
        Some(_) | None => (authority, None),
    }
}

/// Whether the text is a valid host.
pub(super) fn is_host(host: &str) -> bool {
    if host.len() > HttpUrl::BYTES_MAX {
        return false;
    }
    if let Some(address) = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        return address.parse::<core::net::Ipv6Addr>().is_ok();
    }
    !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_filled_in() {
        let shown = |url: &str| HttpUrl::parse(url).expect("an address").to_string();
        assert_eq!(shown("http://engine"), "http://engine:80/");
        assert_eq!(shown("HTTP://10.0.0.7:8000?a=b"), "http://10.0.0.7:8000/?a=b");
        assert_eq!(shown("http://[fe80::1]/x"), "http://[fe80::1]:80/x");
        assert_eq!(shown("HTTPS://e/v1"), "https://e:443/v1");
    }

    #[test]
    fn spellings_of_one_endpoint_have_one_canonical_form() {
        let canonical = |url: &str| HttpUrl::parse(url).expect("an address").endpoint();
        for (urls, expected) in [
            (["http://h", "http://h:80", "HTTP://H:80//", "http://h:080/"].as_slice(), "http://h"),
            (&["http://10.0.0.7:8000", "http://10.0.0.7:8000/"], "http://10.0.0.7:8000"),
            (&["https://h", "https://H:443/"], "https://h"),
            (&["https://h:80/"], "https://h:80"),
            (&["http://[FE80::1]:8000/", "http://[fe80:0:0:0::1]:8000"], "http://[fe80::1]:8000"),
            (&["http://h:1/Engine/", "http://H:1/Engine"], "http://h:1/Engine"),
            (&["http://h?a=b", "http://h/?a=b"], "http://h/?a=b"),
        ] {
            assert!(urls.iter().all(|url| canonical(url) == expected), "{urls:?}");
            assert_eq!(canonical(expected), expected);
        }
    }

    #[test]
    fn names_of_one_host_have_one_key() {
        let key = |endpoint: &str| HttpUrl::engine_key(endpoint).unwrap_or_else(|| panic!("{endpoint} has a key"));
        for same in
            ["http://LOCALHOST:1/", "http://localhost.:1", "http://[::ffff:127.0.0.1]:1", "http://[::FFFF:7f00:1]:1"]
        {
            assert_eq!(key(same), key("http://127.0.0.1:1"), "{same}");
        }
        assert_eq!(key("http://engine.llm.:1/v1/"), key("http://Engine.llm:1/v1"));
        assert_ne!(key("http://[::1]:1"), key("http://127.0.0.1:1"), "they may be two engines");
        assert_ne!(key("http://h"), key("https://h"));
        assert_ne!(key("http://h/a"), key("http://h/A"));
        for opaque in ["engine-7", "grpc://e:1", ""] {
            assert_eq!(HttpUrl::engine_key(opaque), None);
        }
    }

    #[test]
    fn paths_go_below_the_base() {
        let below = |url: &str| HttpUrl::parse(url).expect("an address").below("/metrics").to_string();
        assert_eq!(below("http://e:1"), "http://e:1/metrics");
        assert_eq!(below("https://e"), "https://e:443/metrics");
        assert_eq!(below("http://e:1/engine/?a"), "http://e:1/engine/metrics");
    }

    #[test]
    fn invalid_addresses_are_rejected_by_rule() {
        let refused = |url: &str| HttpUrl::parse(url).expect_err("must be refused").to_string();
        assert_eq!(refused("ftp://e"), r#"url "ftp://e" is refused: its scheme is "ftp", must be http or https"#);
        for (url, rule) in [
            ("e:8000", "http://"),
            ("http://", "host"),
            ("http://:80", "host"),
            ("http://a b", "visible"),
            ("http://e\r\nx: y", "visible"),
            ("http://ü", "visible"),
            ("http://me:pw@e", "password"),
            ("http://e/#x", "fragment"),
            ("http://e:0", "port"),
            ("http://e:65536", "port"),
            ("http://e:", "port"),
            ("http://[::1", "host"),
            ("http://[x]", "host"),
            ("http://::1:80", "host"),
            (&format!("http://{}", "é".repeat(2000)), "2048"),
        ] {
            assert!(refused(url).contains(rule), "{}", refused(url));
        }
    }
}
