//! Messages of the world. Dropped reply channels, tokens and acknowledgements leave a notice, as in the actors.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use pointsman::internals::directory::Lease;
use pointsman::internals::load::PromptBlocks;
use pointsman::internals::membership::{Child, MembershipInput};
use pointsman::internals::protocol::{BookingId, Generation, Slot};
use pointsman::internals::select::RankOverlap;
use pointsman::internals::shell::sequence::SequenceMsg;
use pointsman::internals::shell::shard::ShardMsg;
use pointsman::internals::snapshot::RankSnapshot;
use pointsman::protocol::{BlockHash, Timestamp, WorkerId, WorkerRank};
use pointsman::{
    Decision, Outcome, ReplicaLife,
    internals::replica::LoadSummary,
    internals::schedule::{LoadAnswer, Request},
};

use crate::gateway::{Entry, EntrySource, LoadQuery, OverlapQuery, ToScheduler};
use crate::prompt::Prompt;

/// Names of blocks.
pub(crate) type Names = BTreeSet<u64>;

/// One message of an engine's publisher.
#[derive(Clone, Debug)]
pub(crate) struct Payload {
    pub(crate) bytes: Rc<[u8]>,
    /// Life of the engine, for the oracle.
    pub(crate) life: usize,
}

impl AsRef<[u8]> for Payload {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// State of an engine's cache that the index of a rank must equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag {
    pub(crate) engine: usize,
    pub(crate) rank: usize,
    pub(crate) life: usize,
    /// Number of applied messages of this life.
    pub(crate) next: u64,
    /// Whether every message since the last clear was applied. Otherwise the index holds a part.
    pub(crate) is_exact: bool,
}

/// Notices of dropped values, sent after the step by the actor that made it.
#[derive(Clone, Default)]
pub(crate) struct Outbox(Rc<RefCell<Vec<Notice>>>);

pub(crate) enum Notice {
    Lost(u64, u32),
    Overlaps(OverlapGoal, Vec<RankOverlap>),
    Loads(u64, Vec<LoadAnswer>),
    Acknowledged(Slot, Generation, Acknowledged),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acknowledged {
    Drain,
    Retire,
}

impl Outbox {
    fn push(&self, notice: Notice) {
        // Not during an unwind, which may hold the cell.
        if let Ok(mut notices) = self.0.try_borrow_mut() {
            notices.push(notice);
        }
    }

