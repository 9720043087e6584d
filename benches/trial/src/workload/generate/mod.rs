//! Generators of workloads: typical router traffic patterns, each with a few settings.
//!
//! Settings have a text form: `chat:rate=4,sessions=100`. Settings and seed determine a workload on every machine.
//! Arrivals follow a Poisson process (exponentially distributed gaps) unless a generator documents otherwise. Texts are
//! equal only if a generator documents it. All open-loop generators accept the settings of a [`Profile`] too, which vary
//! the rate over time: `chat:rate=4,peak=1.8,period_s=120`.
//!
//! Replies have their own tokens, as in a client that quotes an answer. A simulated engine generates other tokens.
//! Therefore later prompts find the earlier prompts in its cache, but not its own output.

mod agents;
mod burst;
mod chat;
mod documents;
mod mix;
mod peer_first;
mod profile;
mod programs;
mod settings;
mod shared_prefix;
mod siblings;
mod sources;
mod unique;

use std::fmt;
use std::mem;
use std::str::FromStr;

use serde_json::{Map, Value};

pub use agents::Agents;
pub use burst::Burst;
pub use chat::Chat;
pub use documents::Documents;
pub use mix::Mix;
pub use peer_first::PeerFirst;
pub use profile::{Profile, Varied};
pub use programs::Programs;
pub use settings::Span;
pub use shared_prefix::SharedPrefix;
pub use siblings::Siblings;
pub use unique::Unique;

use crate::workload::{Arrivals, Request, Workload, WorkloadError};
use settings::assert_checked;

/// Evaluates an expression with the settings of a generator, and another one with those of a varying rate.
macro_rules! each {
    ($generator:expr, $settings:ident => $result:expr, $varied:ident => $of_varied:expr) => {
        match $generator {
            Generator::Chat($settings) | Generator::Low($settings) => $result,
            Generator::SharedPrefix($settings) => $result,
            Generator::Agents($settings) => $result,
            Generator::Programs($settings) => $result,
            Generator::Siblings($settings) => $result,
            Generator::Burst($settings) => $result,
            Generator::PeerFirst($settings) => $result,
            Generator::Documents($settings) => $result,
            Generator::Unique($settings) => $result,
            Generator::Mix($settings) => $result,
            Generator::Varied($varied) => $of_varied,
        }
    };
}

/// A generator with its settings.
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
/// # Ok::<(), pointsman_trial::workload::WorkloadError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Generator {
    /// Multi-turn chats with think times.
    Chat(Chat),
    /// Same as [`Chat`](Self::Chat), at a rate that leaves most fleets idle.
    Low(Chat),
    /// Short questions over a few long prompts.
    SharedPrefix(SharedPrefix),
    /// Tool-calling loops.
    Agents(Agents),
    /// Agent programs whose calls follow the ends of earlier ones.
    Programs(Programs),
    /// Groups of simultaneous requests with a common prefix.
    Siblings(Siblings),
    /// All requests at time 0.
    Burst(Burst),
    /// Closed loop of Dynamo's first router benchmark.
    PeerFirst(PeerFirst),
    /// Questions about long documents.
    Documents(Documents),
    /// Prompts without a common prefix.
    Unique(Unique),
    /// Several applications at once.
    Mix(Mix),
    /// Another generator with a varying rate.
    Varied(Varied),
}

impl Generator {
    /// All generators with their names on the command line, with default settings and a constant rate.
    #[must_use]
    pub fn all() -> [(&'static str, Self); 11] {
        [
            ("chat", Self::Chat(Chat::default())),
            ("low", Self::Low(Chat::low())),
            ("shared-prefix", Self::SharedPrefix(SharedPrefix::default())),
            ("agents", Self::Agents(Agents::default())),
            ("programs", Self::Programs(Programs::default())),
            ("siblings", Self::Siblings(Siblings::default())),
            ("burst", Self::Burst(Burst::default())),
            ("peer-first", Self::PeerFirst(PeerFirst::default())),
            ("documents", Self::Documents(Documents::default())),
            ("unique", Self::Unique(Unique::default())),
            ("mix", Self::Mix(Mix::default())),
        ]
    }

    /// Name on the command line.
    #[must_use]
    pub fn name(&self) -> &'static str {
        let own = if let Self::Varied(varied) = self { &varied.generator } else { self };
        let mut all = Self::all().into_iter();
        all.find(|(_, other)| mem::discriminant(other) == mem::discriminant(own)).map_or("", |(name, _)| name)
    }

