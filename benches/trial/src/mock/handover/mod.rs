//! Disaggregated serving of the mock engine: one request, prefilled by one engine and decoded by another.
//!
//! Checks the rules of real engines and counts violations and lost blocks. [`params`] writes and verifies the parameters that a router
//! copies between the legs, and [`ledger`] tracks the blocks of finished prefills; both are pure. [`board`] is the state of
//! one engine, and [`transfer`] the HTTP exchange of the block transfer. A transfer moves no data, because equal prompts have equal blocks, but takes its time.

mod board;
mod ledger;
mod leg;
mod params;
mod transfer;

use std::net::SocketAddr;

use clap::ValueEnum;

pub(crate) use board::{HandoverBoard, NoResult, OpenTransfer, RunningLeg};
pub(crate) use ledger::{Claim, Grant, Refusal};
pub(crate) use leg::{DecodeLeg, Leg, PrefillLeg, Source, number, text};
pub(crate) use params::{nixl_claim, nixl_params, tensorrt_claim, tensorrt_params};
pub(crate) use transfer::{Push, TransferError};

pub use ledger::HandoverCounters;

/// Protocol between the prefill leg and the decode leg of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HandoverProtocol {
    /// vLLM's NIXL connector: the decode engine pulls the blocks that the answer of the prefill leg names.
    #[value(name = "vllm-nixl")]
    VllmNixl,
    /// vLLM's Mooncake connector: both legs are sent at once with a transfer id.
    #[value(name = "vllm-mooncake")]
    VllmMooncake,
    /// vLLM's P2P NCCL connector: the request id names both engines, and the prefill engine pushes the blocks.
    #[value(name = "vllm-p2p-nccl")]
    VllmP2pNccl,
    /// SGLang: both legs are sent at once with a bootstrap room.
    #[value(name = "sglang")]
    Sglang,
    /// TensorRT-LLM: the answer of the context leg has the parameters of the generation leg.
    #[value(name = "tensorrt-llm")]
    TensorrtLlm,
}

/// Legs that an engine serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum EngineRole {
    /// Prefill legs.
    Prefill,
    /// Decode legs.
    Decode,
    /// Both legs.
    #[default]
    Both,
}

/// Response of a vLLM decode engine to a failed transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LoadFailure {
    /// The decode engine computes the prompt.
    #[default]
    Recompute,
    /// The request fails with 500.
    Fail,
}

/// Configuration of the engine that the rules depend on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineFacts {
    pub(crate) protocol: HandoverProtocol,
    pub(crate) role: EngineRole,
    pub(crate) address: SocketAddr,
    pub(crate) ranks: u16,
}

impl HandoverProtocol {
    /// Whether a prefill engine has a bootstrap server on its own port.
    pub(crate) fn has_bootstrap_server(self) -> bool {
        matches!(self, Self::VllmMooncake | Self::Sglang)
    }

    /// Whether a decode leg waits for its prefill leg, because a router sends both at once.
    pub(crate) fn waits_for_prefill(self) -> bool {
        matches!(self, Self::VllmMooncake | Self::Sglang | Self::VllmP2pNccl)
    }

    /// Whether a decode engine may compute a prompt whose transfer failed.
    pub(crate) fn may_recompute(self) -> bool {
        matches!(self, Self::VllmNixl | Self::VllmMooncake | Self::VllmP2pNccl)
    }
}

impl EngineRole {
    /// Whether the engine serves prefill legs.
    pub(crate) fn has_prefill(self) -> bool {
        self != Self::Decode
    }

    /// Whether the engine serves decode legs.
    pub(crate) fn has_decode(self) -> bool {
        self != Self::Prefill
    }
}
