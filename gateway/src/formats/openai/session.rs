//! Session of a request, from the names by which clients identify their tasks.
//!
//! A task of several agents is a program, and each of its agents a session: the calls of an agent share a prefix. Clients do
//! not know this gateway, so an unusable value of theirs counts as absent. Names of users and ids that differ per call
//! (`X-Client-Request-Id`, request, trace and correlation ids) are not read.

use std::borrow::Cow;

use axum::http::HeaderMap;
use pointsman::SessionId;
use ring::digest::{SHA256, digest};
use serde::Deserialize;

use super::fields::Fields;

/// Headers of known clients in their order: the program, and the agent in it. The main agent of a program has no name.
///
/// Claude Code; Dynamo's clients and Codex, current and former, which name the parent of a session; opencode; clients of
/// SGLang's gateway; OpenHands and other clients of `LiteLLM`; xAI; Qwen Code; Amp; Helicone; Open WebUI.
const CLIENTS: [(&str, Option<&str>); 15] = [
    ("x-claude-code-session-id", Some("x-claude-code-agent-id")),
    ("x-dynamo-parent-session-id", Some("x-dynamo-session-id")),
    ("x-dynamo-session-id", None),
    ("x-codex-parent-thread-id", Some("thread-id")),
    ("session-id", Some("thread-id")),
    ("session_id", Some("thread-id")),
    ("thread-id", None),
    ("x-session-affinity", None),
    ("x-smg-routing-key", None),
    ("x-litellm-session-id", None),
    ("x-grok-conv-id", None),
    ("x-qwen-code-session-id", None),
    ("x-amp-thread-id", None),
    ("helicone-session-id", None),
    ("x-openwebui-chat-id", None),
];

/// Program of a request with `X-Session-Id`: opencode names the session of the parent agent.
const PARENT_SESSION_ID: &str = "x-parent-session-id";

/// Names of the agent of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session<'a> {
    /// The task, equal for all of its agents.
    pub program: Cow<'a, str>,
    /// The session: the name of the program, or a digest of program and agent.
    pub id: Cow<'a, str>,
    /// Whether other programs may have the same name.
    pub may_be_shared: bool,
}

impl<'a> Session<'a> {
    fn new(program: impl Into<Cow<'a, str>>, agent: Option<&'a str>) -> Self {
        let program = program.into();
        let id = match agent.filter(|agent| *agent != program) {
            None => program.clone(),
            // Neither name contains a line feed.
            Some(agent) => Cow::Owned(hashed(&[&program, "\n", agent].concat())),
        };
        Self { program, id, may_be_shared: false }
    }

    /// The session with this explicit id (`X-Session-Id`).
    pub fn explicit(headers: &'a HeaderMap, id: &'a str) -> Self {
        let program = name_in(headers, PARENT_SESSION_ID).unwrap_or(id);
        Self { program: program.into(), id: id.into(), may_be_shared: false }
    }

    /// The session in the headers of a client. Headers with `configured` names have precedence over those of known clients.
    ///
    /// ```
    /// use axum::http::HeaderMap;
    /// use pointsman_gateway::formats::openai::Session;
    ///
    /// let mut headers = HeaderMap::new();
    /// assert_eq!(Session::of_headers(&headers, &[]), None);
    /// headers.insert("x-claude-code-session-id", "task".parse()?);
    /// let only = headers.clone();
    /// let main = Session::of_headers(&only, &[]).expect("a session");
    /// headers.insert("x-claude-code-agent-id", "child".parse()?);
    /// let child = Session::of_headers(&headers, &[]).expect("a session");
    /// assert_eq!((&*main.program, &*main.id), ("task", "task"));
    /// assert_eq!(child.program, main.program);
    /// assert_ne!(child.id, main.id);
    /// # Ok::<(), axum::http::header::InvalidHeaderValue>(())
    /// ```
    pub fn of_headers(headers: &'a HeaderMap, configured: &[String]) -> Option<Self> {
        let configured = configured.iter().map(|name| (name.as_str(), None));
        configured.chain(CLIENTS).find_map(|(program, agent)| {
            let program = name_in(headers, program)?;
            Some(Self::new(program, agent.and_then(|agent| name_in(headers, agent))))
        })
    }

