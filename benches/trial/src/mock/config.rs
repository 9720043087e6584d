//! Configuration of a mock engine.
//!
//! Defines defaults and validation rules. A valid configuration can always be started, unless a port is taken.
//! [`crate::engine::EngineConfig`] has the rules of the engine model.

use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use crate::engine::{BLOCKS_MAX, EngineConfig};
use clap::{Args, ValueEnum as _};

use super::faults::{Faults, splitmix};
use super::flags::of_flags;
use super::handover::{EngineRole, HandoverProtocol, LoadFailure};
use crate::kv_events::{Dialect, EventFormat};

/// Maximum number of data-parallel ranks per engine.
const DATA_PARALLEL_SIZE_MAX: u16 = 64;

/// Maximum size of a replay ring in messages.
const REPLAY_MESSAGES_MAX: usize = 1 << 20;

/// Maximum lease of blocks: one day.
const LEASE_MS_MAX: u64 = 86_400_000;

/// Configuration of a mock engine, which is also the command line of `pointsman mock-engine`. The default is that of
/// the command except for the port: tests get a free one.
///
/// ```
/// use pointsman_trial::mock::MockConfig;
///
/// let config = MockConfig { block_size: 4, kv_blocks: 9, ..MockConfig::default() };
/// assert_eq!(config.model_len_max(), 32); // one of the nine blocks is never handed out
/// assert!(config.validate().is_ok());
/// ```
#[derive(Clone, Debug, Args)]
#[command(next_line_help = true)]
pub struct MockConfig {
    /// Address to listen on, for HTTP and events.
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// HTTP port. 0 selects a free port, and free ports for events and replay unless they are given.
    #[arg(long, value_name = "PORT")]
    pub port: u16,
    /// Event port of rank 0; rank r uses the r-th port after it. 0 lets the system assign a port to each rank, at each
    /// restart anew. Default: the HTTP port + 1000.
    #[arg(long, value_name = "PORT")]
    pub event_port: Option<u16>,
    /// Replay port of rank 0; rank r uses the r-th port after it. 0: as for events. Default: the event port + 100, or 0
    /// with event port 0.
    #[arg(long, value_name = "PORT")]
    pub replay_port: Option<u16>,
    /// Name of the model.
    #[arg(long, value_name = "NAME", default_value = "mock")]
    pub model: String,
    /// LoRA adapter, served as a model under its own name. Repeatable.
    #[arg(long = "lora", value_name = "NAME")]
    pub loras: Vec<String>,
    /// Number of data-parallel ranks, each with its own cache, queue and event ports. The request header
    /// X-data-parallel-rank selects one.
    #[arg(long, value_name = "RANKS", default_value_t = 1)]
    pub data_parallel_size: u16,
    /// Event layout, by engine and release.
    #[arg(long, value_enum, default_value_t = Dialect::VllmMap)]
    pub dialect: Dialect,
    /// Writes block hashes as 32 bytes, as vLLM can; not with the SGLang dialects.
    #[arg(long)]
    pub binary_hashes: bool,
    /// API key that requests must carry as Authorization: Bearer. As in the engines, the vLLM dialects require it below
    /// /v1, and the SGLang dialects everywhere except below /health and /metrics.
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Returns 404 for /server_info, like vLLM.
    #[arg(long)]
    pub no_server_info: bool,
    /// Returns 404 for this path, such as /metrics. Repeatable.
    #[arg(long = "no-page", value_name = "PATH")]
    pub no_pages: Vec<String>,
    /// Delays the responses of this path, in real time, such as /server_info=13600. Repeatable.
    #[arg(long = "slow-page", value_name = "PATH=MS")]
    pub slow_pages: Vec<SlowPage>,
    /// Tokens per block.
    #[arg(long, value_name = "TOKENS", default_value_t = 64)]
    pub block_size: u32,
    /// Context parallelism: the pages report the block size divided by it, the events the block size.
    #[arg(long, value_name = "RANKS", default_value_t = 1)]
    pub context_parallel_size: u32,
    /// Evicts the blocks of open sessions last, as SGLang's option --enable-session-radix-cache.
    #[arg(long)]
    pub session_radix_cache: bool,
    /// Device memory blocks per rank, one of which is never allocated.
    #[arg(long, value_name = "BLOCKS", default_value_t = 7168)]
    pub kv_blocks: u32,
    /// Host memory blocks per rank, for blocks evicted from the device. 0: no host tier.
    #[arg(long, value_name = "BLOCKS", default_value_t = 0)]
    pub host_kv_blocks: u32,
    /// Maximum number of tokens per step, decodes and prefills together.
    #[arg(long, value_name = "TOKENS", default_value_t = 8192)]
    pub step_tokens_max: u32,
    /// Maximum number of running sequences per rank.
    #[arg(long, value_name = "SEQUENCES", default_value_t = 256)]
    pub sequences_max: u32,
    /// Maximum sequence length in tokens, prompt and output together. Default: 131072, or the capacity of the device
    /// memory if less.
    #[arg(long, value_name = "TOKENS")]
    pub max_model_len: Option<u32>,
    /// Virtual seconds per real second: 10 runs ten times as fast as the modelled GPU, 0 as fast as possible.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub time_scale: f64,
    /// Seed of output tokens, block hashes and fault decisions. Equal seeds and requests give equal events.
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,
    /// Generates each token from all tokens before it, so that a continued output equals an uninterrupted one. Otherwise
    /// a token depends on prompt and position.
    #[arg(long)]
    pub output_from_context: bool,
    /// Number of event messages that each rank keeps for replay.
    #[arg(long, value_name = "MESSAGES", default_value_t = 10_000)]
    pub replay_messages_max: usize,
    /// Maximum size of a request body in bytes.
    #[arg(long, value_name = "BYTES", default_value_t = 16 << 20)]
    pub body_bytes_max: usize,
    /// Protocol of disaggregated serving. Default: none, its request fields are ignored.
    #[arg(long, value_enum, value_name = "PROTOCOL")]
    pub handover: Option<HandoverProtocol>,
    /// Legs of disaggregated requests that the engine serves; an sglang engine serves one of them.
    #[arg(long, value_enum, default_value_t = EngineRole::Both)]
    pub role: EngineRole,
    /// Time that the blocks of a prefill are held for a decode engine, and that a leg waits for its counterpart.
    #[arg(long, value_name = "MS", default_value_t = 30_000)]
    pub block_lease_ms: u64,
    /// Port of the bootstrap server of a prefill engine, with sglang and vllm-mooncake. Default: a free port if the HTTP
    /// port is 0, else 8998. 0 selects a free port.
    #[arg(long, value_name = "PORT")]
    pub bootstrap_port: Option<u16>,
    /// Response of a vLLM decode engine to a failed transfer.
    #[arg(long, value_enum, default_value_t = LoadFailure::Recompute)]
    pub handover_failure: LoadFailure,
    /// Time of a block transfer in virtual microseconds per prompt token. The default is that of 128 KiB per token, as
    /// of an 8B model, at 50 GB/s.
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 2.6)]
    pub transfer_us_per_token: f64,
    /// Initial faults; `POST /faults` replaces them.
    #[command(flatten)]
    pub faults: Faults,
}

