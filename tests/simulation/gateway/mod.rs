//! One gateway: the state machines of a router behind shells that exchange messages as the actors do.
//!
//! The shells perform effects only. They follow `actors/`: messages and their receivers, losses with a dead actor, and
//! the state that its successor restores.

mod caller;
mod check;
mod health;
mod reader;
mod restarts;
mod scheduler;
mod sequence;
mod shard;
mod sharing;
mod supervisor;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use pointsman::RankConditions;
use pointsman::internals::directory::{Directory, Lease};
use pointsman::internals::health::{Exclusions, Monitor};
use pointsman::internals::load::{ArrivalsCell, BoardChanges};
use pointsman::internals::membership::{Membership, MembershipRules};
use pointsman::internals::protocol::{BookingId, Generation, Slot};
use pointsman::internals::queue::QueueHeads;
use pointsman::internals::schedule::{Input, RankCells};
use pointsman::internals::shell::CurrentIncarnation;
use pointsman::internals::shell::scheduler::SchedulerMsg;
use pointsman::internals::shell::sequence::SequenceMsg;
use pointsman::internals::shell::sharing::{SharingCells, SharingShell};
use pointsman::internals::shell::supervisor::SupervisorShell;
use pointsman::protocol::{Timestamp, WorkerId, WorkerRank};

use crate::discovery::Discovery;
use crate::engine::Engine;
use crate::ledger::Ledger;
use crate::letter::{Acknowledged, Answer, Letter, Notice, Outbox, OverlapGoal};
use crate::net::{Actor, Net, Place};
use crate::script::Settings;

pub(crate) use caller::Call;
pub(crate) use reader::Recorded;
pub(crate) use restarts::Victim;
pub(crate) use scheduler::ToScheduler;
pub(crate) use sequence::LoadQuery;
pub(crate) use shard::{EntrySource, OverlapQuery};

/// Record of a registered rank.
pub(crate) struct Entry {
    pub(crate) rank: WorkerRank,
    pub(crate) slot: Slot,
    pub(crate) generation: Generation,
    pub(crate) cells: RankCells,
    /// Credit of the stream state of its source.
    pub(crate) credit: Cell<f64>,
    pub(crate) has_served: Cell<bool>,
    pub(crate) since: Timestamp,
}

impl Entry {
    /// Number of the engine, and of the rank there.
    pub(crate) fn engine(&self) -> (usize, usize) {
        (self.rank.worker.0 as usize, self.rank.rank as usize)
    }

    /// The part of an overlap that counts.
    pub(crate) fn credited(&self, blocks: u32) -> u32 {
        (f64::from(blocks) * self.credit.get()) as u32
    }

    pub(crate) fn incarnation(&self) -> u64 {
        u64::from(self.slot.0) << 32 | u64::from(self.generation.0)
    }
}

/// The rest of the world during a step of a gateway.
pub(crate) struct Surroundings<'a> {
    pub(crate) net: &'a mut Net,
    pub(crate) engines: &'a [Engine],
    pub(crate) ledger: &'a mut Ledger,
    pub(crate) discovery: &'a Discovery,
    /// Lives of all gateways that are up.
    pub(crate) peers: &'a [(usize, u32, bool)],
}

