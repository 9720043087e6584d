//! Audit: comparison of a rank's index contents with the cache of its engine.
//!
//! An engine that supports audits replies to two requests at its replay socket: one for the [digest](BlockDigest) of its
//! cache, one for the names of its blocks. Each reply states a position, the number of the next event message, and
//! describes the cache after exactly the messages before it. The index is compared at the same position, so events in
//! flight cause no difference: digests of the index are sampled after each message that is applied during the request,
//! and names that changed during the request are excluded until the next audit.
//!
//! Equal digests prove equal contents. Otherwise the names are compared, and a [`Difference`] lists them. An engine
//! without support replies like to a replay without messages, and [`RingContents`] compares its replay buffer.
//!
//! The owner sends the requests, queries the index and heals. This module has no clock and no I/O.

mod contents;
mod result;
mod ring;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub use contents::{BlockName, DIGEST_REQUEST, EngineContents, NAMES_REQUEST};
pub use result::{AuditResult, Difference};
pub use ring::RingContents;

use super::Note;
use crate::index::BlockDigest;
use crate::protocol::{KvEvent, RouterEvent, Timestamp};
use ring::names_of;

/// Maximum duration of one request and its comparison.
const DURATION_MAX: Duration = Duration::from_secs(10);

/// Number of intervals between comparisons of the replay buffer, which reads all of it.
const RING_INTERVALS: u32 = 10;

/// Delay of the audit after a healed difference.
const CONFIRM_AFTER: Duration = Duration::from_secs(1);

/// Maximum number of samples. More messages during one request make an audit inconclusive.
const SAMPLES_MAX: usize = 4096;

/// Share of the engine's blocks, 1/16, from which missing blocks justify a replay of the whole stream.
const RESYNC_SHARE: usize = 16;

/// Delays between replays because of missing blocks: doubled up to the maximum, in case a replay does not help.
const RESYNC_AFTER_MIN: Duration = Duration::from_secs(60);
const RESYNC_AFTER_MAX: Duration = Duration::from_secs(3600);

/// Correction of a difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heal {
    /// Remove these blocks from the index.
    Forget(Vec<BlockName>),
    /// Drop the rank's blocks and replay the stream.
    Resync,
    /// Nothing: few blocks are missing, and the engine stores or evicts them in time. A replay could lose more.
    Wait,
}

/// Next step of an audit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuditStep {
    /// Nothing until a reply or another message.
    Wait,
    /// Send this request to the replay socket.
    Request(u64),
    /// Query the index for the names of the rank, and call [`Audit::compare`].
    QueryNames,
    /// The audit has ended.
    Ended(AuditResult),
}

/// Audits of one rank, one at a time.
///
/// ```
/// use std::time::Duration;
/// use pointsman::internals::index::BlockDigest;
/// use pointsman::EngineContents;
/// use pointsman::internals::ingest::{Audit, AuditResult, AuditStep, DIGEST_REQUEST};
/// use pointsman::protocol::Timestamp;
///
/// let (digest, now) = (BlockDigest { sum: 7, blocks: 1 }, Timestamp::default());
/// let mut audit = Audit::new(Duration::from_secs(60), now);
/// assert_eq!(audit.begin(now, 4, digest), AuditStep::Request(DIGEST_REQUEST));
/// audit.replied(5, EngineContents::Digest(digest));
/// assert_eq!(audit.step(now, 4), AuditStep::Wait, "message 4 is in flight");
/// audit.applied(5, &[], Some(digest));
/// assert_eq!(audit.step(now, 5), AuditStep::Ended(AuditResult::Equal));
/// ```
#[derive(Clone, Debug)]
pub struct Audit {
    interval: Duration,
    due: Timestamp,
    stage: AuditStage,
    last_equal: Option<Timestamp>,
    /// Whether events were lost since the index was last known to be complete, so that missing blocks are expected.
    is_incomplete: bool,
    resync_allowed: Timestamp,
    resync_after: Duration,
}

#[derive(Clone, Debug)]
enum AuditStage {
    Idle,
    Digest {
        started: Timestamp,
        /// Digests of the index by the number of the next message.
        samples: BTreeMap<u64, BlockDigest>,
        reply: Option<(u64, BlockDigest)>,
    },
    Names {
        started: Timestamp,
        /// Names in messages applied since the request.
        touched: BTreeSet<BlockName>,
        reply: Option<(u64, BTreeSet<BlockName>)>,
    },
    Ring {
        started: Timestamp,
        touched: BTreeSet<BlockName>,
        ring: RingContents,
        /// The number after the last message of the ring, at its end.
        end: Option<u64>,
    },
}

