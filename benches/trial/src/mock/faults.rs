//! Injected faults and their counters.
//!
//! A fault decision depends on the seed and on its subject (request number, or rank and sequence), never on the order
//! in which tasks run. The publisher and the HTTP server apply the faults.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::workload::mix;

/// Scope of the HTTP faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Every request except those to `/faults`.
    #[default]
    All,
    /// Completions and chat completions only; probes see a healthy engine.
    Generation,
}

/// Current faults. A *share* is a probability from 0 to 1. The default is no faults.
///
/// ```
/// use pointsman_trial::mock::Faults;
///
/// let faults: Faults = serde_json::from_str(r#"{ "drop_share": 0.05, "status_share": 1.0 }"#).expect("known fields");
/// assert_eq!((faults.drop_share, faults.status), (0.05, 500));
/// assert_eq!(Faults { drop_share: 1.5, ..Faults::default() }.validate().unwrap_err(), "drop_share is 1.5: a share is from 0 to 1");
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
#[serde(default, deny_unknown_fields)]
pub struct Faults {
    /// Delay of each response in real milliseconds.
    #[arg(long = "fault-delay-ms", value_name = "MS", default_value_t = 0)]
    pub delay_ms: u64,
    /// Share of requests that never receive a response.
    #[arg(long = "fault-hang-share", value_name = "SHARE", default_value_t = 0.0)]
    pub hang_share: f64,
    /// Share of requests whose connection is closed without a response.
    #[arg(long = "fault-reset-share", value_name = "SHARE", default_value_t = 0.0)]
    pub reset_share: f64,
    /// Share of requests that receive the status `status`.
    #[arg(long = "fault-status-share", value_name = "SHARE", default_value_t = 0.0)]
    pub status_share: f64,
    /// Status of injected errors, 400 to 599.
    #[arg(long = "fault-status", value_name = "STATUS", default_value_t = 500)]
    pub status: u16,
    /// Share of requests that receive garbage: bytes that are not HTTP, an HTML page, JSON that breaks off, or a head
    /// without its whole body, whole or in chunks. The status is 200.
    #[arg(long = "fault-garbage-share", value_name = "SHARE", default_value_t = 0.0)]
    pub garbage_share: f64,
    /// Share of responses whose connection closes in the middle of their body.
    #[arg(long = "fault-cut-share", value_name = "SHARE", default_value_t = 0.0)]
    pub cut_share: f64,
    /// Share of responses that stop in the middle of their body, on an open connection.
    #[arg(long = "fault-stall-share", value_name = "SHARE", default_value_t = 0.0)]
    pub stall_share: f64,
    /// Scope of the faults above.
    #[arg(long = "fault-scope", value_enum, default_value_t = Scope::All)]
    pub scope: Scope,
    /// Share of event messages that are not sent. The replay ring still contains them; also for the faults below.
    #[arg(long = "fault-drop-share", value_name = "SHARE", default_value_t = 0.0)]
    pub drop_share: f64,
    /// Share of event messages that are sent twice.
    #[arg(long = "fault-duplicate-share", value_name = "SHARE", default_value_t = 0.0)]
    pub duplicate_share: f64,
    /// Share of event messages that are sent after the next one, or alone if there is none for 20 ms.
    #[arg(long = "fault-reorder-share", value_name = "SHARE", default_value_t = 0.0)]
    pub reorder_share: f64,
    /// Share of event messages whose payload is truncated or has an invalid first byte.
    #[arg(long = "fault-mangle-share", value_name = "SHARE", default_value_t = 0.0)]
    pub mangle_share: f64,
    /// Share of removals that are missing from the event messages, also from replayed ones. The cache evicts the block.
    #[arg(long = "fault-omit-removal-share", value_name = "SHARE", default_value_t = 0.0)]
    pub omit_removal_share: f64,
    /// Ignores replay requests.
    #[arg(long = "fault-mute-replay")]
    pub mute_replay: bool,
}

impl Default for Faults {
    fn default() -> Self {
        super::flags::of_flags(&[])
    }
}

impl Faults {
    /// Validates shares and status.
    ///
    /// # Errors
    /// The first invalid field with its value.
    pub fn validate(&self) -> Result<(), String> {
        let fields = serde_json::to_value(self).map_err(|error| error.to_string())?;
        let shares = fields.as_object().into_iter().flatten().filter(|(name, _)| name.ends_with("_share"));
        let mut shares = shares.map(|(name, share)| (name, share.as_f64().unwrap_or(f64::NAN)));
        if let Some((name, share)) = shares.find(|(_, share)| !(0.0..=1.0).contains(share)) {
            return Err(format!("{name} is {share}: a share is from 0 to 1"));
        }
        if !(400..=599).contains(&self.status) {
            return Err(format!("status is {}: an error is from 400 to 599", self.status));
        }
        Ok(())
    }
}

/// Kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// A delayed response.
    Delay,
    /// A request without a response.
    Hang,
    /// A closed connection.
    Reset,
    /// An error response.
    Status,
    /// An event message that was not sent.
    Drop,
    /// An event message that was sent twice.
    Duplicate,
    /// An event message that was sent late.
    Reorder,
    /// An event message with a corrupted payload.
    Mangle,
    /// A replay request without a response.
    MuteReplay,
    /// A removal without an event.
    OmitRemoval,
    /// A response that is no valid response.
    Garbage,
    /// A response whose connection was closed in the middle of its body.
    Cut,
    /// A response that stopped in the middle of its body.
    Stall,
}

/// Faults of one engine: current settings, and counts of injected faults. Both survive a restart.
#[derive(Debug)]
pub struct FaultBoard {
    seed: u64,
    state: Mutex<FaultState>,
}

#[derive(Debug)]
struct FaultState {
    faults: Faults,
    done: BTreeMap<Fault, u64>,
}

impl FaultBoard {
    pub(crate) fn new(seed: u64, faults: Faults) -> Self {
        Self { seed, state: Mutex::new(FaultState { faults, done: BTreeMap::new() }) }
    }

    /// Current settings.
    #[must_use]
    pub fn get(&self) -> Faults {
        self.lock().faults.clone()
    }

    /// Number of injections of each fault since the start. Faults without an injection are absent.
    #[must_use]
    pub fn done(&self) -> BTreeMap<Fault, u64> {
        self.lock().done.clone()
    }

    pub(crate) fn replace(&self, faults: Faults) {
        self.lock().faults = faults;
    }

    pub(crate) fn count(&self, fault: Fault) {
        *self.lock().done.entry(fault).or_default() += 1;
    }

    /// Decides whether `fault` with probability `share` applies to this subject, and counts it if so.
    pub(crate) fn strikes(&self, fault: Fault, share: f64, source: u32, number: u64) -> bool {
        let strikes = share > 0.0 && unit(self.draw(fault, source, number)) < share;
        if strikes {
            self.count(fault);
        }
        strikes
    }

    /// Pseudo-random number of a decision: equal arguments and seeds give equal numbers.
    pub(crate) fn draw(&self, fault: Fault, source: u32, number: u64) -> u64 {
        [fault as u64, source.into(), number]
            .into_iter()
            .fold(splitmix(self.seed), |hash, part| splitmix(hash ^ splitmix(part)))
    }

    fn lock(&self) -> MutexGuard<'_, FaultState> {
        // Settings and counters are consistent after every statement, so a poisoned lock is usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Number after state `n` of the SplitMix64 sequence. Unlike [`mix`], it maps 0 to another number.
pub(crate) fn splitmix(n: u64) -> u64 {
    mix(n.wrapping_add(0x9e37_79b9_7f4a_7c15))
}

/// Maps the upper 53 bits to 0 (inclusive) to 1 (exclusive).
#[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
fn unit(draw: u64) -> f64 {
    (draw >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_apply_to_a_reproducible_share() {
        let board = FaultBoard::new(7, Faults::default());
        let struck =
            |board: &FaultBoard| (0..10_000).filter(|n| board.strikes(Fault::Drop, 0.05, 1, *n)).collect::<Vec<_>>();
        let first = struck(&board);
        assert!((400..600).contains(&first.len()), "{}", first.len());
        assert_eq!(first, struck(&FaultBoard::new(7, Faults::default())));
        assert_ne!(first, struck(&FaultBoard::new(8, Faults::default())));
        assert_eq!(board.done()[&Fault::Drop], first.len() as u64);
    }

    #[test]
    fn unknown_faults_and_invalid_values_are_rejected() {
        assert!(serde_json::from_str::<Faults>(r#"{"drop_shares": 1}"#).is_err());
        assert!(Faults { reset_share: f64::NAN, ..Faults::default() }.validate().is_err());
        let refused = Faults { status: 200, ..Faults::default() }.validate();
        assert_eq!(refused, Err("status is 200: an error is from 400 to 599".to_owned()));
    }
}
