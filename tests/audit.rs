//! Audits of the index against a simulated engine, in virtual time and over a lossy network.
//!
//! The engine stores, copies and evicts blocks, restarts, and keeps a replay buffer. The network delays, loses,
//! duplicates and reorders messages, breaks connections, and drops parts of replies like a ROUTER socket at its
//! high-water mark. Every run has a seed, which a failure prints.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use pointsman::internals::index::{BlockDigest, Index};
use pointsman::internals::ingest::{
    Audit, AuditCause, AuditResult, AuditStep, BlockName, Difference, Heal, IngestEffect, IngestInput, NAMES_REQUEST,
    Source, SourceConfig,
};
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::internals::wire::Report;
use pointsman::protocol::{KvEvent, RouterEvent, Timestamp, WorkerRank};
use pointsman::test_support::{mix, rank};
use pointsman::{EngineContents, StreamState};

use crate::audit_engine::{Draws, SimulatedEngine, event};

const TICK: Duration = Duration::from_millis(100);
const HOUR: Duration = Duration::from_secs(3600);
const INTERVAL: Duration = Duration::from_secs(60);
const RING_MESSAGES: usize = 600;

/// A message in flight: due time, and content.
enum Flight {
    Live(u64, u64),
    Replayed(u64, u64),
    ReplayEnded,
    AuditRequest(u64),
    AuditReply(u64, EngineContents),
    Ring(u64, Vec<RouterEvent>),
    RingEnded,
    Unsupported,
}

/// Counts of a run.
#[derive(Debug, Default)]
struct Counts {
    messages: u64,
    events: u64,
    restarts: u64,
    disconnects: u64,
    lost: u64,
    replays: u64,
    cold: u64,
    equal: u64,
    inconclusive: BTreeMap<&'static str, u64>,
    unsupported: u64,
    ring_requests: u64,
    found: Vec<(Timestamp, Difference)>,
}

struct Simulation {
    seed: u64,
    rank: WorkerRank,
    draws: Draws,
    now: Timestamp,
    engine: SimulatedEngine,
    /// Contents of every message that was sent in any life, by life and number.
    archive: BTreeMap<(u64, u64), Vec<RouterEvent>>,
    is_connected: bool,
    connects_at: Option<Timestamp>,
    flights: Vec<(Timestamp, Flight)>,
    source: Source<Vec<u8>>,
    index: Index,
    audit: Audit,
    next: u64,
    supports_audits: bool,
    /// Whether replies with the replay buffer lack messages.
    drops_replies: bool,
    /// Number of the next removal events that the index misses.
    removals_to_lose: u32,
    lost_at: Option<Timestamp>,
    counts: Counts,
}

impl Simulation {
    fn new(seed: u64, supports_audits: bool) -> Self {
        let (now, rank) = (Timestamp::default(), rank(1));
        let mut index = Index::new();
        index.register(rank, Slot(0), Generation(1));
        Self {
            seed,
            rank,
            draws: Draws(mix(seed)),
            now,
            engine: SimulatedEngine::new(RING_MESSAGES),
            archive: BTreeMap::new(),
            is_connected: false,
            connects_at: Some(now),
            flights: Vec::new(),
            source: Source::new(SourceConfig { seed, ..SourceConfig::default() }, now),
            index,
            audit: Audit::new(INTERVAL, now),
            next: 0,
            supports_audits,
            drops_replies: false,
            removals_to_lose: 0,
            lost_at: None,
            counts: Counts::default(),
        }
    }

    fn run(&mut self, duration: Duration) {
        let end = self.now + duration;
        while self.now < end {
            self.now = self.now + TICK;
            self.disturb();
            // Requests come in bursts, with quiet minutes in between.
            let is_busy = !(self.now.0 / 1_000_000_000 / 240).is_multiple_of(3);
            if is_busy && self.draws.one_in(4) {
                self.publish();
            }
            self.deliver();
            if self.source.next_tick().is_some_and(|due| due <= self.now) {
                self.step(IngestInput::Tick);
            }
            self.run_audit();
        }
        self.index.check_invariants();
    }

    fn disturb(&mut self) {
        if self.draws.one_in(60_000) {
            self.counts.restarts += 1;
            self.disconnect();
            self.engine.restart();
        } else if self.draws.one_in(20_000) {
            self.counts.disconnects += 1;
            self.disconnect();
        }
        if self.connects_at.is_some_and(|at| at <= self.now) {
            (self.connects_at, self.is_connected) = (None, true);
            self.step(IngestInput::Connected);
        }
    }

    fn disconnect(&mut self) {
        if self.is_connected {
            self.is_connected = false;
            self.flights.clear();
            self.audit.abort();
            self.step(IngestInput::Disconnected);
        }
        // Some outages exceed the replay buffer.
        let outage = [1, 5, 20, 900][self.draws.below(4) as usize];
        self.connects_at.get_or_insert(self.now + Duration::from_secs(outage));
    }