impl Audit {
    /// Audits at an interval; the first one is due after half of it.
    #[must_use]
    pub fn new(interval: Duration, now: Timestamp) -> Self {
        Self {
            interval,
            due: now + interval / 2,
            stage: AuditStage::Idle,
            last_equal: None,
            is_incomplete: false,
            resync_allowed: now,
            resync_after: RESYNC_AFTER_MIN,
        }
    }

    /// Time of the next [`Audit::begin`], or of the timeout of a running audit; `None` if audits are disabled.
    #[must_use]
    pub fn due(&self) -> Option<Timestamp> {
        match &self.stage {
            AuditStage::Idle => Some(self.due).filter(|_| !self.interval.is_zero()),
            AuditStage::Digest { started, .. }
            | AuditStage::Names { started, .. }
            | AuditStage::Ring { started, .. } => Some(*started + DURATION_MAX),
        }
    }

    /// Whether an audit is running.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !matches!(self.stage, AuditStage::Idle)
    }

    /// Whether the digest of the index is needed after each applied message.
    #[must_use]
    pub fn samples(&self) -> bool {
        matches!(self.stage, AuditStage::Digest { .. })
    }

    /// Postpones an audit that is due while no comparison is possible.
    pub fn postpone(&mut self, now: Timestamp) {
        self.due = now + self.interval;
    }

    /// Begins an audit of a caught-up stream whose next message is `next`, with the digest of the index at this position.
    pub fn begin(&mut self, now: Timestamp, next: u64, digest: BlockDigest) -> AuditStep {
        self.postpone(now);
        self.stage = AuditStage::Digest { started: now, samples: BTreeMap::from([(next, digest)]), reply: None };
        AuditStep::Request(DIGEST_REQUEST)
    }

    /// Records the events of an applied message, and the digest of the index after it if [`Audit::samples`].
    pub fn applied(&mut self, next: u64, events: &[RouterEvent], digest: Option<BlockDigest>) {
        match &mut self.stage {
            AuditStage::Idle => {}
            AuditStage::Digest { samples, .. } => match digest {
                Some(digest) if samples.len() < SAMPLES_MAX => drop(samples.insert(next, digest)),
                Some(_) | None => {}
            },
            AuditStage::Names { touched, .. } | AuditStage::Ring { touched, .. } => {
                for event in events {
                    touched.extend(names_of(event));
                }
                if events.iter().any(|event| matches!(event.data, KvEvent::Cleared)) {
                    self.stage = AuditStage::Idle;
                }
            }
        }
    }

    /// Ends a running audit without a result: the stream was interrupted, or the index lost its contents.
    pub fn abort(&mut self) {
        self.stage = AuditStage::Idle;
    }

    /// Records a note of the source.
    pub fn noted(&mut self, note: Note) {
        match note {
            Note::Cold => self.is_incomplete = true,
            // The stream is read from its beginning; otherwise the rank becomes cold again.
            Note::Incarnation => self.is_incomplete = false,
            _ => {}
        }
    }

    /// Records the reply of the engine, at the position before message `next`.
    pub fn replied(&mut self, next: u64, contents: EngineContents) {
        match (&mut self.stage, contents) {
            (AuditStage::Digest { reply, .. }, EngineContents::Digest(digest)) => *reply = Some((next, digest)),
            (AuditStage::Names { reply, .. }, EngineContents::Names(names)) => *reply = Some((next, names)),
            _ => self.stage = AuditStage::Idle,
        }
    }

    /// Records a reply without contents: the engine does not support audits. Its replay buffer is compared instead.
    pub fn unsupported(&mut self, now: Timestamp) -> AuditStep {
        self.due = now + self.interval * RING_INTERVALS;
        let (touched, ring) = (BTreeSet::new(), RingContents::default());
        self.stage = AuditStage::Ring { started: now, touched, ring, end: None };
        AuditStep::Request(0)
    }

    /// The replay buffer of the engine while it is read.
    pub fn ring(&mut self) -> Option<&mut RingContents> {
        match &mut self.stage {
            AuditStage::Ring { ring, end: None, .. } => Some(ring),
            _ => None,
        }
    }

    /// Records the end of the replay buffer.
    pub fn ring_ended(&mut self) {
        if let AuditStage::Ring { ring, end, .. } = &mut self.stage {
            *end = Some(ring.next);
        }
    }

    /// The next step, with the number of the next message to apply.
    pub fn step(&mut self, now: Timestamp, next: u64) -> AuditStep {
        let is_late = self.is_running() && self.due().is_some_and(|end| end <= now);
        match &self.stage {
            AuditStage::Idle => AuditStep::Wait,
            AuditStage::Digest { samples, reply: Some((at, digest)), .. } if next >= *at => match samples.get(at) {
                Some(sample) if sample == digest => self.end(now, AuditResult::Equal),
                Some(_) => {
                    self.stage = AuditStage::Names { started: now, touched: BTreeSet::new(), reply: None };
                    AuditStep::Request(NAMES_REQUEST)
                }
                None => self.end(now, AuditResult::Inconclusive),
            },
            AuditStage::Names { reply: Some((at, _)), .. } if next >= *at => AuditStep::QueryNames,
            AuditStage::Ring { end: Some(end), ring, .. } if next >= *end => match ring.is_evidence() {
                true => AuditStep::QueryNames,
                false => self.end(now, AuditResult::Unsupported),
            },
            _ if is_late => self.end(now, AuditResult::Inconclusive),
            AuditStage::Digest { .. } | AuditStage::Names { .. } | AuditStage::Ring { .. } => AuditStep::Wait,
        }
    }

    /// Compares the names of the index with those of the engine.
    pub fn compare(&mut self, now: Timestamp, index: &BTreeSet<BlockName>) -> AuditResult {
        let is_same = |touched: &BTreeSet<BlockName>, name: &BlockName| touched.contains(name);
        let (stale, mut missing): (Vec<_>, Vec<_>) = match &self.stage {
            AuditStage::Names { touched, reply: Some((_, engine)), .. } => (
                index.difference(engine).filter(|name| !is_same(touched, name)).copied().collect(),
                engine.difference(index).filter(|name| !is_same(touched, name)).copied().collect(),
            ),
            AuditStage::Ring { touched, ring, .. } => {
                let stale = index.iter().filter(|name| ring.is_gone(**name) && !is_same(touched, name));
                let missing = ring.held().filter(|name| !index.contains(name) && !is_same(touched, name));
                (stale.copied().collect(), missing.collect())
            }
            _ => return AuditResult::Inconclusive,
        };
        let is_ring = matches!(self.stage, AuditStage::Ring { .. });
        if self.is_incomplete {
            missing.clear();
        }
        let result = match (stale.is_empty() && missing.is_empty(), is_ring) {
            (false, _) => AuditResult::Different(Difference { stale, missing, since: self.last_equal }),
            (true, true) => AuditResult::Equal,
            // The names that differ have changed since, or are expected to be missing.
            (true, false) => AuditResult::Inconclusive,
        };
        match self.end(now, result) {
            AuditStep::Ended(result) => result,
            _ => AuditResult::Inconclusive,
        }
    }

    /// The correction of a difference at an engine with this number of blocks. The next audit follows soon.
    pub fn heal(&mut self, now: Timestamp, difference: &Difference, index_blocks: usize) -> Heal {
        let blocks = (index_blocks + difference.missing.len()).saturating_sub(difference.stale.len());
        let is_large = !difference.missing.is_empty() && difference.missing.len() * RESYNC_SHARE >= blocks;
        if is_large && self.resync_allowed <= now {
            self.resync_allowed = now + self.resync_after;
            self.resync_after = (self.resync_after * 2).min(RESYNC_AFTER_MAX);
            self.due = self.due.min(now + CONFIRM_AFTER);
            return Heal::Resync;
        }
        if difference.stale.is_empty() {
            return Heal::Wait;
        }
        self.due = self.due.min(now + CONFIRM_AFTER);
        Heal::Forget(difference.stale.clone())
    }

    fn end(&mut self, now: Timestamp, result: AuditResult) -> AuditStep {
        self.stage = AuditStage::Idle;
        if result == AuditResult::Equal {
            (self.last_equal, self.is_incomplete, self.resync_after) = (Some(now), false, RESYNC_AFTER_MIN);
        }
        AuditStep::Ended(result)
    }
}
