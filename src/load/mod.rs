//! Load model: the unfinished bookings of a rank and the resulting load.
//!
//! [`ActiveSequences`] holds the bookings of one rank: prompt blocks ([`PromptBlocks`]), generated blocks
//! ([`OutputBlocks`]) and prefill work ([`PrefillLoadHint`]). It computes the [`RankLoad`] at any time, the
//! [`Projection`] of a further prompt, and the published [`PrefillCurve`]. [`SpeedMeter`] learns the speed of the rank.
//!
//! Arithmetic is exact: weights are fixed point and tokens are integers, so that the end of a booking subtracts exactly
//! the amount that it added. No operation costs time per block. `now` is an argument; nothing here reads a clock.
//!
//! The choice of ranks, the delivery of reports, and the publication of load are outside this module.

mod bias;
mod board;
mod changes;
mod curve;
mod estimate;
mod hint;
mod lengths;
mod limits;
mod meter;
mod output;
mod pace;
mod peers;
mod prefill;
mod prompts;
mod sequences;
mod sketch;
mod speed;
mod stall;
mod step;
mod weight;

pub use bias::{LearnedBias, PredictionBias};
pub use board::{BoardLoad, BoardSlot, BoardVersion};
pub use changes::BoardChanges;
pub use curve::PrefillCurve;
pub use estimate::{LearnedRate, PrefillEstimator};
pub use hint::PrefillLoadHint;
pub use lengths::{OutputLengths, RequestKeys};
pub use limits::PromptLimits;
pub use meter::SpeedMeter;
pub use output::OutputBlocks;
pub use pace::TokenPace;
pub use peers::{ArrivalsCell, PeerLoad, PeerLoadCell, PlacementRate};
pub use sequences::{ActiveSequences, BookError, BookedBlocks, Change, Projection, PromptBlocks, RankLoad};
pub use sketch::{PromptFingerprint, PromptSketch};
pub use speed::{ATTENTION_TOKENS, EngineSpeed, PublishedSpeed, SpeedCell, SpeedSample, work_tokens};
pub use stall::{StallCell, StallMeter};
pub use step::{LearnedStep, StepSample};
pub use weight::{Weight, WeightError};

use weight::BlockSum;