impl Default for MockConfig {
    fn default() -> Self {
        of_flags(&["--port", "0"])
    }
}

/// A path whose responses are delayed: `PATH=MS`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlowPage {
    /// The path.
    pub path: String,
    /// The delay.
    pub delay: Duration,
}

impl FromStr for SlowPage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (path, ms) = text.split_once('=').ok_or("must be PATH=MS")?;
        let ms = ms.parse().map_err(|error| format!("the delay is {ms:?}: {error}"))?;
        Ok(Self { path: path.to_owned(), delay: Duration::from_millis(ms) })
    }
}

impl MockConfig {
    /// Validates every setting.
    ///
    /// # Errors
    /// A message with the first invalid value and its rule.
    pub fn validate(&self) -> Result<(), String> {
        let size = self.data_parallel_size;
        if !(1..=DATA_PARALLEL_SIZE_MAX).contains(&size) {
            return Err(format!("data_parallel_size is {size}, not within 1 to {DATA_PARALLEL_SIZE_MAX}"));
        }
        if !self.block_size.is_multiple_of(self.context_parallel_size) || self.context_parallel_size == 0 {
            return Err(format!("context_parallel_size is {}, must divide block_size", self.context_parallel_size));
        }
        if !(0.0..=1e6).contains(&self.time_scale) {
            return Err(format!("time_scale is {}, not within 0 to 1000000", self.time_scale));
        }
        if !(0.0..=1e6).contains(&self.transfer_us_per_token) {
            return Err(format!("transfer_us_per_token is {}, not within 0 to 1000000", self.transfer_us_per_token));
        }
        if self.replay_messages_max > REPLAY_MESSAGES_MAX {
            let kept = self.replay_messages_max;
            return Err(format!("replay_messages_max is {kept}, over {REPLAY_MESSAGES_MAX}"));
        }
        self.validate_handover()?;
        self.events().validate()?;
        self.faults.validate()?;
        let mut names: Vec<&str> = self.loras.iter().chain([&self.model]).map(String::as_str).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("model name {:?} is used twice", twice[0]));
        }
        if names[0].is_empty() {
            return Err("a model has an empty name".to_owned());
        }
        self.engine(0, self.dialect).validate().map_err(|error| error.to_string())
    }

    fn validate_handover(&self) -> Result<(), String> {
        let role = self.role.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        match self.handover {
            None if self.role != EngineRole::Both => Err(format!("role is {role}: it requires handover")),
            Some(HandoverProtocol::Sglang) if self.role == EngineRole::Both => {
                Err("role is both: handover sglang requires prefill or decode".to_owned())
            }
            _ if !(1..=LEASE_MS_MAX).contains(&self.block_lease_ms) => {
                Err(format!("block_lease_ms is {}, not within 1 to {LEASE_MS_MAX}", self.block_lease_ms))
            }
            None | Some(_) => Ok(()),
        }
    }

    /// Block size on the pages.
    pub(crate) fn stated_block_size(&self) -> u32 {
        self.block_size / self.context_parallel_size
    }

    /// Whether the engine has a bootstrap server.
    pub(crate) fn has_bootstrap_server(&self) -> bool {
        self.role.has_prefill() && self.handover.is_some_and(HandoverProtocol::has_bootstrap_server)
    }

    /// Format of the events.
    #[must_use]
    pub fn events(&self) -> EventFormat {
        EventFormat { dialect: self.dialect, binary_hashes: self.binary_hashes }
    }

    /// Maximum sequence length in tokens.
    #[must_use]
    pub fn model_len_max(&self) -> u32 {
        let held = self.kv_blocks.saturating_sub(1).saturating_mul(self.block_size);
        self.max_model_len.unwrap_or_else(|| held.min(EngineConfig::default().max_model_len))
    }

    /// Configuration of the engine model for one rank. With a vLLM `dialect` the cache keeps duplicate blocks, with
    /// SGLang it does not. Block hashes differ between ranks, as between real processes; output tokens do not.
    pub(crate) fn engine(&self, rank: u16, dialect: Dialect) -> EngineConfig {
        let host_kv_blocks = match dialect {
            // LMCache names its chunks itself, so nothing outside knows its contents.
            Dialect::VllmLmcache | Dialect::VllmWindow | Dialect::VllmMamba => Some(0),
            // The store does not report its evictions, so there are none.
            Dialect::VllmMooncake => Some(BLOCKS_MAX),
            Dialect::VllmArray | Dialect::VllmMap | Dialect::SglangArray | Dialect::SglangMap => None,
            Dialect::VllmOffloading | Dialect::VllmSelfDescribing => None,
        };
        EngineConfig {
            block_size: self.block_size,
            kv_blocks: self.kv_blocks,
            host_kv_blocks: host_kv_blocks.unwrap_or(self.host_kv_blocks),
            writes_through: dialect.has_connector(),
            beside_window_blocks: dialect.beside_window_blocks(),
            deduplicates: dialect.is_sglang(),
            refers_sessions: self.session_radix_cache,
            step_tokens_max: self.step_tokens_max,
            sequences_max: self.sequences_max,
            max_model_len: self.model_len_max(),
            hash_seed: splitmix(self.seed ^ splitmix(rank.into())),
            output_seed: self.seed,
            output_from_context: self.output_from_context,
            ..EngineConfig::default()
        }
    }
}

