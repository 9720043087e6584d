//! Load sharing: start of the shipped shell, and its summaries on their way to the other gateways.

use std::sync::Arc;
use std::time::Duration;

use pointsman::internals::shell::scheduler::SchedulerMsg;
use pointsman::internals::shell::sharing::{SharedEntry, SharingCells, SharingShell};
use pointsman::protocol::WorkerRank;
use pointsman::{
    ReplicaId, ReplicaLife,
    internals::replica::{LoadSummary, ReplicaLayout},
};

use super::{Gateway, Surroundings};
use crate::letter::Letter;
use crate::net::{Actor, Place};
use crate::prompt::BLOCK_SIZE;

const LAYOUT: ReplicaLayout = ReplicaLayout { block_size: BLOCK_SIZE, hash_seed: 1 };
const INTERVAL: Duration = Duration::from_millis(20);
/// Interval of a gateway without load.
const IDLE_INTERVAL: Duration = Duration::from_millis(500);

impl Gateway {
    pub(super) fn new_sharing(cells: SharingCells) -> SharingShell {
        SharingShell::new(LAYOUT, INTERVAL, 0, cells)
    }

    /// Requests of all other gateways on a rank, as the scheduler reads them.
    pub(crate) fn peer_requests_on(&self, rank: WorkerRank) -> u32 {
        let here = self.table().filter(|entry| entry.rank == rank);
        here.map(|entry| entry.cells.peers.read().requests).max().unwrap_or(0)
    }

    /// Follows joined and left ranks.
    pub(super) fn share_ranks(&mut self, around: &mut Surroundings<'_>) {
        let entries: Vec<_> = self
            .table()
            .map(|entry| SharedEntry {
                rank: entry.rank,
                slot: entry.slot,
                board: Arc::clone(&entry.cells.board),
                peers: Arc::clone(&entry.cells.peers),
            })
            .collect();
        let fell = self.sharing.follow(entries, around.net.now);
        self.wake_scheduler(fell, around);
    }

    pub(super) fn on_sharing(&mut self, letter: Letter, around: &mut Surroundings<'_>) {
        let now = around.net.now;
        match letter {
            Letter::Share => {
                let (summary, fell) = self.sharing.on_tick(now);
                self.publish(summary, around);
                self.wake_scheduler(fell, around);
                let interval = if self.sharing.is_idle() { IDLE_INTERVAL } else { INTERVAL };
                around.net.after(interval, self.place(Actor::Sharing), Letter::Share);
            }
            Letter::Booked if self.sharing.may_write(now) => {
                let summary = self.sharing.on_booked(now);
                self.publish(summary, around);
            }
            Letter::Booked => {}
            Letter::Summary(life, summary) => {
                #[cfg(feature = "replicas")]
                let summary = LoadSummary::decode(&summary.encode()).expect("a written summary is valid");
                if let Ok(received) = self.sharing.receive(life, &summary, now) {
                    self.wake_scheduler(received.fell, around);
                }
            }
            _ => unreachable!("no message of load sharing"),
        }
    }

    fn publish(&self, summary: Option<LoadSummary>, around: &mut Surroundings<'_>) {
        let Some(summary) = summary else { return };
        let own = ReplicaLife { replica: ReplicaId(self.number as u64), incarnation: self.life.into() };
        for (peer, life, hears) in around.peers.iter().filter(|(peer, ..)| *peer != self.number) {
            let is_lost = !hears || around.peers.iter().any(|(n, _, hears)| *n == self.number && !hears);
            if !is_lost {
                let letter = Letter::Summary(own, Box::new(summary.clone()));
                around.net.send(self.place(Actor::Sharing), Place::Gateway(*peer, *life, Actor::Sharing), letter);
            }
        }
    }

    fn wake_scheduler(&self, fell: bool, around: &mut Surroundings<'_>) {
        if fell && self.is_queueing() && self.wake.replace(false) {
            let letter = Letter::scheduler(SchedulerMsg::Wake { at: None });
            self.send(Actor::Sharing, Actor::Scheduler, letter, around);
        }
    }
}
