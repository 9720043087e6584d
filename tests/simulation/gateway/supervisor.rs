//! Shell of the supervisor: performs the effects of `Membership`.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use pointsman::DiscoveryError;
use pointsman::internals::membership::{MembershipEffect, MembershipInput, SourceUpdate};
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::internals::schedule::{Admission, Input, RankCells};
use pointsman::internals::shell::scheduler::SchedulerMsg;
use pointsman::internals::shell::shard::ShardMsg;
use pointsman::internals::shell::supervisor::SupervisorInput;

use super::scheduler::sequence_handle;
use super::shard::registered;
use super::{Entry, EntrySource, Gateway, Surroundings};
use crate::letter::{Acknowledged, Letter};
use crate::net::Actor;

const DISCOVERY_INTERVAL: Duration = Duration::from_millis(150);

impl Gateway {
    pub(super) fn start(&mut self, around: &mut Surroundings<'_>) {
        self.start_scheduler(0, around);
        for shard in 0..self.shards.len() {
            self.start_shard(shard, 0, &[], around.net.now);
        }
        self.start_health(around);
        self.step_membership(MembershipInput::SourceAdded("list".to_owned()), around);
        self.discover(false, around);
        let me = self.place(Actor::Supervisor);
        let liveness = Duration::from_millis(self.settings.config.load.booking_liveness_ms);
        around.net.after(liveness / 4, me, Letter::Sweep);
        around.net.after(Duration::from_millis(self.settings.config.health.probe_interval_ms), me, Letter::Probe);
        around.net.after(DISCOVERY_INTERVAL, me, Letter::Discovered(false));
        let interval = Duration::from_millis(self.settings.config.replicas.interval_ms);
        around.net.after(interval, self.place(Actor::Sharing), Letter::Share);
    }

    /// The source returns the workers that discovery reports, or an error.
    fn discover(&mut self, fails: bool, around: &mut Surroundings<'_>) {
        let update = if fails {
            SourceUpdate::Failed(DiscoveryError::Other("the source fails".to_owned()))
        } else {
            SourceUpdate::Workers(around.discovery.workers(around.net.now))
        };
        self.step_membership(MembershipInput::SourceUpdated { source: 0, update }, around);
        self.step_membership(MembershipInput::Reconcile, around);
    }

    /// A call of the embedder, with the number of its reply channel.
    pub(crate) fn admin(&mut self, input: impl FnOnce(u64) -> MembershipInput<u64>, around: &mut Surroundings<'_>) {
        if self.is_failed {
            return;
        }
        self.admin_calls += 1;
        self.admin_pending.insert(self.admin_calls);
        let letter = Letter::Member(input(self.admin_calls));
        self.send(Actor::Caller(u64::MAX), Actor::Supervisor, letter, around);
    }

    pub(super) fn on_supervisor(&mut self, letter: Letter, around: &mut Surroundings<'_>) {
        if self.is_failed {
            return;
        }
        let me = self.place(Actor::Supervisor);
        match letter {
            Letter::Member(input) => self.step_membership(input, around),
            Letter::Acked(slot, generation, Acknowledged::Drain) => {
                self.step_supervisor(SupervisorInput::Drained { slot, generation }, around);
            }
            Letter::Acked(slot, generation, Acknowledged::Retire) => {
                self.step_membership(MembershipInput::RankRetired { slot, generation }, around);
            }
            Letter::DrainTimedOut(worker, drain) => {
                self.step_supervisor(SupervisorInput::DrainTimedOut { worker, drain }, around);
            }
            Letter::Died(child) => {
                let reason = "a fault of the script".to_owned();
                self.step_supervisor(SupervisorInput::Died { child, reason }, around);
            }
            Letter::Warmed(rank, incarnation) => {
                self.step_supervisor(SupervisorInput::Warmed { rank, incarnation }, around);
            }
            Letter::Discovered(fails) => {
                self.discover(fails, around);
                if !fails {
                    around.net.after(DISCOVERY_INTERVAL, me, Letter::Discovered(false));
                }
            }
            Letter::Sweep => {
                self.sweep(around);
                let liveness = Duration::from_millis(self.settings.config.load.booking_liveness_ms);
                around.net.after(liveness / 4, me, Letter::Sweep);
            }
            Letter::Probe => {
                self.probe(around);
                let interval = Duration::from_millis(self.settings.config.health.probe_interval_ms);
                around.net.after(interval, me, Letter::Probe);
            }
            _ => unreachable!("no message of a supervisor"),
        }
    }

    pub(super) fn step_membership(&mut self, input: MembershipInput<u64>, around: &mut Surroundings<'_>) {
        self.step_supervisor(SupervisorInput::Membership(input), around);
    }

    fn step_supervisor(&mut self, input: SupervisorInput<u64>, around: &mut Surroundings<'_>) {
        let effects = self.supervisor.step(input, around.net.now);
        assert_eq!(self.membership().check_invariants(), Ok(()));
        for effect in effects {
            self.perform_membership(effect, around);
        }
    }

