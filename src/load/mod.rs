//! The load model: what one rank has been given to do and has not finished.
//!
//! Owns the arithmetic of load and nothing that is shared. [`PrefillLoadHint`] is the prefill work of one
//! request, [`OutputBlocks`] what it has generated so far, [`Weight`] how much a block of it still counts.
//!
//! Promises plain, exact arithmetic: weights are fixed point, so that what a booking added and what its end
//! takes away are equal to the bit. Nothing here reads a clock; `now` is an argument.
//!
//! Leaves to others which requests are booked where, who tells the model, and how its numbers travel.

mod hint;
#[cfg_attr(not(test), expect(dead_code, reason = "read by the bookings, which come next"))]
mod output;
#[expect(dead_code, reason = "used by the bookings, which come next")]
mod prompts;
#[cfg_attr(not(test), expect(dead_code, reason = "summed by the bookings, which come next"))]
mod weight;

pub use hint::PrefillLoadHint;
pub use output::OutputBlocks;
pub use weight::{Weight, WeightError};

use weight::BlockSum;