impl EventFormat {
    /// Checks that the dialect supports the hash format.
    ///
    /// # Errors
    /// Binary hashes with an SGLang dialect.
    pub fn validate(self) -> Result<(), String> {
        if self.binary_hashes && self.dialect.is_sglang() {
            return Err("binary_hashes is true: only the vLLM dialects support it".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_equals_the_command_defaults() {
        #[derive(clap::Parser)]
        struct Cli {
            #[command(flatten)]
            config: MockConfig,
        }
        let parsed = <Cli as clap::Parser>::parse_from(["mock-engine", "--port", "0"]).config;
        assert_eq!(format!("{parsed:?}"), format!("{:?}", MockConfig::default()));
        assert_eq!(parsed.validate(), Ok(()));
    }

    #[test]
    fn each_violation_names_setting_and_value() {
        let refused = |change: fn(&mut MockConfig)| {
            let mut config = MockConfig::default();
            change(&mut config);
            config.validate().expect_err("a rule is broken")
        };
        let cases = [
            (refused(|config| config.data_parallel_size = 0), "data_parallel_size is 0"),
            (refused(|config| config.time_scale = -1.0), "time_scale is -1"),
            (refused(|config| config.time_scale = f64::NAN), "time_scale is NaN"),
            (refused(|config| config.replay_messages_max = usize::MAX), "replay_messages_max is 1844"),
            (refused(|config| config.loras = vec!["mock".to_owned()]), "model name \"mock\" is used twice"),
            (refused(|config| config.model = String::new()), "a model has an empty name"),
            (refused(|config| config.faults.drop_share = 2.0), "drop_share is 2"),
            (refused(|config| config.step_tokens_max = 10), "step_tokens_max is 10"),
            (refused(|config| config.max_model_len = Some(10_000_000)), "max_model_len 10000000"),
            (refused(|config| config.block_size = 0), "block_size is 0"),
            (refused(|config| config.role = EngineRole::Prefill), "role is prefill"),
            (refused(|config| config.handover = Some(HandoverProtocol::Sglang)), "role is both"),
            (refused(|config| config.block_lease_ms = 0), "block_lease_ms is 0"),
            (
                refused(|config| (config.dialect, config.binary_hashes) = (Dialect::SglangMap, true)),
                "binary_hashes is true",
            ),
        ];
        for (error, expected) in cases {
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
