//! Shell of load sharing: summaries of own bookings, and the sums of the other gateways.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use pointsman::load::{BoardLoad, BoardVersion, PeerLoad, PlacementRate};
use pointsman::protocol::{Slot, Timestamp, WorkerRank};
use pointsman::replica::{
    LoadSummary, PeerTable, RankContribution, ReplicaId, ReplicaLayout, ReplicaLife, SummaryWriter,
};

use super::{Entry, Gateway, Surroundings};
use crate::letter::Letter;
use crate::net::{Actor, Place};
use crate::prompt::BLOCK_SIZE;

const LAYOUT: ReplicaLayout = ReplicaLayout { block_size: BLOCK_SIZE, hash_seed: 1 };
const INTERVAL: Duration = Duration::from_millis(20);
/// Interval of a gateway without load.
const IDLE_INTERVAL: Duration = Duration::from_millis(500);

pub(super) struct Sharing {
    life: ReplicaLife,
    writer: SummaryWriter,
    peers: PeerTable,
    ranks: BTreeMap<Slot, Shared>,
}

struct Shared {
    entry: Rc<Entry>,
    version: BoardVersion,
    board: BoardLoad,
    has_changed: bool,
    writes_left: u8,
    peers: PeerLoad,
}

impl Sharing {
    pub(super) fn new(number: usize, life: u32) -> Self {
        Self {
            life: ReplicaLife { replica: ReplicaId(number as u64), incarnation: life.into() },
            writer: SummaryWriter::new(LAYOUT, INTERVAL, 0),
            peers: PeerTable::new(LAYOUT),
            ranks: BTreeMap::new(),
        }
    }

    pub(super) fn joined(&mut self, entry: &Rc<Entry>) {
        let shared = Shared {
            entry: Rc::clone(entry),
            version: BoardVersion::default(),
            board: BoardLoad::default(),
            has_changed: true,
            writes_left: SummaryWriter::REPETITIONS + 1,
            peers: PeerLoad::default(),
        };
        self.ranks.insert(entry.slot, shared);
    }

    pub(super) fn left(&mut self, slot: Slot) {
        self.ranks.remove(&slot);
    }

    /// Requests of all other gateways on a rank, as of their summaries.
    pub(super) fn requests(&self, rank: WorkerRank, now: Timestamp) -> u32 {
        self.peers.load(rank, now).requests
    }

    fn contributions(&mut self, now: Timestamp) -> Vec<(RankContribution, bool)> {
        let mut sums: BTreeMap<WorkerRank, (RankContribution, bool)> = BTreeMap::new();
        for shared in self.ranks.values_mut() {
            if let Some(board) = shared.entry.cells.board.read_since(&mut shared.version) {
                (shared.board, shared.has_changed) = (board, true);
            }
            if shared.has_changed {
                shared.writes_left = SummaryWriter::REPETITIONS + 1;
            }
            if shared.writes_left == 0 {
                continue;
            }
            let one = shared.contribution(now);
            shared.writes_left = if one.is_idle() { shared.writes_left - 1 } else { SummaryWriter::REPETITIONS + 1 };
            let has_changed = std::mem::take(&mut shared.has_changed);
            let (sum, changed) =
                sums.entry(one.rank()).or_insert((RankContribution { booked: 0, ..idle(&one) }, false));
            sum.active_blocks += one.active_blocks;
            sum.read_blocks += one.read_blocks;
            sum.requests += one.requests;
            sum.prefills += one.prefills;
            sum.prefill_tokens += one.prefill_tokens;
            sum.unmodelled_tokens += one.unmodelled_tokens;
            sum.prefill_us += one.prefill_us;
            sum.booked = sum.booked.wrapping_add(one.booked);
            *changed |= has_changed;
        }
        sums.into_values().collect()
    }
}

fn idle(of: &RankContribution) -> RankContribution {
    RankContribution {
        active_blocks: 0,
        read_blocks: 0,
        requests: 0,
        prefills: 0,
        prefill_tokens: 0,
        unmodelled_tokens: 0,
        prefill_us: 0,
        ..*of
    }
}

impl Shared {
    fn contribution(&self, now: Timestamp) -> RankContribution {
        let curve = &self.board.prefill;
        let ((modelled, unmodelled), (_, tokens)) = (curve.wait(now), curve.bounds(now));
        let WorkerRank { worker, rank } = self.entry.rank;
        RankContribution {
            worker: worker.0,
            dp_rank: rank,
            active_blocks: self.board.active_blocks,
            read_blocks: self.board.read_blocks,
            requests: self.board.requests,
            prefills: self.board.prefills,
            prefill_tokens: tokens.saturating_sub(unmodelled) as u32,
            unmodelled_tokens: unmodelled as u32,
            prefill_us: modelled.as_micros() as u32,
            booked: self.board.applied,
        }
    }
}

impl Gateway {
    pub(super) fn on_sharing(&mut self, letter: Letter, around: &mut Surroundings<'_>) {
        let now = around.net.now;
        match letter {
            Letter::Share => self.share(around),
            Letter::Summary(life, summary) => {
                #[cfg(feature = "replicas")]
                let summary = LoadSummary::decode(&summary.encode()).expect("a written summary is valid");
                if let Ok(received) = self.sharing.peers.receive(life, &summary, now) {
                    self.publish_peers(&received.changed, around);
                }
            }
            _ => unreachable!("no message of load sharing"),
        }
    }

    fn share(&mut self, around: &mut Surroundings<'_>) {
        let now = around.net.now;
        let contributions = self.sharing.contributions(now);
        let head = self.queue_heads.own();
        let rate: PlacementRate = self.arrivals.own(now);
        let summary: Option<LoadSummary> = self.sharing.writer.write(contributions.into_iter(), rate, head, now);
        if let Some(summary) = summary {
            for (peer, life, hears) in around.peers.iter().filter(|(peer, ..)| *peer != self.number) {
                let is_lost = !hears || around.peers.iter().any(|(n, _, hears)| *n == self.number && !hears);
                if !is_lost {
                    let letter = Letter::Summary(self.sharing.life, Box::new(summary.clone()));
                    let to = Place::Gateway(*peer, *life, Actor::Sharing);
                    around.net.send(self.place(Actor::Sharing), to, letter);
                }
            }
        }
        let changed = self.sharing.peers.tick(now);
        self.publish_peers(&changed, around);
        let interval = if self.sharing.writer.is_idle() { IDLE_INTERVAL } else { INTERVAL };
        around.net.after(interval, self.place(Actor::Sharing), Letter::Share);
    }

    /// Writes the sums of the other gateways on these ranks.
    fn publish_peers(&mut self, changed: &[WorkerRank], around: &mut Surroundings<'_>) {
        let now = around.net.now;
        self.arrivals.publish_peers(self.sharing.peers.arrivals(now));
        let heads = self.sharing.peers.queue_heads(now);
        self.queue_heads.publish_peers(&heads);
        for shared in self.sharing.ranks.values_mut().filter(|shared| changed.contains(&shared.entry.rank)) {
            shared.peers = shared.peers.followed_by(self.sharing.peers.load(shared.entry.rank, now));
            shared.entry.cells.peers.publish(&shared.peers);
            self.board_changes.insert(shared.entry.slot);
        }
        if self.is_queueing() && self.wake.replace(false) {
            self.send(Actor::Sharing, Actor::Scheduler, Letter::Wake(None), around);
        }
    }
}
