//! Callers: requests of clients, from the booking to the end of the response.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use pointsman::internals::directory::{Ended, Lease, LeaseState};
use pointsman::internals::load::PromptBlocks;
use pointsman::internals::shell::scheduler::SchedulerMsg;
use pointsman::internals::shell::shard::ShardMsg;
use pointsman::protocol::Timestamp;
use pointsman::{
    Decision, SessionId,
    internals::schedule::{Input, Request, ResolvedOptions, Waits},
};

use super::{Entry, Gateway, OverlapQuery, Surroundings};
use crate::ledger::End;
use crate::letter::{Answer, Context, Job, Letter, OverlapGoal, OverlapJoin, Permit, Progress, ReplyTo};
use crate::net::{Actor, Place};
use crate::prompt::Prompt;
use crate::script::RequestSpec;

/// Attempts of a request that is lost with an actor.
const ATTEMPTS_MAX: u32 = 6;

pub(crate) struct Call {
    spec: RequestSpec,
    prompt: Rc<Prompt>,
    attempt: u32,
    lease: Option<Arc<Lease>>,
    state: CallState,
    arrival: Timestamp,
}

enum CallState {
    Waiting,
    Backoff,
    Placed(Rc<Entry>),
    /// The caller has vanished without a report. The booking ends by expiry.
    Abandoned,
}

impl Gateway {
    /// A client sends a request.
    pub(crate) fn call(&mut self, call: u64, spec: &RequestSpec, around: &mut Surroundings<'_>) {
        let prompt = Rc::new(Prompt::new(spec.document, spec.shared_blocks, call, spec.own_blocks));
        let state = CallState::Waiting;
        if let Some(after) = spec.vanishes_after_ms {
            around.net.after(Duration::from_millis(after), self.place(Actor::Caller(call)), Letter::Vanish);
        }
        let arrival = around.net.now;
        self.calls.insert(call, Call { spec: spec.clone(), prompt, attempt: 0, lease: None, state, arrival });
        self.book(call, around);
        self.send_notices(Actor::Caller(call), around);
        self.check(Actor::Caller(call), around.net.now);
    }

    fn book(&mut self, call: u64, around: &mut Surroundings<'_>) {
        let now = around.net.now;
        let requests_max = self.settings.config.queue.requests_max;
        if self.is_failed || self.permits.get() >= requests_max {
            let end = if self.is_failed { End::Down } else { End::Overloaded };
            return self.end_call(call, end, around);
        }
        self.permits.set(self.permits.get() + 1);
        let permit = Permit(Rc::clone(&self.permits));
        let Some(known) = self.calls.get_mut(&call) else { return };
        known.attempt += 1;
        known.state = CallState::Waiting;
        let (prompt, attempt) = (Rc::clone(&known.prompt), known.attempt);
        let blocks = PromptBlocks::Hashed(Arc::clone(prompt.hashed.sequence_hashes()));
        let lease = self.directory.enter(&format!("r{call}"), blocks.clone(), now);
        let lease = lease.expect("the id of a request is free at each attempt");
        known.lease = Some(Arc::clone(&lease));
        self.leases.insert(lease.booking(), (call, Arc::clone(&lease)));
        let options = ResolvedOptions {
            due: known.spec.deadline_ms.map(|after| known.arrival + Duration::from_millis(after)),
            policy_class: self
                .settings
                .config
                .queue
                .classes
                .get(known.spec.class)
                .map(|class| class.name.as_str().into()),
            session_id: known.spec.session.map(|n| SessionId::new(&format!("s{n}")).expect("a valid id")),
            ..ResolvedOptions::default()
        };
        let hashes = prompt.hashed.block_hashes();
        let queueing = self.settings.config.queue.is_enabled();
        let waits = queueing.then(|| {
            let block_hashes = (!hashes.is_empty()).then(|| Arc::clone(hashes));
            Box::new(Waits { booking: lease.booking(), arrival: lease.arrival(), block_hashes })
        });
        let reply = ReplyTo { call, attempt, outbox: self.outbox.clone(), is_used: false };
        let context = Context { lease, reply, _permit: permit };
        let options = (options != ResolvedOptions::default()).then(|| Box::new(options));
        let prompt_tokens = prompt.hashed.prompt_tokens() as u32;
        let request = Request { options, waits, ..Request::new(context, blocks, prompt_tokens) };
        let join = Rc::new(OverlapJoin {
            hashes: Arc::clone(hashes),
            prompt: Some(Rc::clone(&prompt)),
            found: Vec::new().into(),
            goal: OverlapGoal::Decide(Box::new(request)),
            outbox: self.outbox.clone(),
        });
        if !hashes.is_empty() {
            for shard in 0..self.shards.len() {
                self.send(
                    Actor::Caller(call),
                    Actor::Shard(shard),
                    Letter::shard(ShardMsg::Overlap(OverlapQuery::new(&join))),
                    around,
                );
            }
        }
    }