    fn perform_membership(&mut self, effect: MembershipEffect<u64>, around: &mut Surroundings<'_>) {
        let me = self.place(Actor::Supervisor);
        match effect {
            MembershipEffect::UseBlockSize(_) | MembershipEffect::Replace(_) => {
                unreachable!("the block size is configured")
            }
            MembershipEffect::StartRank { rank, slot, generation, description, restricted, .. } => {
                let entry = Rc::new(Entry {
                    rank,
                    slot,
                    generation,
                    cells: RankCells::default(),
                    credit: Cell::new(1.0),
                    has_served: Cell::new(false),
                    since: around.net.now,
                });
                assert!(
                    self.supervisor.insert(slot, EntrySource(Rc::clone(&entry))).is_none(),
                    "slot {slot} has two ranks"
                );
                self.start_sequence(&entry, 0, around.net.now);
                let shard = Actor::Shard(self.shard_of(rank));
                self.send(Actor::Supervisor, shard, Letter::shard(ShardMsg::Register(registered(&entry))), around);
                let traits = Arc::clone(&description.traits);
                let plain = Admission::new(rank, slot, generation);
                let admission = Admission { traits, since: entry.since, draining: restricted, ..plain };
                let letter = Letter::scheduler(SchedulerMsg::Admit(sequence_handle(&entry, admission)));
                self.send(Actor::Supervisor, Actor::Scheduler, letter, around);
                self.share_ranks(around);
            }
            MembershipEffect::DescribeRank { slot, generation, description } => {
                if let Some(entry) = self.entry(slot).cloned() {
                    let shard = Actor::Shard(self.shard_of(entry.rank));
                    self.send(Actor::Supervisor, shard, Letter::shard(ShardMsg::Register(registered(&entry))), around);
                    let input = Input::Describe { slot, generation, traits: description.traits };
                    let letter = Letter::scheduler(SchedulerMsg::Input(input));
                    self.send(Actor::Supervisor, Actor::Scheduler, letter, around);
                }
            }
            MembershipEffect::RestrictRank { slot, generation, restricted } => {
                let letter = Letter::scheduler(SchedulerMsg::Cordon { slot, generation, cordoned: restricted });
                self.send(Actor::Supervisor, Actor::Scheduler, letter, around);
            }
            MembershipEffect::DrainRank { slot, generation } => {
                let ack = self.ack(slot, generation, Acknowledged::Drain);
                let letter = Letter::scheduler(SchedulerMsg::Drain { slot, generation, ack });
                self.send(Actor::Supervisor, Actor::Scheduler, letter, around);
            }
            MembershipEffect::RetireRank { slot, generation } => {
                if let Some(entry) = self.entry(slot) {
                    let shard = Actor::Shard(self.shard_of(entry.rank));
                    self.send(Actor::Supervisor, shard, Letter::shard(ShardMsg::Remove(entry.rank)), around);
                }
                let ack = self.ack(slot, generation, Acknowledged::Retire);
                let letter = Letter::scheduler(SchedulerMsg::Retire { slot, generation, ack });
                self.send(Actor::Supervisor, Actor::Scheduler, letter, around);
            }
            MembershipEffect::ReleaseRank { slot, generation } => self.release(slot, generation, around),
            MembershipEffect::StartReader(slot) => self.start_reader(slot, around),
            MembershipEffect::StopReader(slot) => drop(self.readers.remove(&slot)),
            MembershipEffect::ClearBlocks(slot) => self.clear_unread(slot, around),
            MembershipEffect::AbandonReader { slot, .. } => {
                self.readers.remove(&slot);
                if let Some(entry) = self.entry(slot) {
                    entry.credit.set(0.0);
                }
            }
            MembershipEffect::StartDrainTimer { worker, drain, deadline } => {
                around.net.after(deadline, me, Letter::DrainTimedOut(worker, drain));
            }
            MembershipEffect::Restart { child, lost, .. } => self.restart(child, &lost, around),
            MembershipEffect::Fail { .. } => self.fail_router(around),
            MembershipEffect::PublishWorkers => self.publish_workers(around),
            MembershipEffect::Report(_) | MembershipEffect::PublishCold | MembershipEffect::PublishSources => {}
            MembershipEffect::Reply { to, .. } => {
                assert!(self.admin_pending.remove(&to), "call {to} of the embedder has two replies");
            }
        }
    }

    /// Stops the sequence actor of a retired rank and frees its slot.
    fn release(&mut self, slot: Slot, generation: Generation, around: &mut Surroundings<'_>) {
        self.supervisor.release(slot);
        self.sequences.remove(&slot);
        self.share_ranks(around);
        for lease in self.supervisor.left_behind(slot, generation) {
            self.changed_at = around.net.now;
            self.end_one(Actor::Supervisor, &lease, true, around);
        }
    }

    fn publish_workers(&mut self, around: &mut Surroundings<'_>) {
        let workers = self.supervisor.membership().workers();
        self.probers.retain(|worker, _| workers.contains_key(worker));
        for worker in workers.keys() {
            self.probers.entry(*worker).or_insert_with(|| {
                self.probers_started += 1;
                self.probers_started
            });
        }
        self.send(Actor::Supervisor, Actor::Health, Letter::MembersChanged, around);
    }

    fn probe(&mut self, around: &mut Surroundings<'_>) {
        for (worker, prober) in self.probers.clone() {
            let is_ok = around.engines[worker.0 as usize].is_up;
            self.send(Actor::Supervisor, Actor::Health, Letter::Probed { worker, prober, is_ok }, around);
        }
    }
}