pub(crate) struct Gateway {
    pub(crate) number: usize,
    pub(crate) life: u32,
    pub(crate) settings: Rc<Settings>,
    outbox: Outbox,
    permits: Rc<Cell<u32>>,
    directory: Arc<Directory>,
    scheduler_incarnation: Arc<CurrentIncarnation>,
    shard_incarnations: Vec<Arc<CurrentIncarnation>>,
    /// Number of ranks with a degraded event stream.
    degraded: Arc<AtomicUsize>,
    /// Leases that have not ended, or whose end a sequence actor does not know yet.
    leases: BTreeMap<BookingId, (u64, Arc<Lease>)>,
    /// Reconciliations under way.
    reconciling: BTreeMap<BookingId, u32>,
    calls: BTreeMap<u64, Call>,
    scheduler: Option<scheduler::Scheduler>,
    shards: Vec<Option<shard::Shard>>,
    sequences: BTreeMap<Slot, (Generation, Option<sequence::Sequence>)>,
    readers: BTreeMap<Slot, reader::Reader>,
    readers_started: u64,
    supervisor: SupervisorShell<u64, EntrySource>,
    /// Administrative calls without a reply.
    admin_pending: BTreeSet<u64>,
    admin_calls: u64,
    /// Times of restarts, for the check of the budget.
    restarts: Vec<Timestamp>,
    pub(crate) is_failed: bool,
    health: Option<Monitor>,
    health_wake: Option<Timestamp>,
    probers: BTreeMap<WorkerId, u64>,
    probers_started: u64,
    exclusions: Arc<Exclusions>,
    conditions: Arc<RankConditions>,
    board_changes: Arc<BoardChanges>,
    arrivals: Arc<ArrivalsCell>,
    queue_heads: Arc<QueueHeads>,
    /// Whether the scheduler waits for falling load.
    wake: Rc<Cell<bool>>,
    sharing: SharingShell,
    /// Contents of a snapshot that wait for their readers.
    restores: BTreeMap<WorkerRank, Recorded>,
    /// The last snapshot, by rank.
    pub(crate) disk: BTreeMap<WorkerRank, Recorded>,
    pub(crate) changed_at: Timestamp,
}

impl Gateway {
    /// A gateway that starts from the snapshot on `disk`.
    pub(crate) fn new(
        number: usize,
        life: u32,
        settings: &Rc<Settings>,
        disk: BTreeMap<WorkerRank, Recorded>,
        around: &mut Surroundings<'_>,
    ) -> Self {
        let shards = settings.config.index.shards as usize;
        let directory = Arc::default();
        let (board_changes, arrivals, queue_heads) =
            <(Arc<BoardChanges>, Arc<ArrivalsCell>, Arc<QueueHeads>)>::default();
        let mut gateway = Self {
            number,
            life,
            settings: Rc::clone(settings),
            outbox: Outbox::default(),
            permits: Rc::default(),
            directory: Arc::clone(&directory),
            scheduler_incarnation: Arc::default(),
            shard_incarnations: (0..shards).map(|_| Arc::default()).collect(),
            degraded: Arc::default(),
            leases: BTreeMap::new(),
            reconciling: BTreeMap::new(),
            calls: BTreeMap::new(),
            scheduler: None,
            shards: (0..shards).map(|_| None).collect(),
            sequences: BTreeMap::new(),
            readers: BTreeMap::new(),
            readers_started: 0,
            supervisor: Self::new_supervisor(settings, &directory),
            admin_pending: BTreeSet::new(),
            admin_calls: 0,
            restarts: Vec::new(),
            is_failed: false,
            health: None,
            health_wake: None,
            probers: BTreeMap::new(),
            probers_started: 0,
            exclusions: Arc::default(),
            conditions: Arc::default(),
            board_changes: Arc::clone(&board_changes),
            arrivals: Arc::clone(&arrivals),
            queue_heads: Arc::clone(&queue_heads),
            wake: Rc::default(),
            sharing: Self::new_sharing(SharingCells { arrivals, queue_heads, board_changes }),
            restores: reader::restored(&disk, &settings.config),
            disk,
            changed_at: around.net.now,
        };
        gateway.start(around);
        gateway
    }

    pub(crate) fn place(&self, actor: Actor) -> Place {
        Place::Gateway(self.number, self.life, actor)
    }

    fn send(&self, from: Actor, to: Actor, letter: Letter, around: &mut Surroundings<'_>) {
        around.net.send(self.place(from), self.place(to), letter);
    }

    fn new_supervisor(settings: &Settings, directory: &Arc<Directory>) -> SupervisorShell<u64, EntrySource> {
        let rules = MembershipRules::of(&settings.config, true);
        SupervisorShell::new(rules, Arc::clone(directory), settings.config.index.shards as usize)
    }

    fn membership(&self) -> &Membership<u64> {
        self.supervisor.membership()
    }

