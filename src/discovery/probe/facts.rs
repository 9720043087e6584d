//! Facts of one engine, collected from its pages.
//!
//! No page is required: an engine that answers any page is described, and a missing page costs facts. A page that fails
//! keeps its last facts. The actors request the pages.

use std::collections::{BTreeMap, BTreeSet};

use super::event_sources;
use super::metrics::EngineMetrics;
use super::models::ModelList;
use super::sglang::ServerInfo;
use super::{Described, Engine, ProbeError};
use crate::discovery::HttpUrl;
use crate::protocol::{KvEventsConfig, LoadSource};

/// Page of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EnginePage {
    /// Served models, of every OpenAI-compatible engine.
    Models,
    /// Configuration of SGLang.
    ServerInfo,
    /// Metrics; those of vLLM contain its configuration.
    Metrics,
    /// KV event endpoints of vLLM.
    EventSources,
}

impl EnginePage {
    /// All pages.
    pub const ALL: [Self; 4] = [Self::Models, Self::ServerInfo, Self::Metrics, Self::EventSources];

    /// Its path, and an older one.
    #[must_use]
    pub fn paths(self) -> &'static [&'static str] {
        match self {
            Self::Models => &["/v1/models"],
            Self::ServerInfo => &["/server_info", "/get_server_info"],
            Self::Metrics => &["/metrics"],
            Self::EventSources => &["/kv_event_sources"],
        }
    }
}

/// Result of a request for a page.
#[derive(Clone, Debug, PartialEq)]
pub enum PageAnswer {
    /// The content of the page.
    Body(Vec<u8>),
    /// The engine does not have the page, with the reason.
    Missing(String),
    /// The engine requires another API key, with the reason.
    Denied(String),
    /// No content, with the reason. The engine may have the page.
    Failed(String),
}

/// Facts of one page.
#[derive(Clone, Debug, PartialEq)]
enum PageFacts<T> {
    /// The page has not responded.
    Unknown(String),
    /// The engine does not have the page, or has another content there.
    Absent(String),
    /// Facts of the last valid response.
    Known(T),
}

/// Facts of one engine, by page.
///
/// ```
/// use pointsman::{internals::discovery::{EngineFacts, EnginePage, PageAnswer}, HttpUrl};
///
/// let (url, mut facts) = (HttpUrl::parse("http://e:8000")?, EngineFacts::default());
/// facts.record(&url, EnginePage::Models, PageAnswer::Body(br#"{ "data": [{ "id": "llama" }] }"#.to_vec()))?;
/// let metrics = br#"vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0"#;
/// facts.record(&url, EnginePage::Metrics, PageAnswer::Body(metrics.to_vec()))?;
/// let described = facts.describe(&url)?;
/// assert_eq!((described.block_size, described.cache_tokens), (Some(16), Some(16_000)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct EngineFacts {
    models: PageFacts<ModelList>,
    server_info: PageFacts<ServerInfo>,
    metrics: PageFacts<EngineMetrics>,
    event_sources: PageFacts<BTreeMap<u32, KvEventsConfig>>,
    /// Whether the list of models requires another API key. Other pages may need none, and requests would fail.
    is_denied: bool,
}

impl Default for EngineFacts {
    fn default() -> Self {
        let unknown = || "no response".to_owned();
        Self {
            models: PageFacts::Unknown(unknown()),
            server_info: PageFacts::Unknown(unknown()),
            metrics: PageFacts::Unknown(unknown()),
            event_sources: PageFacts::Unknown(unknown()),
            is_denied: false,
        }
    }
}

impl EngineFacts {
    /// Maximum size of a page in bytes.
    pub const BYTES_MAX: usize = 4 << 20;

    /// Records the answer of a page of the engine at `url`.
    ///
    /// # Errors
    /// The reason for which the answer has no content, or invalid content in place of earlier valid one. The facts of
    /// the page stay.
    pub fn record(&mut self, url: &HttpUrl, page: EnginePage, answer: PageAnswer) -> Result<(), String> {
        if page == EnginePage::Models {
            self.is_denied = matches!(answer, PageAnswer::Denied(_));
        }
        match page {
            EnginePage::Models => self.models.record(answer, ModelList::read),
            EnginePage::ServerInfo => self.server_info.record(answer, |body| ServerInfo::read(url, body)),
            EnginePage::Metrics => self.metrics.record(answer, EngineMetrics::read),
            EnginePage::EventSources => self.event_sources.record(answer, event_sources::read),
        }
    }