    /// Generates the workload for `seed`.
    ///
    /// # Panics
    /// A setting is out of its bounds. Settings parsed from text are always within them.
    #[must_use]
    pub fn generate(&self, seed: u64) -> Workload {
        let mut workload = each!(self, settings => settings.generate(seed), varied => {
            assert_checked(varied.profile.check());
            let mut workload = varied.generator.generate(seed);
            varied.profile.apply(&mut workload);
            workload
        });
        workload.name = self.to_string();
        workload
    }

    /// The generator of a name with its default settings.
    fn default_of(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|(known, _)| *known == name).map(|(_, generator)| generator)
    }

    fn settings(&self) -> Map<String, Value> {
        each!(self, settings => settings::fields(settings), varied => {
            varied.generator.settings().into_iter().chain(settings::fields(&varied.profile)).collect()
        })
    }

    /// Returns whether requests arrive at a rate, so that a [`Profile`] can vary it.
    fn has_rate(&self) -> bool {
        self.settings().contains_key("rate")
    }

    /// Parses the settings of this generator except those of a profile.
    fn with_settings(mut self, given: &str) -> Result<Self, WorkloadError> {
        let name = self.name();
        each!(
            &mut self,
            settings => *settings = settings::read(settings, name, given, |read| read.check())?,
            varied => *varied.generator = varied.generator.clone().with_settings(given)?
        );
        Ok(self)
    }
}

impl FromStr for Generator {
    type Err = WorkloadError;

    /// Parses `name` or `name:setting=value,setting=value`. Omitted settings have their defaults.
    fn from_str(text: &str) -> Result<Self, WorkloadError> {
        let (name, given) = text.split_once(':').unwrap_or((text, ""));
        let Some(default) = Self::default_of(name) else {
            let known = Self::all().map(|(name, _)| name).join(", ");
            return Err(WorkloadError(format!("unknown workload {name:?}; known are {known}")));
        };
        if !default.has_rate() {
            return default.with_settings(given);
        }
        let of_profile = settings::fields(&Profile::default());
        let is_of_profile = |setting: &&str| {
            setting.split_once('=').is_some_and(|(setting, _)| of_profile.contains_key(setting.trim()))
        };
        let (varying, own): (Vec<&str>, Vec<&str>) = given.split(',').partition(is_of_profile);
        let generator = default.with_settings(&own.join(","))?;
        if varying.is_empty() {
            return Ok(generator);
        }
        let profile = settings::read(&Profile::default(), name, &varying.join(","), Profile::check)?;
        Ok(Self::Varied(Varied { generator: Box::new(generator), profile }))
    }
}

impl fmt::Display for Generator {
    /// Writes the name and the settings that differ from their defaults.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut default = Self::default_of(self.name()).map(|default| default.settings()).unwrap_or_default();
        if let Self::Varied(_) = self {
            default.extend(settings::fields(&Profile::default()));
        }
        let mut settings = self.settings();
        settings.retain(|name, value| default.get(name) != Some(value));
        let colon = if settings.is_empty() { "" } else { ":" };
        write!(f, "{}{colon}{}", self.name(), settings::write(&settings))
    }
}

/// Creates a workload and sorts its requests.
fn workload(name: &str, requests: Vec<Request>, arrivals: Arrivals) -> Workload {
    let mut workload = Workload { name: name.to_owned(), requests, arrivals, trace_checksum: None };
    workload.sort();
    workload
}
