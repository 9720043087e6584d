//! Records of what the scheduler reads and decides, and their replay.
//!
//! [`Recorder`] performs the steps of a schedule on [loads](loads) whose reads it writes, and follows their progress: the
//! schedule knows of no record. [`Replay`] rebuilds the state of a schedule from the entries and decides again.

mod loads;
mod outcome;
mod reads;
mod recorder;
mod replay;
mod replay_loads;
mod request;

pub use recorder::Recorder;
pub use replay::{RecordedChoice, Replay, ReplayError, ReplayedDecision};
