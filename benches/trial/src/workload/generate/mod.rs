//! Invents workloads: the shapes of traffic that routers meet, each with a few settings.
//!
//! Owns the generators and the text form of their settings, `chat:rate=4,sessions=100`. Promises that settings and seed
//! fix a workload on every machine; that arrivals are those of a Poisson process (gaps from an exponential distribution)
//! where a generator does not say otherwise; and that texts are equal only where a generator says so.
//!
//! Replies have tokens of their own, as a client that quotes an answer sends them. A simulated engine makes up other
//! tokens, so what it generated is not found in its cache again; what it was sent is.

mod agents;
mod burst;
mod chat;
mod conversations;
mod peer_first;
mod settings;
mod shared_prefix;
mod siblings;
mod sources;

use std::fmt;
use std::str::FromStr;

use serde_json::{Map, Value};

pub use agents::Agents;
pub use burst::Burst;
pub use chat::Chat;
pub use conversations::Conversations;
pub use peer_first::PeerFirst;
pub use settings::{SettingsError, Span};
pub use shared_prefix::SharedPrefix;
pub use siblings::Siblings;
pub(crate) use sources::Texts;

use crate::workload::{Arrivals, Request, Workload};

/// One of the generators, with its settings.
///
/// ```
/// use pointsman_trial::workload::generate::{Chat, Generator};
///
/// let chat: Generator = "chat:rate=2.5,sessions=10,reply_tokens=50-80".parse()?;
/// let same = Chat { rate: 2.5, sessions: 10, reply_tokens: (50..=80).into(), ..Chat::default() };
/// assert_eq!(chat, Generator::Chat(same));
/// assert_eq!(chat.to_string().parse(), Ok(chat.clone()));
/// assert!(chat.generate(7).requests.len() >= 10);
///
/// let error = "chat:speed=2".parse::<Generator>().unwrap_err().to_string();
/// assert!(error.starts_with("chat has no setting \"speed\""), "{error}");
/// # Ok::<(), pointsman_trial::workload::generate::SettingsError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Generator {
    /// Conversations of several turns, with time to think.
    Chat(Chat),
    /// The same as [`Chat`](Self::Chat), at a rate that leaves most fleets idle.
    Low(Chat),
    /// Short questions behind few long prompts.
    SharedPrefix(SharedPrefix),
    /// Tools called in a loop.
    Agents(Agents),
    /// Requests that come together, with one prefix.
    Siblings(Siblings),
    /// Everything at once.
    Burst(Burst),
    /// The closed loop that the nearest peer is first measured by.
    PeerFirst(PeerFirst),
    /// What the closed loop of `replay` draws on.
    Conversations(Conversations),
}

impl Generator {
    /// The generators with their default settings.
    #[must_use]
    pub fn all() -> [Self; 8] {
        [
            Self::Chat(Chat::default()),
            Self::Low(Chat::low()),
            Self::SharedPrefix(SharedPrefix::default()),
            Self::Agents(Agents::default()),
            Self::Siblings(Siblings::default()),
            Self::Burst(Burst::default()),
            Self::PeerFirst(PeerFirst::default()),
            Self::Conversations(Conversations::default()),
        ]
    }

    /// Its name on a command line.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Chat(_) => "chat",
            Self::Low(_) => "low",
            Self::SharedPrefix(_) => "shared-prefix",
            Self::Agents(_) => "agents",
            Self::Siblings(_) => "siblings",
            Self::Burst(_) => "burst",
            Self::PeerFirst(_) => "peer-first",
            Self::Conversations(_) => "conversations",
        }
    }

    /// The workload that `seed` fixes.
    ///
    /// # Panics
    /// A setting is outside its bounds. Settings that were read from text are not.
    #[must_use]
    pub fn generate(&self, seed: u64) -> Workload {
        let mut workload = match self {
            Self::Chat(chat) | Self::Low(chat) => chat.generate(seed),
            Self::SharedPrefix(shared) => shared.generate(seed),
            Self::Agents(agents) => agents.generate(seed),
            Self::Siblings(siblings) => siblings.generate(seed),
            Self::Burst(burst) => burst.generate(seed),
            Self::PeerFirst(first) => first.generate(seed),
            Self::Conversations(conversations) => conversations.generate(seed),
        };
        workload.name = self.to_string();
        workload
    }

    /// Every generator with its settings and their defaults, one a line: for `--help`.
    #[must_use]
    pub fn help() -> String {
        Self::all()
            .map(|generator| format!("{}:{}", generator.name(), settings::write(&generator.settings())))
            .join("\n")
    }

    /// The default of its name.
    fn default_of(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|generator| generator.name() == name)
    }

    fn settings(&self) -> Map<String, Value> {
        match self {
            Self::Chat(chat) | Self::Low(chat) => settings::fields(chat),
            Self::SharedPrefix(shared) => settings::fields(shared),
            Self::Agents(agents) => settings::fields(agents),
            Self::Siblings(siblings) => settings::fields(siblings),
            Self::Burst(burst) => settings::fields(burst),
            Self::PeerFirst(first) => settings::fields(first),
            Self::Conversations(conversations) => settings::fields(conversations),
        }
    }
}

impl FromStr for Generator {
    type Err = SettingsError;

    /// Reads `name` or `name:setting=value,setting=value`. Settings that are not named have their defaults.
    fn from_str(text: &str) -> Result<Self, SettingsError> {
        let (name, given) = text.split_once(':').unwrap_or((text, ""));
        let Some(default) = Self::default_of(name) else {
            let known = Self::all().iter().map(Self::name).collect();
            return Err(SettingsError::Name { name: name.to_owned(), known });
        };
        Ok(match &default {
            Self::Chat(chat) => Self::Chat(settings::read(chat, name, given, Chat::check)?),
            Self::Low(chat) => Self::Low(settings::read(chat, name, given, Chat::check)?),
            Self::SharedPrefix(shared) => Self::SharedPrefix(settings::read(shared, name, given, SharedPrefix::check)?),
            Self::Agents(agents) => Self::Agents(settings::read(agents, name, given, Agents::check)?),
            Self::Siblings(siblings) => Self::Siblings(settings::read(siblings, name, given, Siblings::check)?),
            Self::Burst(burst) => Self::Burst(settings::read(burst, name, given, Burst::check)?),
            Self::PeerFirst(first) => Self::PeerFirst(settings::read(first, name, given, PeerFirst::check)?),
            Self::Conversations(conversations) => {
                Self::Conversations(settings::read(conversations, name, given, Conversations::check)?)
            }
        })
    }
}

impl fmt::Display for Generator {
    /// Its name, and the settings that are not the default ones.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Self::default_of(self.name()).map(|default| default.settings()).unwrap_or_default();
        let mut settings = self.settings();
        settings.retain(|name, value| default.get(name) != Some(value));
        let colon = if settings.is_empty() { "" } else { ":" };
        write!(f, "{}{colon}{}", self.name(), settings::write(&settings))
    }
}

/// A workload of `requests`, sorted here.
fn workload(name: &str, requests: Vec<Request>, arrivals: Arrivals) -> Workload {
    let mut workload = Workload { name: name.to_owned(), requests, arrivals, trace_checksum: None };
    workload.sort();
    workload
}