    fn publish(&mut self) {
        self.engine.serve(self.rank, &mut self.draws);
        let (life, sequence) = (self.engine.life, self.engine.messages.len() as u64 - 1);
        let events = self.engine.messages.last().cloned().unwrap_or_default();
        self.counts.messages += 1;
        self.counts.events += events.iter().map(|event| event.data.block_count() as u64).sum::<u64>();
        self.archive.insert((life, sequence), events);
        if !self.is_connected {
            return;
        }
        if self.draws.one_in(500) {
            self.counts.lost += 1;
            return;
        }
        let copies = 1 + u64::from(self.draws.one_in(300));
        for _ in 0..copies {
            self.send(Flight::Live(life, sequence));
        }
    }

    fn send(&mut self, flight: Flight) {
        // Mostly in order; sometimes later messages overtake.
        let delay = if self.draws.one_in(100) { self.draws.below(3_000) } else { self.draws.below(150) };
        self.flights.push((self.now + Duration::from_millis(delay), flight));
    }

    fn deliver(&mut self) {
        let (due, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.flights).into_iter().partition(|(at, _)| *at <= self.now);
        self.flights = later;
        for (_, flight) in due {
            match flight {
                Flight::Live(life, sequence) => {
                    self.step(IngestInput::Live { sequence, payload: payload(life, sequence) })
                }
                Flight::Replayed(life, sequence) => {
                    self.step(IngestInput::Replayed { sequence, payload: payload(life, sequence) })
                }
                Flight::ReplayEnded => self.step(IngestInput::ReplayEnded),
                Flight::AuditRequest(request) if !self.supports_audits && request >= NAMES_REQUEST => {
                    self.send(Flight::Unsupported);
                }
                Flight::AuditRequest(from) if from < NAMES_REQUEST => self.reply_with_ring(from as usize),
                Flight::AuditRequest(request) => {
                    let contents = self.engine.reply(request);
                    let contents = EngineContents::decode(&contents.encode()).expect("well-formed");
                    self.send(Flight::AuditReply(self.engine.messages.len() as u64, contents));
                }
                Flight::AuditReply(next, contents) => self.audit.replied(next, contents),
                Flight::Ring(sequence, events) => {
                    self.audit.ring_message(self.now, sequence, || Some(events));
                }
                Flight::RingEnded => self.audit.ring_ended(),
                Flight::Unsupported => {
                    if let AuditStep::Request(request) = self.audit.unsupported(self.now, self.next) {
                        self.send(Flight::AuditRequest(request));
                    }
                }
            }
        }
    }

    /// Replaces the reply of an earlier request.
    fn reply_with_ring(&mut self, from: usize) {
        self.counts.ring_requests += 1;
        self.flights.retain(|(_, flight)| !matches!(flight, Flight::Ring(..) | Flight::RingEnded));
        let mut dropped = 0;
        for (at, sequence) in (self.engine.ring_start().max(from)..self.engine.messages.len()).enumerate() {
            if self.drops_replies && at >= 60 && self.draws.one_in(100) {
                dropped = 1 + self.draws.below(200);
            }
            if dropped > 0 {
                dropped -= 1;
                continue;
            }
            let events = self.engine.messages[sequence].clone();
            self.flights.push((self.now, Flight::Ring(sequence as u64, events)));
        }
        if dropped == 0 {
            self.flights.push((self.now, Flight::RingEnded));
        }
    }

    fn step(&mut self, input: IngestInput<Vec<u8>>) {
        let mut effects = VecDeque::new();
        let mut new = Vec::new();
        self.source.step(input, self.now, &mut new);
        effects.extend(new.drain(..));
        while let Some(effect) = effects.pop_front() {
            match effect {
                IngestEffect::Apply { sequence, payload } => {
                    let applied = self.apply(sequence, &payload);
                    self.source.step(IngestInput::Applied(applied), self.now, &mut new);
                    effects.extend(new.drain(..));
                }
                IngestEffect::Clear => self.clear(),
                IngestEffect::Replay { from } => {
                    self.counts.replays += 1;
                    self.flights.retain(|(_, flight)| !matches!(flight, Flight::Replayed(..) | Flight::ReplayEnded));
                    let first = (self.engine.ring_start() as u64).max(from);
                    let life = self.engine.life;
                    for sequence in first..self.engine.messages.len() as u64 {
                        self.flights.push((self.now + TICK, Flight::Replayed(life, sequence)));
                    }
                    self.flights.push((self.now + TICK, Flight::ReplayEnded));
                }
                IngestEffect::Reconnect => self.disconnect(),
                IngestEffect::State(_) => {}
                IngestEffect::Noted(note) => {
                    self.counts.cold += u64::from(note.name() == "cold");
                    self.audit.noted(note);
                }
            }
        }
    }

