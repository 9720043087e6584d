//! The load model: what one rank has been given to do and has not finished.
//!
//! Owns the arithmetic of load. [`ActiveSequences`] keeps the bookings of one rank: prompt blocks
//! ([`PromptBlocks`]), blocks generated ([`OutputBlocks`]) and prefill work ([`PrefillLoadHint`]). From them
//! it answers [`RankLoad`] at any moment, [`Projection`] for a prompt that may come, and [`PrefillCurve`] for
//! those who want to know without asking. How fast the rank computes is learned beside it ([`SpeedMeter`]).
//!
//! Promises plain, exact arithmetic: weights are fixed point and tokens are whole, so that what a booking added
//! and what its end takes away are equal to the bit. Nothing costs time per block. Nothing here reads a clock;
//! `now` is an argument.
//!
//! Leaves to others which requests are booked where, who tells the model, and how its numbers travel.

mod board;
mod curve;
mod estimate;
mod hint;
mod lengths;
mod limits;
mod meter;
mod output;
mod prefill;
mod prompts;
#[doc(hidden)]
pub mod reference;
mod sequences;
mod sketch;
mod speed;
mod step;
mod weight;

pub use board::{BoardLoad, BoardSlot, BoardVersion};
pub use curve::PrefillCurve;
pub use estimate::{LearnedRate, PrefillEstimator, PrefillFacts};
pub use hint::PrefillLoadHint;
pub use lengths::{LengthKeys, OutputLengths};
pub use limits::PromptLimits;
pub use meter::SpeedMeter;
pub use output::OutputBlocks;
pub use sequences::{ActiveSequences, BookError, Booked, Change, Projection, PromptBlocks, RankLoad};
pub use sketch::{PromptMark, PromptSketch};
pub use speed::{ATTENTION_TOKENS, EngineSpeed, PublishedSpeed, SpeedCell, work_tokens};
pub use step::{LearnedStep, StepSample};
pub use weight::{Weight, WeightError};

use weight::BlockSum;
