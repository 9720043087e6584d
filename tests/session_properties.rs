//! Shared sessions under loss, duplication, reordering, partitions and restarts: after a quiet time all replicas have the
//! highest binding of each session.
//!
//! Messages pass through the codec and a queue ordered by arrival time, so that many seeds take little time.

use std::collections::BTreeSet;
use std::time::Duration;

use pointsman::internals::replica::{decode_sessions, encode_sessions};
use pointsman::protocol::{Timestamp, WorkerId, WorkerRank};
use pointsman::{
    SessionId,
    internals::session::{BindingVersion, Sessions},
};

use crate::replica_properties::Network;

/// A binding of one session, in the order of precedence.
type Register = (BindingVersion, WorkerRank);

const SESSIONS: u32 = 12;
const INTERVAL_MS: u64 = 20;
const PERIOD: Duration = Duration::from_secs(2);

struct World {
    replicas: Vec<Sessions>,
    network: Network<Vec<u8>>,
    /// Every binding that was ever written.
    written: BTreeSet<(u32, Register)>,
}

fn at(millis: u64) -> Timestamp {
    Timestamp(millis * 1_000_000)
}

fn session(n: u32) -> SessionId {
    SessionId::new(&format!("session-{n}")).expect("short")
}

fn table(writer: usize, sequence: u64) -> Sessions {
    let mut sessions = Sessions::new(Duration::from_secs(3_600), 100);
    sessions.share_as(writer as u64, sequence);
    sessions
}

/// The known binding of each session.
fn registers(sessions: &Sessions, now: Timestamp) -> Vec<Option<Register>> {
    let register = |id: &SessionId| Some((sessions.version_of(id)?, sessions.peek(id, now)?));
    (0..SESSIONS).map(|n| register(&session(n))).collect()
}

impl World {
    fn new(seed: u64) -> Self {
        let network = Network::new(seed);
        Self {
            replicas: (0..network.replicas).map(|writer| table(writer, 0)).collect(),
            network,
            written: BTreeSet::new(),
        }
    }

    fn step(&mut self, now_ms: u64, is_quiet: bool) {
        if !is_quiet {
            self.disturb(now_ms);
        }
        for from in 0..self.replicas.len() {
            let bindings = self.replicas[from].outbound(PERIOD, 1_000, at(now_ms));
            let registers = registers(&self.replicas[from], at(now_ms));
            self.written.extend((0..SESSIONS).zip(registers).filter_map(|(n, register)| Some((n, register?))));
            if !bindings.is_empty() {
                self.network.send(from, &encode_sessions(&bindings), now_ms, is_quiet);
            }
        }
        while let Some((to, bytes)) = self.network.arrived(now_ms) {
            for binding in decode_sessions(&bytes).expect("encoded bindings") {
                self.replicas[to].receive(&binding, at(now_ms));
            }
            self.replicas[to].check_invariants();
        }
    }

    fn disturb(&mut self, now_ms: u64) {
        let draws = &mut self.network.draws;
        let replica = draws.below(self.replicas.len() as u32) as usize;
        match draws.below(100) {
            // A restart, with a clock that may have been set back.
            0 | 1 => self.replicas[replica] = table(replica, u64::from(draws.below(500))),
            2 => self.network.divide(),
            3 | 4 => self.network.join(),
            _ => {
                let rank = WorkerRank::new(WorkerId(draws.below(6).into()), 0);
                let session = session(draws.below(SESSIONS));
                let known = self.replicas[replica].version_of(&session);
                self.replicas[replica].bind(&session, rank, at(now_ms));
                let version = self.replicas[replica].version_of(&session);
                assert!(version > known, "a new binding exceeds the known one");
            }
        }
    }
}

/// 20 repetitions in a row are lost with a probability of 10^-10.
#[test]
fn all_replicas_have_the_highest_binding_after_a_quiet_time() {
    for seed in 0..crate::replica_properties::seeds().div_ceil(5) {
        let mut world = World::new(seed);
        let steps = 20 + u64::from(world.network.draws.below(120));
        (0..steps).for_each(|step| world.step(step * INTERVAL_MS, false));
        let quiet_ms = |step: u64| steps * INTERVAL_MS + step * 200;
        let before: Vec<_> = world.replicas.iter().map(|sessions| registers(sessions, at(quiet_ms(0)))).collect();
        (0..=200).for_each(|step| world.step(quiet_ms(step), true));
        let after = registers(&world.replicas[0], at(quiet_ms(200)));
        for sessions in &world.replicas {
            assert_eq!(registers(sessions, at(quiet_ms(200))), after, "seed {seed}");
        }
        for (n, register) in after.into_iter().enumerate() {
            let highest = before.iter().filter_map(|known| known[n]).max();
            assert!(register >= highest, "seed {seed}: {register:?}, was {highest:?}");
            assert!(register.is_none_or(|register| world.written.contains(&(n as u32, register))), "seed {seed}");
        }
    }
}