    /// Whether the page has responded with facts, now or before.
    #[must_use]
    pub fn is_known(&self, page: EnginePage) -> bool {
        match page {
            EnginePage::Models => self.models.known().is_some(),
            EnginePage::ServerInfo => self.server_info.known().is_some(),
            EnginePage::Metrics => self.metrics.known().is_some(),
            EnginePage::EventSources => self.event_sources.known().is_some(),
        }
    }

    /// Whether a publisher at the default port of vLLM is of interest: vLLM before 0.31 does not report its endpoints.
    #[must_use]
    pub fn may_publish_unreported(&self) -> bool {
        self.server_info.known().is_none() && matches!(self.event_sources, PageFacts::Absent(_))
    }

    /// The configuration of the engine at `url`.
    ///
    /// # Errors
    /// No page with known content, a list of models that requires another API key, or rank numbers that are not consecutive.
    pub fn describe(&self, url: &HttpUrl) -> Result<Described, ProbeError> {
        let (models, info, metrics) = (self.models.known(), self.server_info.known(), self.metrics.known());
        if models.is_none() && info.is_none() && metrics.is_none() && self.event_sources.known().is_none() {
            return Err(ProbeError::NoPage(self.reasons()));
        }
        if self.is_denied && models.is_none() {
            return Err(ProbeError::NoPage(self.models.reason(EnginePage::Models)));
        }
        let vllm = metrics.filter(|metrics| metrics.is_vllm);
        let engine = match (info, vllm, self.event_sources.known()) {
            (Some(_), _, _) => Engine::Sglang,
            (None, Some(_), _) | (None, None, Some(_)) => Engine::Vllm,
            (None, None, None) => Engine::Other,
        };
        let (start, size) = match info {
            Some(info) => (0, info.data_parallel_size),
            None => in_a_row(&self.vllm_ranks())?,
        };
        let block_size = match info {
            Some(info) => info.block_size,
            None => vllm.and_then(|metrics| metrics.block_size),
        };
        let vllm_tokens = || vllm.and_then(|metrics| Some(metrics.blocks? * u64::from(metrics.block_size?)));
        let load_page = || LoadSource::Metrics(url.below("/metrics").to_string());
        let load = info.and_then(|info| info.load.clone());
        let load = load.or_else(|| metrics.filter(|metrics| metrics.has_load).map(|_| load_page()));
        let mut described = Described {
            engine,
            models: self.model_names(),
            lora_adapters: models.map(|models| models.lora_adapters.clone()).unwrap_or_default(),
            block_size,
            cache_tokens: info.map_or_else(vllm_tokens, |info| info.cache_tokens),
            data_parallel_start_rank: start,
            data_parallel_size: size,
            max_num_batched_tokens: info.and_then(|info| info.max_num_batched_tokens),
            max_model_len: info
                .and_then(|info| info.max_model_len)
                .or_else(|| models.and_then(|models| models.max_model_len)),
            kv_events: info.and_then(|info| info.kv_events.clone()),
            kv_events_by_rank: self.event_sources.known().cloned(),
            load,
            transfer_port: info.and_then(|info| info.transfer_port),
            role: info.and_then(|info| info.role),
            session_hints: info.is_some_and(|info| info.session_hints),
            priority_hints: info.is_some_and(|info| info.priority_hints),
            model_is_pending: matches!(self.models, PageFacts::Unknown(_)),
            unreported: BTreeMap::new(),
        };
        described.unreported = self.unreported(&described);
        Ok(described)
    }

    /// Names of the served model; `None` if no page has them.
    fn model_names(&self) -> Option<BTreeSet<String>> {
        let listed = self.models.known().map(|list| list.models.clone());
        let of_info = self.server_info.known().map(|info| info.models.clone()).filter(|names| !names.is_empty());
        let labels = || Some(self.metrics.known()?.models.clone()).filter(|names| !names.is_empty());
        match (listed, of_info) {
            (Some(listed), of_info) => Some(listed.into_iter().chain(of_info.into_iter().flatten()).collect()),
            (None, of_info) => of_info.or_else(labels),
        }
    }