    pub(super) fn on_caller(&mut self, call: u64, letter: Letter, around: &mut Surroundings<'_>) {
        let Some(known) = self.calls.get(&call) else {
            if let Letter::Answered(_, Answer::Placed(_) | Answer::Rejected) = letter {
                let end = around.ledger.ended.get(&call);
                assert!(
                    matches!(end, Some(End::Vanished | End::Down)),
                    "request {call} has another reply after {end:?}"
                );
            }
            return;
        };
        match letter {
            Letter::Answered(attempt, answer) if attempt == known.attempt => {
                assert!(
                    matches!(known.state, CallState::Waiting),
                    "attempt {attempt} of request {call} has two replies"
                );
                match answer {
                    Answer::Placed(decision) => self.on_placed(call, &decision, around),
                    Answer::Rejected => {
                        self.end_lease(call, false, around);
                        self.end_call(call, End::Rejected, around);
                    }
                    Answer::Lost => self.on_lost(call, around),
                }
            }
            Letter::Retry(attempt) if attempt == known.attempt && matches!(known.state, CallState::Backoff) => {
                self.book(call, around);
            }
            Letter::Progress(attempt, progress) if attempt == known.attempt => {
                self.on_progress(call, progress, around);
            }
            Letter::Vanish => self.on_vanish(call, around),
            Letter::Answered(..) | Letter::Retry(_) | Letter::Progress(..) => {} // of an earlier attempt
            _ => unreachable!("no message of a caller"),
        }
    }

    fn on_placed(&mut self, call: u64, decision: &Decision, around: &mut Surroundings<'_>) {
        let entry = self.entry(decision.slot()).filter(|entry| entry.generation == decision.generation());
        let Some(entry) = entry.cloned() else {
            // The removal of the rank since the decision has ended the booking.
            self.end_lease(call, true, around);
            return self.retry_or_end(call, around);
        };
        let Some(known) = self.calls.get_mut(&call) else { return };
        if known.spec.is_detached
            && let Some(lease) = &known.lease
        {
            lease.leave(around.net.now);
        }
        let (engine, rank) = entry.engine();
        let job = Job {
            caller: Place::Gateway(self.number, self.life, Actor::Caller(call)),
            call,
            attempt: known.attempt,
            rank,
            prompt: Rc::clone(&known.prompt),
            output_blocks: known.spec.output_blocks,
        };
        known.state = CallState::Placed(entry);
        around.net.send(job.caller, Place::Engine(engine), Letter::Infer(job));
    }

    fn retry_or_end(&mut self, call: u64, around: &mut Surroundings<'_>) {
        match self.calls.get(&call) {
            Some(known) if known.attempt < ATTEMPTS_MAX => self.book(call, around),
            Some(_) => self.end_call(call, End::Lost, around),
            None => {}
        }
    }

    fn on_lost(&mut self, call: u64, around: &mut Surroundings<'_>) {
        self.end_lease(call, true, around);
        let Some(known) = self.calls.get_mut(&call) else { return };
        if known.attempt >= ATTEMPTS_MAX || self.is_failed {
            let end = if self.is_failed { End::Down } else { End::Lost };
            return self.end_call(call, end, around);
        }
        known.state = CallState::Backoff;
        let (attempt, wait) = (known.attempt, Duration::from_millis(1 + around.net.draw(200)));
        around.net.after(wait, self.place(Actor::Caller(call)), Letter::Retry(attempt));
    }

    fn on_progress(&mut self, call: u64, progress: Progress, around: &mut Surroundings<'_>) {
        let Some(Call { state: CallState::Placed(entry), lease: Some(lease), spec, prompt, .. }) =
            self.calls.get(&call)
        else {
            return;
        };
        let (entry, lease, now) = (Rc::clone(entry), Arc::clone(lease), around.net.now);
        if spec.is_detached {
            lease.seen(now);
        }
        let place = (entry.slot, entry.generation);
        match progress {
            Progress::FirstToken => {
                if lease.complete_prefill() {
                    if !prompt.blocks.is_empty() && !entry.has_served.replace(true) {
                        self.served(&entry, Actor::Caller(call), around);
                    }
                    self.reconcile_booked(call, &lease, around);
                }
            }
            Progress::OutputBlock => {
                lease.push_output_block(None);
                self.reconcile_booked(call, &lease, around);
            }
            Progress::Ended(outcome) => {
                let letter = Letter::Outcome(Rc::clone(&entry), outcome, lease.booked_at());
                self.send(Actor::Caller(call), Actor::Health, letter, around);
                around.net.record((call, place.0.0, place.1.0));
                self.end_lease(call, true, around);
                self.end_call(call, if outcome.is_ok() { End::Served } else { End::Failed }, around);
            }
        }
    }