    /// A registered rank, retiring or not.
    fn entry(&self, slot: Slot) -> Option<&Rc<Entry>> {
        self.supervisor.rank(slot).map(|rank| &rank.0)
    }

    /// Registered ranks, retiring ones included.
    fn table(&self) -> impl Iterator<Item = &Rc<Entry>> {
        self.supervisor.ranks().values().map(|rank| &rank.0)
    }

    fn is_queueing(&self) -> bool {
        self.settings.config.queue.is_enabled()
    }

    /// Handles one message, and sends the notices of dropped values.
    pub(crate) fn handle(&mut self, actor: Actor, letter: Letter, around: &mut Surroundings<'_>) {
        if let Letter::Sequence(msg) = &letter
            && let SequenceMsg::Reconcile(lease) = &**msg
            && let Some(count) = self.reconciling.get_mut(&lease.booking())
        {
            *count -= 1;
        }
        match (actor, letter) {
            (Actor::Sequence(slot, generation), Letter::Sequence(msg)) => {
                self.on_sequence((Slot(slot), Generation(generation)), *msg, around);
            }
            (Actor::Scheduler, Letter::Scheduler(msg)) => self.on_scheduler(*msg, around),
            (Actor::Shard(shard), Letter::Shard(letter)) => self.on_shard(shard, *letter, around),
            (actor, letter) => self.handle_other(actor, letter, around),
        }
        self.send_notices(actor, around);
        self.check(actor, around.net.now);
    }

    fn handle_other(&mut self, actor: Actor, letter: Letter, around: &mut Surroundings<'_>) {
        match actor {
            Actor::Caller(call) => self.on_caller(call, letter, around),
            Actor::Scheduler | Actor::Shard(_) | Actor::Sequence(..) => unreachable!("no message of the actor"),
            Actor::Supervisor => self.on_supervisor(letter, around),
            Actor::Reader(slot, number) => self.on_reader(Slot(slot), number, letter, around),
            Actor::Health => self.on_health(letter, around),
            Actor::Sharing => self.on_sharing(letter, around),
        }
    }

    pub(crate) fn send_notices(&mut self, from: Actor, around: &mut Surroundings<'_>) {
        for notice in self.outbox.take() {
            let (to, letter) = match notice {
                Notice::Lost(call, attempt) => (Actor::Caller(call), Letter::Answered(attempt, Answer::Lost)),
                Notice::Overlaps(OverlapGoal::Decide(mut request), found) => {
                    request.overlaps = found;
                    (Actor::Scheduler, Letter::scheduler(SchedulerMsg::Decide(*request)))
                }
                Notice::Overlaps(OverlapGoal::Refresh(booking), found) => {
                    let msg = SchedulerMsg::Input(Input::Overlaps { booking, overlaps: found });
                    (Actor::Scheduler, Letter::scheduler(msg))
                }
                Notice::Overlaps(OverlapGoal::None, _) => continue,
                Notice::Loads(batch, answers) => {
                    (Actor::Scheduler, Letter::scheduler(SchedulerMsg::Input(Input::Loads { batch, answers })))
                }
                Notice::Acknowledged(slot, generation, kind) => {
                    (Actor::Supervisor, Letter::Acked(slot, generation, kind))
                }
            };
            self.send(from, to, letter, around);
        }
    }

    /// A lease has changed: its sequence actor adjusts the booking. At most one request per lease is under way.
    fn reconcile(&mut self, from: Actor, lease: &Arc<Lease>, place: (Slot, Generation), around: &mut Surroundings<'_>) {
        let is_there = self.entry(place.0).is_some_and(|entry| entry.generation == place.1);
        if is_there && lease.mark_dirty() {
            *self.reconciling.entry(lease.booking()).or_default() += 1;
            let to = Actor::Sequence(place.0.0, place.1.0);
            self.send(from, to, Letter::sequence(SequenceMsg::Reconcile(Arc::clone(lease))), around);
        }
    }

    fn ack(&self, slot: Slot, generation: Generation, kind: Acknowledged) -> crate::letter::Ack {
        crate::letter::Ack(slot, generation, kind, self.outbox.clone())
    }
}