    /// Rank numbers of a vLLM engine. Its publishers have the same numbers, if its metrics are not available.
    fn vllm_ranks(&self) -> BTreeSet<u32> {
        let labels = self.metrics.known().map(|metrics| metrics.ranks.clone()).filter(|ranks| !ranks.is_empty());
        let publishers = || self.event_sources.known().map(|sources| sources.keys().copied().collect());
        labels.or_else(publishers).unwrap_or_default()
    }

    /// Facts that no page reports, with the reason.
    fn unreported(&self, described: &Described) -> BTreeMap<String, String> {
        let of_metrics = || self.metrics.reason(EnginePage::Metrics);
        let of_configuration = || match &self.server_info {
            PageFacts::Known(_) => self.server_info.reason(EnginePage::ServerInfo),
            PageFacts::Unknown(_) | PageFacts::Absent(_) => of_metrics(),
        };
        let mut unreported = BTreeMap::new();
        let mut add = |fact: &str, reason: String| drop(unreported.insert(fact.to_owned(), reason));
        if described.models.is_none() {
            add("model", self.models.reason(EnginePage::Models));
        }
        // SGLang reports its pages of events, and without events their size is irrelevant.
        if described.block_size.is_none() && described.engine != Engine::Sglang {
            add("block size", of_configuration());
        }
        if described.cache_tokens.is_none() {
            add("KV cache size", of_configuration());
        }
        if described.load.is_none() {
            add("load", of_metrics());
        }
        unreported
    }

    /// Reasons of all pages, each once.
    fn reasons(&self) -> String {
        let mut pages = BTreeMap::<&str, Vec<&str>>::new();
        for page in EnginePage::ALL {
            let reason = match page {
                EnginePage::Models => self.models.bare_reason(),
                EnginePage::ServerInfo => self.server_info.bare_reason(),
                EnginePage::Metrics => self.metrics.bare_reason(),
                EnginePage::EventSources => self.event_sources.bare_reason(),
            };
            pages.entry(reason).or_default().push(page.paths()[0]);
        }
        let shown = pages.iter().map(|(reason, paths)| format!("{}: {reason}", paths.join(", ")));
        shown.collect::<Vec<_>>().join("; ")
    }
}

impl<T> PageFacts<T> {
    fn record(&mut self, answer: PageAnswer, read: impl FnOnce(&[u8]) -> Result<T, String>) -> Result<(), String> {
        match answer {
            PageAnswer::Body(body) => match read(&body) {
                Ok(facts) => *self = Self::Known(facts),
                Err(reason) => {
                    let reason = format!("unknown content: {reason}");
                    if self.known().is_some() {
                        return Err(reason);
                    }
                    *self = Self::Absent(reason);
                }
            },
            PageAnswer::Missing(reason) => *self = Self::Absent(reason),
            PageAnswer::Failed(reason) | PageAnswer::Denied(reason) => {
                if self.known().is_none() {
                    *self = Self::Unknown(reason.clone());
                }
                return Err(reason);
            }
        }
        Ok(())
    }

    fn known(&self) -> Option<&T> {
        if let Self::Known(facts) = self { Some(facts) } else { None }
    }

    fn bare_reason(&self) -> &str {
        match self {
            Self::Known(_) => "it does not contain this",
            Self::Unknown(reason) | Self::Absent(reason) => reason,
        }
    }

    fn reason(&self, page: EnginePage) -> String {
        format!("{}: {}", page.paths()[0], self.bare_reason())
    }
}

/// First rank and number of ranks; a single rank without numbers.
fn in_a_row(ranks: &BTreeSet<u32>) -> Result<(u32, u32), ProbeError> {
    let (Some(&first), Some(&last)) = (ranks.first(), ranks.last()) else { return Ok((0, 1)) };
    let size = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
    if last - first == size - 1 { Ok((first, size)) } else { Err(ProbeError::Ranks(ranks.clone())) }
}