    fn clear(&mut self) {
        self.audit.abort();
        self.index.apply(&event(self.rank, KvEvent::Cleared));
    }

    fn apply(&mut self, sequence: u64, payload: &[u8]) -> Report {
        let (life, number) = payload.split_at(8);
        let of = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().expect("eight bytes"));
        let events = self.archive[&(of(life), of(number))].clone();
        let mut applied = Report { events: 1, usable: 1, ..Report::default() };
        for event in &events {
            applied.cleared |= matches!(event.data, KvEvent::Cleared);
            if let KvEvent::Stored { blocks, .. } = &event.data {
                applied.stored_blocks += blocks.len() as u32;
            }
            if self.removals_to_lose > 0
                && self.audit_is_idle()
                && let KvEvent::Removed { blocks } = &event.data
            {
                (self.removals_to_lose, self.lost_at) = (self.removals_to_lose - 1, Some(self.now));
                let kept = blocks[1..].to_vec();
                self.index.apply(&RouterEvent { data: KvEvent::Removed { blocks: kept }, ..event.clone() });
                continue;
            }
            self.index.apply(event);
        }
        self.next = sequence + 1;
        let digest = self.audit.samples().then(|| self.digest());
        self.audit.applied(self.next, &events, digest);
        applied
    }

    fn audit_is_idle(&self) -> bool {
        !self.audit.is_running()
    }

    fn digest(&self) -> BlockDigest {
        self.index.digest_of(self.rank).expect("registered")
    }

    fn run_audit(&mut self) {
        if !self.audit.is_running() {
            if self.audit.due().is_none_or(|due| due > self.now) {
                return;
            }
            let is_comparable = self.source.state() == StreamState::Live && self.source.is_caught_up();
            let Some(position) = self.source.position().filter(|_| is_comparable) else {
                return self.audit.postpone(self.now);
            };
            self.next = position.next;
            if let AuditStep::Request(request) = self.audit.begin(self.now, position.next, self.digest()) {
                self.send(Flight::AuditRequest(request));
            }
        }
        match self.audit.step(self.now, self.next) {
            AuditStep::Wait => {}
            AuditStep::Request(request) => self.send(Flight::AuditRequest(request)),
            AuditStep::QueryNames => {
                let names: BTreeSet<BlockName> = self.index.names_of(self.rank).into_iter().collect();
                let result = self.audit.compare(self.now, &names);
                self.ended(result, names.len());
            }
            AuditStep::Ended(result) => self.ended(result, 0),
        }
    }

    fn ended(&mut self, result: AuditResult, index_blocks: usize) {
        match result {
            AuditResult::Equal => self.counts.equal += 1,
            AuditResult::Inconclusive(cause) => *self.counts.inconclusive.entry(cause.name()).or_default() += 1,
            AuditResult::Unsupported => self.counts.unsupported += 1,
            AuditResult::Different(difference) => {
                let (seed, held) = (self.seed, self.engine.held_at(self.next));
                let is_valid = difference.missing.iter().all(|name| held.contains(name));
                assert!(is_valid, "seed {seed}: the engine holds no {:?}", difference.missing);
                match self.audit.heal(self.now, &difference, index_blocks) {
                    Heal::Forget(names) => {
                        let lost: Vec<_> = names.iter().filter(|name| held.contains(name)).collect();
                        assert!(lost.is_empty(), "seed {seed}: valid blocks are removed: {lost:?}");
                        assert_eq!(self.index.forget(self.rank, &names), names.len());
                    }
                    Heal::Resync => {
                        self.clear();
                        self.step(IngestInput::Resync);
                    }
                    Heal::Wait => {}
                }
                self.counts.found.push((self.now, difference));
            }
        }
    }

    /// Findings that were not confirmed immediately.
    fn unconfirmed(&self) -> u64 {
        self.counts.inconclusive.get(AuditCause::Unconfirmed.name()).copied().unwrap_or_default()
    }
}

fn payload(life: u64, sequence: u64) -> Vec<u8> {
    [life.to_be_bytes(), sequence.to_be_bytes()].concat()
}

#[test]
fn a_day_without_a_fault_raises_no_alarm() {
    let mut simulation = Simulation::new(1, true);
    simulation.run(24 * HOUR);
    let (seed, counts) = (simulation.seed, &simulation.counts);
    eprintln!("seed {seed}: {counts:?}");
    assert!(counts.found.is_empty(), "seed {seed}: {:?}", counts.found);
    assert!(counts.messages > 50_000 && counts.events > 200_000, "seed {seed}: {counts:?}");
    assert!(counts.restarts > 2 && counts.disconnects > 5 && counts.lost > 50, "seed {seed}: {counts:?}");
    assert!(counts.replays > 50 && counts.cold > 0, "seed {seed}: {counts:?}");
    let inconclusive: u64 = counts.inconclusive.values().sum();
    assert!(counts.equal > 400 && counts.equal > 10 * inconclusive, "seed {seed}: {counts:?}");
    assert_eq!(simulation.unconfirmed(), 0, "seed {seed}: {counts:?}");
}