    /// The session in a body: `conversation`, Claude Code's in `user` or `metadata.user_id`, else `prompt_cache_key`, which may
    /// be one key of a whole application.
    pub(super) fn of_body(fields: &Fields<'a>) -> Option<Session<'static>> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Conversation {
            Id(String),
            Object { id: String },
        }
        #[derive(Deserialize)]
        struct Metadata {
            user_id: Option<String>,
        }
        let conversation = read::<Conversation>(fields.conversation.json()).map(|conversation| match conversation {
            Conversation::Id(id) | Conversation::Object { id } => id,
        });
        let user = || {
            let metadata = read::<Metadata>(fields.metadata.json()).and_then(|metadata| metadata.user_id);
            [read(fields.user.json()), metadata].into_iter().flatten().find_map(|user: String| of_claude_code(&user))
        };
        let named = conversation.or_else(user).filter(|id| is_usable(id)).map(|id| Session::new(id, None));
        let key = || read::<String>(fields.prompt_cache_key.json()).filter(|key| is_usable(key));
        named.or_else(|| Some(Session { may_be_shared: true, ..Session::new(key()?, None) }))
    }
}

/// First character of the gateway's own sessions, of which no client has one.
pub(crate) const RESERVED: char = '\u{1}';

/// Digest of a name for logs and ids: 32 hexadecimal digits.
pub(crate) fn hashed(name: &str) -> String {
    digest(&SHA256, name.as_bytes()).as_ref()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The value of a header that occurs once and is usable.
fn name_in<'a>(headers: &'a HeaderMap, header: &str) -> Option<&'a str> {
    let mut values = headers.get_all(header).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    std::str::from_utf8(value.as_bytes()).ok().filter(|name| is_usable(name))
}

fn is_usable(name: &str) -> bool {
    (1..=SessionId::BYTES_MAX).contains(&name.len()) && !name.trim().is_empty() && !name.contains(char::is_control)
}

fn read<T: for<'de> Deserialize<'de>>(json: Option<&str>) -> Option<T> {
    serde_json::from_str(json?).ok()
}

/// Session in Claude Code's name of a user: JSON, or `user_{hash}_account_{id}_session_{id}` of earlier versions. Other users
/// have no session.
fn of_claude_code(user: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct User {
        session_id: String,
    }
    if user.starts_with('{') {
        return read(Some(user)).map(|User { session_id }| session_id);
    }
    user.strip_prefix("user_")?.rsplit_once("_session_").map(|(_, session)| session.to_owned())
}

#[cfg(test)]
mod tests {
    use axum::body::Bytes;
    use axum::http::{HeaderName, HeaderValue};

    use super::*;
    use crate::formats::openai::{Endpoint, RequestBody};