    pub(crate) fn take(&self) -> Vec<Notice> {
        std::mem::take(&mut *self.0.borrow_mut())
    }
}

/// Acknowledgement by drop.
pub(crate) struct Ack(pub(crate) Slot, pub(crate) Generation, pub(crate) Acknowledged, pub(crate) Outbox);

impl Drop for Ack {
    fn drop(&mut self) {
        self.3.push(Notice::Acknowledged(self.0, self.1, self.2));
    }
}

/// Reply channel of a caller. Without a reply the request is lost.
pub(crate) struct ReplyTo {
    pub(crate) call: u64,
    pub(crate) attempt: u32,
    pub(crate) outbox: Outbox,
    pub(crate) is_used: bool,
}

impl Drop for ReplyTo {
    fn drop(&mut self) {
        if !self.is_used {
            self.outbox.push(Notice::Lost(self.call, self.attempt));
        }
    }
}

/// Intake permit of a request without a reply.
pub(crate) struct Permit(pub(crate) Rc<std::cell::Cell<u32>>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Context of a request at the scheduler.
pub(crate) struct Context {
    pub(crate) lease: Arc<Lease>,
    pub(crate) reply: ReplyTo,
    /// Returned by drop.
    pub(crate) _permit: Permit,
}

/// What follows a scatter-gather query of the shards.
pub(crate) enum OverlapGoal {
    Decide(Box<Request<Context>>),
    Refresh(BookingId),
    /// Already followed.
    None,
}

/// Overlap query: complete when the last clone is dropped.
pub(crate) struct OverlapJoin {
    pub(crate) hashes: Arc<[BlockHash]>,
    pub(crate) prompt: Option<Rc<Prompt>>,
    pub(crate) found: RefCell<Vec<RankOverlap>>,
    pub(crate) goal: OverlapGoal,
    pub(crate) outbox: Outbox,
}

impl Drop for OverlapJoin {
    fn drop(&mut self) {
        let goal = std::mem::replace(&mut self.goal, OverlapGoal::None);
        self.outbox.push(Notice::Overlaps(goal, std::mem::take(&mut self.found.borrow_mut())));
    }
}

/// Load query of a batch.
pub(crate) struct LoadJoin {
    pub(crate) batch: u64,
    pub(crate) prompts: Arc<[PromptBlocks]>,
    pub(crate) found: RefCell<Vec<LoadAnswer>>,
    /// Whether the batch was closed before the query was complete.
    pub(crate) is_closed: std::cell::Cell<bool>,
    pub(crate) outbox: Outbox,
}

impl Drop for LoadJoin {
    fn drop(&mut self) {
        let answers = std::mem::take(&mut *self.found.borrow_mut());
        if !self.is_closed.get() || !answers.is_empty() {
            self.outbox.push(Notice::Loads(self.batch, answers));
        }
    }
}

/// A message to a shard, with the contents of the engine's cache after its events.
pub(crate) enum ToShard {
    Step(ShardMsg<OverlapQuery, (), EntrySource>, Option<Tag>),
    Dump(Box<RankSnapshot>, Generation, Tag),
}

/// Report of an engine on a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Progress {
    FirstToken,
    OutputBlock,
    Ended(Outcome),
}

pub(crate) enum Answer {
    Placed(Decision),
    Rejected,
    Lost,
}

pub(crate) struct Job {
    /// Place of the caller.
    pub(crate) caller: crate::net::Place,
    pub(crate) call: u64,
    pub(crate) attempt: u32,
    pub(crate) rank: usize,
    pub(crate) prompt: Rc<Prompt>,
    pub(crate) output_blocks: u32,
}

pub(crate) enum Letter {
    /// Element of the script.
    Act(usize),
    // To engines.
    Infer(Job),
    Abort(u64),
    Prefilled {
        life: usize,
        call: u64,
    },
    Decoded {
        life: usize,
        call: u64,
    },
    Subscribe {
        reader: crate::net::Place,
        rank: usize,
        connection: u64,
    },
    ReplayFrom {
        reader: crate::net::Place,
        rank: usize,
        replay: u64,
        from: u64,
    },
    Restart {
        life: usize,
    },
    // To callers.
    Answered(u32, Answer),
    Progress(u32, Progress),
    Retry(u32),
    Vanish,
    Scheduler(Box<ToScheduler>),
    Sequence(Box<SequenceMsg<Context, Ack, LoadQuery>>),
    Shard(Box<ToShard>),
    // To the supervisor.
    Member(MembershipInput<u64>),
    Acked(Slot, Generation, Acknowledged),
    DrainTimedOut(WorkerId, u64),
    Died(Child),
    Warmed(WorkerRank, u32),
    Discovered(bool),
    // To a reader.
    Connect,
    Connected(u64),
    Closed(u64),
    Live {
        connection: u64,
        sequence: u64,
        payload: Payload,
    },
    Replayed {
        replay: u64,
        sequence: u64,
        payload: Payload,
    },
    ReplayEnded(u64),
    ReplayFailed(u64),
    Tick,
    Resync,
    Served,
    TakeSnapshot,
    // To health.
    MembersChanged,
    Outcome(Rc<Entry>, Outcome, Timestamp),
    Probed {
        worker: WorkerId,
        prober: u64,
        is_ok: bool,
    },
    HealthWake,
    // To sharing.
    Share,
    Booked,
    Summary(ReplicaLife, Box<LoadSummary>),
    // Timers of a gateway.
    Sweep,
    Probe,
    Start,
}

impl Letter {
    pub(crate) fn scheduler(msg: ToScheduler) -> Self {
        Self::Scheduler(Box::new(msg))
    }

    pub(crate) fn sequence(msg: SequenceMsg<Context, Ack, LoadQuery>) -> Self {
        Self::Sequence(Box::new(msg))
    }

    pub(crate) fn shard(msg: ShardMsg<OverlapQuery, (), EntrySource>) -> Self {
        Self::Shard(Box::new(ToShard::Step(msg, None)))
    }

    /// Number of the kind, for the digest.
    pub(crate) fn name(&self) -> std::mem::Discriminant<Self> {
        std::mem::discriminant(self)
    }
}