#[test]
fn hours_of_replies_with_gaps_raise_no_alarm() {
    let mut simulation = Simulation::new(6, false);
    simulation.drops_replies = true;
    simulation.run(6 * HOUR);
    let counts = &simulation.counts;
    eprintln!("seed 6: {counts:?}");
    assert!(counts.found.is_empty() && simulation.unconfirmed() == 0, "seed 6: {counts:?}");
    assert!(counts.equal > 20 && counts.ring_requests > 2 * counts.equal, "seed 6: {counts:?}");
}

#[test]
fn lost_stores_and_removals_are_corrected_without_loss_behind_replies_with_gaps() {
    let (mut stale, mut missing) = (0, 0);
    for seed in 10..20 {
        let mut simulation = Simulation::new(seed, false);
        simulation.drops_replies = true;
        // Only a buffer from the beginning proves removals.
        simulation.engine.ring_max = if seed % 2 == 0 { RING_MESSAGES } else { 5 * RING_MESSAGES };
        simulation.removals_to_lose = 3;
        simulation.run(Duration::from_secs(600));
        if simulation.source.state() == StreamState::Live {
            let names = simulation.index.names_of(simulation.rank);
            simulation.index.forget(simulation.rank, &names[..names.len() / 8]);
        }
        // The corrections are checked against the engine where they occur.
        simulation.run(HOUR);
        for (_, difference) in &simulation.counts.found {
            stale += difference.stale.len();
            missing += difference.missing.len();
        }
    }
    assert!(stale > 5 && missing > 25, "{stale} stale, {missing} missing");
}

#[test]
fn a_lost_removal_is_found_within_one_period_and_healed() {
    let mut simulation = Simulation::new(4, true);
    let (mut faults, mut found) = (0, 0);
    for _ in 0..40 {
        simulation.run(Duration::from_secs(300));
        let is_live = simulation.source.state() == StreamState::Live;
        if !is_live || simulation.audit.is_running() {
            continue;
        }
        (simulation.removals_to_lose, simulation.lost_at) = (1, None);
        let before = simulation.counts.restarts + simulation.counts.disconnects + simulation.counts.cold;
        simulation.run(INTERVAL);
        let Some(lost_at) = simulation.lost_at.filter(|_| simulation.removals_to_lose == 0) else {
            simulation.removals_to_lose = 0;
            simulation.counts.found.clear();
            continue; // no removal in a quiet minute
        };
        // Two exchanges follow the beginning of the audit.
        simulation.run(INTERVAL + Duration::from_secs(10));
        let after = simulation.counts.restarts + simulation.counts.disconnects + simulation.counts.cold;
        let alarms = std::mem::take(&mut simulation.counts.found);
        if before != after {
            continue; // the stream was read anew
        }
        faults += 1;
        let [(at, difference)] = &alarms[..] else { panic!("seed 4: {alarms:?} after a fault at {lost_at:?}") };
        assert!(at.since(lost_at) <= INTERVAL + Duration::from_secs(10), "seed 4");
        assert!(difference.missing.is_empty() && difference.since.is_some(), "seed 4: {difference:?}");
        assert_eq!(difference.stale.len(), 1, "seed 4: {difference:?}");
        found += 1;
        simulation.run(Duration::from_secs(5));
        assert!(!simulation.index.names_of(simulation.rank).contains(&difference.stale[0]), "seed 4: healed");
        assert!(simulation.counts.found.is_empty(), "seed 4: found once");
    }
    assert!(faults >= 10 && found == faults, "{found} of {faults} faults");
}

#[test]
fn lost_blocks_of_a_whole_replay_buffer_cause_a_resync() {
    let mut simulation = Simulation::new(5, true);
    simulation.run(Duration::from_secs(300));
    assert_eq!(simulation.source.state(), StreamState::Live);
    let names = simulation.index.names_of(simulation.rank);
    simulation.index.forget(simulation.rank, &names[..names.len() / 2]);
    simulation.run(2 * INTERVAL);
    let [(_, difference)] = &simulation.counts.found[..] else { panic!("{:?}", simulation.counts) };
    assert!(difference.missing.len() > 20 && difference.stale.is_empty(), "{difference:?}");
    assert_eq!(BTreeSet::from_iter(simulation.index.names_of(simulation.rank)), simulation.engine.names());
}
