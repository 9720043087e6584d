//! Operator authentication by token.
//!
//! Comparison time does not depend on the content of a wrong token of equal length, the token never appears in logs,
//! errors or `Debug`, and failed attempts cannot flood the log.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::extract::ConnectInfo;
use axum::http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use axum::http::{Extensions, HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse as _, Response};
use metrics::Counter;
use ring::hmac;
use tokio::time::Instant;

use crate::formats::openai::ApiError;
use crate::observe::page::ADMIN_DENIED;
use crate::observe::throttle::LogThrottle;
use crate::settings::{AdminSettings, read_at_most};

/// Log interval of denied requests.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Verifier of the token.
struct Token {
    key: hmac::Key,
    tag: hmac::Tag,
}

impl Token {
    /// Minimum length.
    const BYTES_MIN: usize = 16;

    /// Maximum length.
    const BYTES_MAX: usize = 1024;

    /// Reads the token from one line; the line end is ignored.
    fn read(path: &Path) -> Result<Self, String> {
        let refused = |problem: String| format!("token_file {path:?} {problem}");
        let content = read_at_most(path, Self::BYTES_MAX + 3).and_then(|content| Ok((content, path.metadata()?)));
        let (content, file) = content.map_err(|error| refused(format!("cannot be read: {error}")))?;
        // Write access to the file controls the token, so it must be exclusive; read access should be.
        let mode = file.permissions().mode() & 0o777;
        if mode & 0o002 != 0 {
            return Err(refused(format!("has mode {mode:03o}, must not be writable by others")));
        }
        if mode & 0o004 != 0 {
            let mode = format!("{mode:03o}");
            tracing::warn!(?path, mode, "every user of this machine can read the admin token_file");
        }
        let token = content.strip_suffix(b"\n").unwrap_or(&content);
        Self::new(token.strip_suffix(b"\r").unwrap_or(token)).map_err(refused)
    }

    fn new(token: &[u8]) -> Result<Self, String> {
        if !(Self::BYTES_MIN..=Self::BYTES_MAX).contains(&token.len()) {
            let (min, max) = (Self::BYTES_MIN, Self::BYTES_MAX);
            return Err(format!("holds {} bytes, must hold {min} to {max}", token.len()));
        }
        if !token.iter().all(u8::is_ascii_graphic) {
            return Err("holds a blank or a byte that is not ASCII, must be one line of visible characters".to_owned());
        }
        // Keyed with the token itself, so that the compared value cannot be computed without it.
        let key = hmac::Key::new(hmac::HMAC_SHA256, token);
        Ok(Self { tag: hmac::sign(&key, token), key })
    }

    /// Whether the headers contain `Authorization: Bearer TOKEN` exactly once.
    fn is_shown_in(&self, headers: &HeaderMap) -> bool {
        bearer(headers).is_some_and(|shown| hmac::verify(&self.key, shown, self.tag.as_ref()).is_ok())
    }
}

/// Permission of a request by its token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// The token of operators, or that of the index for the index.
    Full,
    /// The token for `GET` requests.
    ReadOnly,
    /// No valid token.
    Denied,
}

/// Verifiers of all tokens of the listener. A reload replaces them.
#[derive(Default)]
pub(crate) struct Tokens {
    operator: Option<Token>,
    index: Option<Token>,
    read: Option<Token>,
}

impl Tokens {
    /// Reads the token files.
    ///
    /// # Errors
    /// A file cannot be read, or has another content or mode.
    pub(crate) fn read(admin: Option<&AdminSettings>) -> Result<Self, String> {
        let Some(admin) = admin else { return Ok(Self::default()) };
        let token = |file: Option<&PathBuf>| file.map(|path| Token::read(path)).transpose();
        Ok(Self {
            operator: token(Some(&admin.token_file))?,
            index: token(admin.index_token_file.as_ref())?,
            read: token(admin.read_token_file.as_ref())?,
        })
    }

    /// Access of a request with these headers. The token of the index opens only its paths.
    pub(super) fn access(&self, headers: &HeaderMap, is_index: bool) -> Access {
        let is_shown = |token: Option<&Token>| token.is_some_and(|token| token.is_shown_in(headers));
        if is_shown(self.operator.as_ref()) || is_shown(self.index.as_ref().filter(|_| is_index)) {
            Access::Full
        } else if is_shown(self.read.as_ref()) {
            Access::ReadOnly
        } else {
            Access::Denied
        }
    }
}

/// The bearer token. Two headers are ambiguous and give none.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next().filter(|_| values.next().is_none())?.as_bytes();
    let (scheme, token) = value.split_at_checked(b"Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token.trim_ascii())
}

/// Client address, if the listener provides it.
pub(super) fn client_address(extensions: &Extensions) -> Option<SocketAddr> {
    extensions.get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(peer)| *peer)
}

/// Response without a valid token; it does not reveal the reason.
pub(super) fn denied() -> Response {
    let message = "this listener requires its token: Authorization: Bearer TOKEN";
    let denied = ApiError::new(StatusCode::UNAUTHORIZED, "invalid_token", message);
    let mut answer = denied.into_response();
    answer.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"pointsman admin\""));
    answer
}

/// Counter of denied requests.
pub(super) struct Denials {
    counter: Counter,
    throttle: LogThrottle,
}

impl Denials {
    pub(super) fn new() -> Self {
        Self { counter: metrics::counter!(ADMIN_DENIED.name), throttle: LogThrottle::new(LOG_INTERVAL) }
    }

    pub(super) fn count(&self, peer: Option<SocketAddr>) {
        self.counter.increment(1);
        if let Some(denied) = self.next(Instant::now()) {
            let peer = peer.map(tracing::field::display);
            tracing::warn!(peer, denied, "admin requests without a valid token rejected");
        }
    }

    /// Counts a denial; returns the number to log when the interval is over.
    fn next(&self, now: Instant) -> Option<u64> {
        self.throttle.next_line(now).map(|suppressed| suppressed + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "0123456789abcdef";

    #[test]
    fn only_the_exact_token_is_accepted() {
        let token = Token::new(TOKEN.as_bytes()).expect("a token");
        let opens = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(AUTHORIZATION, HeaderValue::from_str(value).expect("a value"));
            }
            token.is_shown_in(&headers)
        };
        let right = &format!("Bearer {TOKEN}");
        assert!(opens(&[right]));
        assert!(
            opens(&[&format!("bearer  {TOKEN} ")]),
            "the case of the scheme and blanks around the token are ignored"
        );
        for wrong in [
            &[] as &[&str],
            &[""],
            &["Bearer"],
            &["Bearer "],
            &[TOKEN],
            &[&format!("Basic {TOKEN}")],
            &[&format!("Bearer{TOKEN}")],
            &[&format!("Bearer {TOKEN}0")],
            &[&format!("Bearer {}", &TOKEN[1..])],
            &["Bearer 0123456789ABCDEF"],
            &[right, right],
            &[right, "Bearer 0"],
        ] {
            assert!(!opens(wrong), "{wrong:?}");
        }
    }
}
