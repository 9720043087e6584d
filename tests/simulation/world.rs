//! World: engines, gateways and clients under a script, on one virtual clock.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use pointsman::Outcome;
use pointsman::internals::membership::MembershipInput;
use pointsman::protocol::{Timestamp, WorkerId, WorkerRank};

use crate::discovery::Discovery;
use crate::engine::Engine;
use crate::gateway::{Gateway, Recorded, Surroundings, Victim};
use crate::ledger::{End, Ledger};
use crate::letter::Letter;
use crate::net::{Actor, Net, Place};
use crate::script::{Act, Fault, RequestSpec, Script, Settings};

/// Longest time until every request has ended after the last fault.
const SETTLE_MAX: Duration = Duration::from_secs(120);

/// Upper limit of the steps of a world, many times the usual number. Only an endless loop reaches it.
const STEPS_MAX: u64 = 300_000;

/// Time without faults and requests after which every source has recovered.
const REST: Duration = Duration::from_secs(14);

/// Time in which the summaries of all gateways arrive.
const HOLD: Duration = Duration::from_secs(3);

pub(crate) struct World {
    net: Net,
    settings: Rc<Settings>,
    acts: Vec<(u64, Act)>,
    engines: Vec<Engine>,
    /// By number; absent while dead.
    gateways: Vec<Option<Gateway>>,
    lives: Vec<u32>,
    disks: Vec<BTreeMap<WorkerRank, Recorded>>,
    /// Ends of partitions.
    unheard_until: Vec<Timestamp>,
    ledger: Ledger,
    discovery: Discovery,
}

/// Result of one world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) digest: u64,
    pub(crate) steps: u64,
    pub(crate) time: Duration,
    pub(crate) requests: u64,
    pub(crate) served: u64,
    pub(crate) faults: u64,
    /// Requests on ranks of other gateways, compared while bookings were held.
    pub(crate) compared: u64,
}

thread_local! {
    /// Step and time of the world of this thread, for reports of failures.
    pub(crate) static POSITION: std::cell::Cell<(u64, Timestamp)> = const { std::cell::Cell::new((0, Timestamp(0))) };
}

impl World {
    fn new(script: &Script) -> Self {
        let settings = Rc::new(script.settings.clone());
        let Settings { gateways, engines, is_slow, .. } = *settings;
        let mut world = Self {
            net: Net::new(script.seed, is_slow),
            acts: script.acts.clone(),
            engines: (0..engines).map(|number| Engine::new(number, &settings)).collect(),
            gateways: (0..gateways).map(|_| None).collect(),
            lives: vec![0; gateways],
            disks: vec![BTreeMap::new(); gateways],
            unheard_until: vec![Timestamp::default(); gateways],
            ledger: Ledger::default(),
            discovery: Discovery::new(&settings),
            settings,
        };
        (0..gateways).for_each(|number| world.start(number));
        for (number, (at, _)) in script.acts.iter().enumerate() {
            world.net.after(Duration::from_millis(*at), Place::Outside, Letter::Act(number));
        }
        world
    }

    /// Runs a script to its end.
    ///
    /// # Panics
    /// At the first violated invariant.
    pub(crate) fn run(script: &Script) -> Summary {
        let mut world = Self::new(script);
        let length = script.acts.last().map_or(0, |(at, _)| *at) + 30;
        world.run_for(Duration::from_millis(length));
        world.engines.iter_mut().for_each(|engine| engine.is_paused = true);
        world.heal();
        let compared = world.hold();
        world.settle();
        world.run_for(REST);
        let now = world.net.now;
        for gateway in world.gateways.iter_mut().flatten() {
            gateway.check_at_rest(&world.engines);
        }
        world.net.record(world.ledger.ended.iter().map(|(call, end)| (*call, *end as u8)).collect::<Vec<_>>());
        let served = world.ledger.ended.values().filter(|end| **end == End::Served).count() as u64;
        let requests = world.ledger.ended.len() as u64;
        let faults = script.acts.iter().filter(|(_, act)| matches!(act, Act::Fault(_))).count() as u64;
        let time = now.since(Timestamp(1_000_000_000));
        Summary { digest: world.net.digest, steps: world.net.steps, time, requests, served, faults, compared }
    }

    fn run_for(&mut self, time: Duration) {
        let until = self.net.now + time;
        while let Some((to, letter)) = self.net.next(until) {
            POSITION.set((self.net.steps, self.net.now));
            assert!(self.net.steps < STEPS_MAX, "{STEPS_MAX} steps without an end");
            self.deliver(to, letter);
        }
        self.net.now = self.net.now.max(until);
    }