    fn reconcile_booked(&mut self, call: u64, lease: &Arc<Lease>, around: &mut Surroundings<'_>) {
        if let LeaseState::Booked { slot, generation } = lease.state() {
            self.reconcile(Actor::Caller(call), lease, (slot, generation), around);
        }
    }

    fn on_vanish(&mut self, call: u64, around: &mut Surroundings<'_>) {
        let Some(known) = self.calls.get_mut(&call) else { return };
        if let CallState::Placed(entry) = &known.state {
            let (engine, _) = entry.engine();
            around.net.send(
                Place::Gateway(self.number, self.life, Actor::Caller(call)),
                Place::Engine(engine),
                Letter::Abort(call),
            );
            if known.spec.is_detached {
                known.state = CallState::Abandoned;
                return around.ledger.end(call, End::Vanished);
            }
        }
        self.end_lease(call, true, around);
        self.end_call(call, End::Vanished, around);
    }

    /// Ends the lease of a call, if it has one.
    fn end_lease(&mut self, call: u64, may_wait: bool, around: &mut Surroundings<'_>) {
        let Some(lease) = self.calls.get_mut(&call).and_then(|known| known.lease.take()) else { return };
        self.end_one(Actor::Caller(call), &lease, may_wait, around);
    }

    /// Ends a lease, frees its booking and releases its request id.
    pub(super) fn end_one(&mut self, from: Actor, lease: &Arc<Lease>, may_wait: bool, around: &mut Surroundings<'_>) {
        let ended = lease.end();
        self.directory.leave(lease);
        match ended {
            Ended::Booked(slot, generation) => self.reconcile(from, lease, (slot, generation), around),
            Ended::Pending if may_wait && self.is_queueing() => {
                self.send(
                    from,
                    Actor::Scheduler,
                    Letter::scheduler(SchedulerMsg::Input(Input::Cancel(lease.booking()))),
                    around,
                );
            }
            Ended::Pending | Ended::Already => {}
        }
    }

    pub(super) fn end_call(&mut self, call: u64, end: End, around: &mut Surroundings<'_>) {
        if let Some(known) = self.calls.remove(&call) {
            assert!(known.lease.is_none(), "request {call} ends with a lease");
            around.ledger.end(call, end);
        }
    }

    /// Ends detached bookings without a recent report.
    pub(super) fn sweep(&mut self, around: &mut Surroundings<'_>) {
        let liveness = Duration::from_millis(self.settings.config.load.booking_liveness_ms);
        for lease in self.directory.silent(liveness, around.net.now) {
            self.end_one(Actor::Supervisor, &lease, true, around);
        }
        let is_over = |known: &Call| {
            matches!(known.state, CallState::Abandoned)
                && known.lease.as_ref().is_none_or(|lease| lease.state() == LeaseState::Ended)
        };
        self.calls.retain(|_, known| !is_over(known));
    }

    /// The gateway dies: its callers lose their connections.
    pub(crate) fn die(&mut self, around: &mut Surroundings<'_>) {
        for (call, known) in std::mem::take(&mut self.calls) {
            if let CallState::Placed(entry) = &known.state {
                let from = self.place(Actor::Caller(call));
                around.net.send(from, Place::Engine(entry.engine().0), Letter::Abort(call));
            }
            if !matches!(known.state, CallState::Abandoned) {
                around.ledger.end(call, End::Gone);
            }
        }
    }

    /// The router has failed: every request without a reply ends.
    pub(super) fn fail(&mut self, around: &mut Surroundings<'_>) {
        self.is_failed = true;
        let is_waiting = |known: &Call| matches!(known.state, CallState::Waiting | CallState::Backoff);
        let waiting: Vec<u64> =
            self.calls.iter().filter(|(_, known)| is_waiting(known)).map(|(call, _)| *call).collect();
        for call in waiting {
            self.end_lease(call, true, around);
            self.end_call(call, End::Down, around);
        }
    }

    /// Whether a caller still owns a lease.
    pub(super) fn owns(&self, call: u64, lease: &Lease) -> bool {
        let of_call = self.calls.get(&call).and_then(|known| known.lease.as_ref());
        of_call.is_some_and(|known| known.booking() == lease.booking())
    }

    pub(crate) fn calls(&self) -> usize {
        self.calls.len()
    }
}
