//! Request bodies and identifiers of a handover from a prefill rank to a decode rank.
//!
//! A handed-over request has two legs. The prefill leg computes the KV cache of the prompt, and the decode leg loads
//! that cache and generates the response. [`LegBodies`] derives both bodies from the client's body, [`PrefillResponse`]
//! parses the response of the prefill leg, and [`CachedTokensRewriter`] corrects the response of the decode leg.
//!
//! Values pass byte for byte, because parameters of a transfer are opaque and differ between engine versions. The module
//! performs no I/O; the caller sends the legs, selects the ranks and chooses the identifiers.

use std::fmt;

use pointsman::named;
use serde::{Deserialize, Serialize};

mod completed;
mod ids;
mod legs;
pub(crate) mod object;
mod refusal;
mod response;
mod usage;

pub use ids::{bootstrap_room, p2p_request_id};
pub use legs::{LegBodies, Transfer};
pub use refusal::NotSplit;
pub use response::PrefillResponse;
pub use usage::CachedTokensRewriter;

named! {
/// Transfer protocol between the engines of the prefill pool and of the decode pool.
///
/// ```
/// use pointsman_gateway::formats::handover::Protocol;
///
/// assert_eq!(Protocol::VllmNixl.to_string(), "vllm_nixl");
/// assert!(Protocol::Sglang.is_concurrent());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    #[default]
    /// vLLM with the NIXL connector: the decode rank reads the blocks named in the prefill response.
    VllmNixl = "vllm_nixl",
    /// vLLM with the Mooncake connector: both ranks use one transfer id.
    VllmMooncake = "vllm_mooncake",
    /// vLLM with the P2P NCCL connector: the request id has both addresses.
    VllmP2pNccl = "vllm_p2p_nccl",
    /// SGLang: both ranks use one bootstrap room.
    Sglang = "sglang",
    /// TensorRT-LLM: the decode rank receives the prompt's token ids and the state of the context phase.
    TensorrtLlm = "tensorrt_llm",
}
}

impl Protocol {
    /// Whether a decode rank can compute prompts itself. SGLang's decode engines require a prefill leg.
    pub fn decode_prefills(self) -> bool {
        self != Self::Sglang
    }

    /// Whether both legs are sent at once. The prefill leg of SGLang completes only after its decode leg connects.
    pub fn is_concurrent(self) -> bool {
        match self {
            Self::VllmMooncake | Self::Sglang => true,
            Self::VllmNixl | Self::VllmP2pNccl | Self::TensorrtLlm => false,
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests;