    fn of(headers: &[(&str, &str)], configured: &[&str]) -> Option<(String, String)> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            let value = HeaderValue::from_bytes(value.as_bytes()).expect("a value");
            map.append(name.parse::<HeaderName>().expect("a name"), value);
        }
        let configured: Vec<String> = configured.iter().map(|name| (*name).to_owned()).collect();
        let session = Session::of_headers(&map, &configured)?;
        Some((session.program.into_owned(), session.id.into_owned()))
    }

    fn plain(id: &str) -> Option<(String, String)> {
        Some((id.to_owned(), id.to_owned()))
    }

    #[test]
    fn each_known_client_names_its_session() {
        for (name, _) in CLIENTS {
            assert_eq!(of(&[(name, "s-1")], &[]), plain("s-1"), "{name}");
        }
        let per_call = ["x-client-request-id", "x-request-id", "x-correlation-id", "traceparent", "x-user-id"];
        for name in per_call {
            assert_eq!(of(&[(name, "s-1")], &[]), None, "{name} differs per call or names a user");
        }
        let configured = ["x-mine", "x-other"];
        assert_eq!(of(&[("x-mine", "m"), ("x-other", "o"), ("session-id", "c")], &configured), plain("m"));
        assert_eq!(of(&[("x-mine", ""), ("x-other", "o"), ("session-id", "c")], &configured), plain("o"));
        assert_eq!(of(&[("x-mine", "m")], &[]), None);
    }

    #[test]
    fn agents_of_one_program_have_sessions_of_their_own() {
        let claude = |agent| of(&[("x-claude-code-session-id", "s"), ("x-claude-code-agent-id", agent)], &[]);
        let (program, id) = claude("a").expect("a session");
        assert_eq!((program.as_str(), id.len()), ("s", 32));
        assert_eq!(claude("a").map(|(_, id)| id), Some(id.clone()));
        assert_ne!(claude("b").map(|(_, id)| id), Some(id));
        assert_eq!(claude(""), plain("s"));
        // Families are not mixed, and Codex's main thread has the id of its session.
        assert_eq!(of(&[("x-claude-code-session-id", "s"), ("thread-id", "t")], &[]), plain("s"));
        assert_eq!(of(&[("session-id", "s"), ("thread-id", "s")], &[]), plain("s"));
        let child = of(&[("x-dynamo-parent-session-id", "s"), ("x-dynamo-session-id", "c")], &[]);
        assert!(child.is_some_and(|(program, id)| program == "s" && id.len() == 32));
        let mut headers = HeaderMap::new();
        headers.insert(PARENT_SESSION_ID, HeaderValue::from_static("root"));
        let explicit = Session::explicit(&headers, "c");
        assert_eq!((&*explicit.program, &*explicit.id), ("root", "c"));
        assert_eq!(Session::explicit(&HeaderMap::new(), "c").program, "c");
    }

    #[test]
    fn unusable_names_count_as_absent() {
        let (longest, long) = ("x".repeat(256), "x".repeat(257));
        assert_eq!(of(&[("session-id", &longest)], &[]), plain(&longest));
        for unusable in [long.as_str(), "", " ", "a\tb"] {
            assert_eq!(of(&[("session-id", unusable)], &[]), None, "{unusable:?}");
            assert_eq!(of(&[("session-id", unusable), ("x-session-affinity", "s")], &[]), plain("s"), "the next one");
        }
        assert_eq!(of(&[("session-id", "a"), ("session-id", "b")], &[]), None, "two sessions");
        assert_eq!(of(&[("session-id", "größe")], &[]), plain("größe"));
        assert_eq!(of(&[("x-openwebui-chat-id", "s"), ("x-openwebui-message-id", "m")], &[]), plain("s"));
        let pair = of(&[("x-claude-code-session-id", &longest), ("x-claude-code-agent-id", &"y".repeat(256))], &[]);
        assert!(pair.is_some_and(|(_, id)| id.len() == 32), "two long names are no longer than one id");
    }

    #[test]
    fn sessions_in_bodies() {
        let of = |endpoint, fields: &str| {
            let body = format!(r#"{{"messages":[],"input":"x","prompt":"x",{fields}}}"#);
            let parsed = RequestBody::parse(endpoint, Bytes::from(body)).expect("a body");
            parsed.session.map(|session| (session.id.into_owned(), session.may_be_shared))
        };
        let (some, shared) = (|id: &str| Some((id.to_owned(), false)), |id: &str| Some((id.to_owned(), true)));
        let long = format!(r#""prompt_cache_key":"{}""#, "x".repeat(300));
        let cases = [
            (r#""prompt_cache_key":"k""#, shared("k")),
            (r#""prompt_cache_key":7"#, None),
            (r#""prompt_cache_key":"""#, None),
            (&long, None),
            (r#""conversation":"conv_1","prompt_cache_key":"k""#, some("conv_1")),
            (r#""conversation":{"id":"conv_1"}"#, some("conv_1")),
            (r#""conversation":[],"prompt_cache_key":"k""#, shared("k")),
            (r#""user":"alice""#, None),
            (r#""user":"user_0a_account_1b-2c_session_3d-4e""#, some("3d-4e")),
            (r#""user":"{\"device_id\":\"d\",\"account_uuid\":\"\",\"session_id\":\"3d\"}""#, some("3d")),
            (r#""metadata":{"user_id":"{\"device_id\":\"d\",\"session_id\":\"3d\"}"}"#, some("3d")),
            (r#""metadata":{"user_id":"{\"device_id\":\"d\"}"},"prompt_cache_key":"k""#, shared("k")),
            (r#""metadata":"none","user":{},"safety_identifier":"u""#, None),
        ];
        for (fields, session) in cases {
            for endpoint in [Endpoint::Chat, Endpoint::Responses, Endpoint::Completions, Endpoint::Messages] {
                assert_eq!(of(endpoint, fields), session, "{endpoint:?} {fields}");
            }
        }
    }
}