    fn deliver(&mut self, to: Place, letter: Letter) {
        match (to, letter) {
            (Place::Outside, Letter::Act(number)) => match self.acts[number].1.clone() {
                Act::Request(spec) => self.request(number as u64, &spec),
                Act::Fault(fault) => self.fault(&fault),
            },
            (Place::Outside, _) | (Place::Replay(_), _) => {}
            (Place::Engine(engine), letter) => self.engines[engine].handle(letter, &mut self.net),
            (Place::Gateway(number, life, _), Letter::Start) if self.lives[number] == life => self.start(number),
            (Place::Gateway(number, life, actor), letter) => {
                if self.lives[number] == life {
                    self.at(number, |gateway, around| gateway.handle(actor, letter, around));
                }
            }
        }
    }

    /// Performs a step of a gateway, if it is up.
    fn at(&mut self, number: usize, step: impl FnOnce(&mut Gateway, &mut Surroundings<'_>)) {
        let Some(mut gateway) = self.gateways[number].take() else { return };
        let peers = self.peers();
        let Self { net, engines, ledger, discovery, .. } = self;
        step(&mut gateway, &mut Surroundings { net, engines, ledger, discovery, peers: &peers });
        let has_failed = gateway.is_failed;
        self.gateways[number] = Some(gateway);
        if has_failed {
            self.kill_gateway(number, Duration::from_millis(100)); // its process ends, and is started again
        }
    }

    fn peers(&self) -> Vec<(usize, u32, bool)> {
        let hears = |number: usize| self.discovery.is_healed || self.net.now >= self.unheard_until[number];
        self.lives.iter().enumerate().map(|(number, life)| (number, *life, hears(number))).collect()
    }

    fn request(&mut self, call: u64, spec: &RequestSpec) {
        self.ledger.open(call);
        if self.gateways[spec.gateway].is_none() {
            return self.ledger.end(call, End::Gone);
        }
        self.at(spec.gateway, |gateway, around| gateway.call(call, spec, around));
    }

    fn start(&mut self, number: usize) {
        let (life, disk) = (self.lives[number], self.disks[number].clone());
        let (peers, settings) = (self.peers(), Rc::clone(&self.settings));
        let Self { net, engines, ledger, discovery, .. } = self;
        let mut around = Surroundings { net, engines, ledger, discovery, peers: &peers };
        self.gateways[number] = Some(Gateway::new(number, life, &settings, disk, &mut around));
    }

    fn kill_gateway(&mut self, number: usize, down: Duration) {
        let Some(mut gateway) = self.gateways[number].take() else { return };
        let peers = self.peers();
        let Self { net, engines, ledger, discovery, .. } = self;
        gateway.die(&mut Surroundings { net, engines, ledger, discovery, peers: &peers });
        self.disks[number] = std::mem::take(&mut gateway.disk);
        self.lives[number] += 1;
        let place = Place::Gateway(number, self.lives[number], Actor::Supervisor);
        self.net.after(down, place, Letter::Start);
    }

    fn fault(&mut self, fault: &Fault) {
        let now = self.net.now;
        let millis = Duration::from_millis;
        match *fault {
            Fault::EngineCrash { engine, is_silent, down_ms } => {
                self.engines[engine].crash(is_silent, millis(down_ms), &mut self.net);
            }
            Fault::EngineClear { engine } if self.engines[engine].is_up => self.engines[engine].clear(&mut self.net),
            Fault::EngineClear { .. } => {}
            Fault::EngineFails { engine, kind, for_ms } => {
                let outcome = match kind {
                    0 => Outcome::ConnectFailed,
                    1 => Outcome::Timeout,
                    2 => Outcome::ServerError,
                    3 => Outcome::Refused { retry_after: None },
                    _ => Outcome::InvalidAnswer,
                };
                self.engines[engine].fails = Some((outcome, now + millis(for_ms)));
            }
            Fault::StreamBreaks { gateway, engine } => self.engines[engine].break_stream(gateway, &mut self.net),
            Fault::StreamLoses { engine, for_ms } => self.engines[engine].loses_until = now + millis(for_ms),
            Fault::ReplayHangs { engine, for_ms } => self.engines[engine].replay_hangs_until = now + millis(for_ms),
            Fault::Partition { gateway, for_ms } => self.unheard_until[gateway] = now + millis(for_ms),
            Fault::SchedulerDies { gateway } => self.kill(gateway, Victim::Scheduler),
            Fault::SequenceDies { gateway, nth } => self.kill(gateway, Victim::Sequence(nth)),
            Fault::ShardDies { gateway, shard } => self.kill(gateway, Victim::Shard(shard)),
            Fault::ReaderDies { gateway, nth } => self.kill(gateway, Victim::Reader(nth)),
            Fault::HealthDies { gateway } => self.kill(gateway, Victim::Health),
            Fault::GatewayDies { gateway, down_ms } => self.kill_gateway(gateway, millis(down_ms)),
            Fault::Snapshot { gateway } => self.at(gateway, |gateway, around| gateway.take_snapshot(around)),
            Fault::Drain { gateway, worker, deadline_ms } => {
                let (worker, deadline) = (WorkerId(worker as u64), millis(deadline_ms));
                self.admin(gateway, |reply| MembershipInput::Drain { worker, deadline, reply });
            }
            Fault::Undrain { gateway, worker } => {
                let worker = WorkerId(worker as u64);
                self.admin(gateway, |reply| MembershipInput::Undrain { worker, reply });
            }
            Fault::Remove { gateway, worker } => {
                let worker = WorkerId(worker as u64);
                self.admin(gateway, |reply| MembershipInput::Remove { worker, reply });
            }
            Fault::Upsert { gateway, worker } => {
                let config = Box::new(self.discovery.worker(worker, now));
                let worker = WorkerId(worker as u64);
                self.admin(gateway, |reply| MembershipInput::Upsert { worker, config, reply });
            }
            Fault::Cordon { gateway, worker, is_cordoned: cordoned } => {
                let worker = WorkerId(worker as u64);
                self.admin(gateway, |reply| MembershipInput::Cordon { worker, cordoned, reply });
            }
            Fault::Flap { worker, for_ms } => self.discovery.reported(worker).absent_until = now + millis(for_ms),
            Fault::Resize { worker, ranks, for_ms } => {
                let reported = self.discovery.reported(worker);
                (reported.ranks, reported.resized_until) =
                    (ranks.min(self.settings.ranks_per_engine), now + millis(for_ms));
            }
            Fault::Move { worker } => self.discovery.reported(worker).moves += 1,
            Fault::SourceFails { gateway } => {
                let place = Place::Gateway(gateway, self.lives[gateway], Actor::Supervisor);
                self.net.send(Place::Outside, place, Letter::Discovered(true));
            }
            Fault::Unavailable { gateway, worker } => {
                self.at(gateway, |gateway, around| gateway.set_unavailable(worker.map(|worker| worker as u64), around));
            }
        }
    }

    fn kill(&mut self, gateway: usize, victim: Victim) {
        self.at(gateway, |gateway, around| gateway.kill(victim, around));
    }

    fn admin(&mut self, gateway: usize, input: impl FnOnce(u64) -> MembershipInput<u64>) {
        self.at(gateway, |gateway, around| gateway.admin(input, around));
    }

    /// Ends every fault: restrictions, partitions, losses.
    fn heal(&mut self) {
        self.discovery.is_healed = true;
        self.run_for(Duration::from_millis(1_000)); // the longest absence of a gateway or an engine
        for engine in &mut self.engines {
            (engine.fails, engine.loses_until, engine.replay_hangs_until) =
                (None, Timestamp::default(), Timestamp::default());
        }
        for number in 0..self.gateways.len() {
            self.at(number, |gateway, around| gateway.set_unavailable(None, around));
            for worker in (0..self.engines.len() as u64).map(WorkerId) {
                self.admin(number, |reply| MembershipInput::Cordon { worker, cordoned: false, reply });
                self.admin(number, |reply| MembershipInput::Undrain { worker, reply });
            }
        }
        self.net.is_slow = false;
    }

    /// Waits until the summaries of all gateways have arrived, compares every sum with the bookings of the other gateways,
    /// and lets the engines continue. Returns the number of compared bookings.
    fn hold(&mut self) -> u64 {
        for _ in 0..10 {
            self.run_for(HOLD);
            let changed = self.gateways.iter().flatten().map(|gateway| gateway.changed_at).max();
            if changed.is_none_or(|at| self.net.now.since(at) + Duration::from_millis(500) > HOLD) {
                break;
            }
        }
        let mut compared = 0;
        for own in self.gateways.iter().flatten() {
            for rank in own.ranks() {
                let others = self.gateways.iter().flatten().filter(|other| other.number != own.number);
                let truth: u32 = others.map(|other| other.requests_on(rank)).sum();
                let known = own.peer_requests_on(rank);
                assert_eq!(known, truth, "requests of other gateways on {rank} at gateway {}", own.number);
                compared += u64::from(truth);
            }
        }
        self.engines.iter_mut().for_each(|engine| engine.is_paused = false);
        compared
    }

    /// Waits until every request has ended and every detached booking has expired.
    fn settle(&mut self) {
        let until = self.net.now + SETTLE_MAX;
        let is_busy = |world: &Self| {
            !world.ledger.open_calls().is_empty() || world.gateways.iter().flatten().any(|gateway| gateway.calls() > 0)
        };
        while is_busy(self) && self.net.now < until {
            self.run_for(Duration::from_millis(500));
        }
        assert!(self.ledger.open_calls().is_empty(), "requests without an end: {:?}", self.ledger.open_calls());
    }
}
