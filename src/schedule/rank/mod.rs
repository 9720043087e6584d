//! Scheduler state of one rank: its board, the overlay of later Books, and, during a batch, its exact reply and the
//! batch's bookings on it.

mod keyframe;

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;

use super::latency::recent::RecentWork;
pub(super) use super::projected::{Projected, ProjectedPrompt};
use super::view::{Added, View, Wait};
use super::{Admission, BookNumber, LoadView};
use crate::load::{
    BoardLoad, BoardVersion, EngineSpeed, PeerLoad, PrefillLoadHint, PromptBlocks, PromptFingerprint, PromptSketch,
    PublishedSpeed, RankLoad, SpeedCell,
};
use crate::protocol::{Generation, Slot, Timestamp, WorkerRank};
use crate::select::RankTraits;

#[derive(Debug)]
pub(super) struct Rank {
    front: Front,
    pub(super) rank: WorkerRank,
    pub(super) generation: Generation,
    pub(super) about: Box<About>,
    /// The last good copy of the board and its time.
    seen: BoardLoad,
    seen_at: Timestamp,
    /// Load by other replicas, and their remaining prefill tokens at the last refresh or aging.
    peers: PeerLoad,
    peer_tokens: u64,
    /// Prefill backlog of the overlay.
    ahead_wait: Wait,
    /// Books above the board's applied number.
    overlay: VecDeque<Ahead>,
    issued: u32,
    /// Speed and fill of the cache at the last measurement.
    measured: Measured,
    answer: Option<Answer>,
    /// Bookings of the current batch.
    booked: SmallVec<[Booked; 1]>,
}

/// Fields that a pass over all ranks reads, on one cache line.
#[derive(Debug)]
#[repr(align(64))]
struct Front {
    /// The board load with the overlay, without bookings of the batch. Its prefill tokens are those of the last refresh
    /// or aging.
    view: View,
    /// Version of the last board copy.
    version: BoardVersion,
    slot: Slot,
    /// Whether the board is complete: no query, and no Book in the overlay. True for most ranks.
    settled: bool,
}

const _: () = assert!(size_of::<Front>() == 64, "one cache line");

/// Fields that most decisions do not read. Separate, so that a pass over all ranks touches fewer cache lines.
#[derive(Debug)]
pub(super) struct About {
    pub(super) traits: Arc<RankTraits>,
    /// A published speed and its aged value; absent while the published speed is fresh.
    pub(super) aged_speed: Option<(PublishedSpeed, EngineSpeed)>,
    /// Time of joining.
    pub(super) since: Timestamp,
    /// Cost factor of the slow start; 1 after its end, permanently.
    pub(super) slow_start_factor: f64,
    /// Time of the last return from an ejection, and its cost factor.
    pub(super) returned_at: Timestamp,
    pub(super) return_factor: f64,
    /// Recent work of its bookings.
    pub(super) recent_work: RecentWork,
    /// Tokens of the contexts of its programs.
    pub(super) working_tokens: u64,
}

/// State of a rank that other cells than its board publish.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measured {
    pub(super) speed: EngineSpeed,
    /// Whether its cache is full, so that new blocks evict others.
    pub(super) is_full: bool,
}

/// A Book that the board does not show yet.
#[derive(Clone, Copy, Debug)]
struct Ahead {
    number: u32,
    added: Added,
}

/// Result of a board read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// No freed capacity.
    Nothing,
    /// Some load is gone.
    Fell,
    /// A new incarnation of the sequence actor.
    Reborn,
}

/// State of the current batch's query to a rank.
#[derive(Debug)]
pub(super) enum Answer {
    Awaited,
    Given {
        load: RankLoad,
        shared_blocks: SmallVec<[u32; 2]>,
    },
    /// The batch was closed without a reply.
    Missed,
}

#[derive(Debug)]
struct Booked {
    prompt: PromptBlocks,
    added: Added,
}

impl Rank {
    pub(super) fn new<V: LoadView>(admission: Admission, loads: &V, slow_start_factor: f64) -> Self {
        let Admission { rank, slot, generation, traits, since, draining: _ } = admission;
        let (returned_at, return_factor) = (since, 1.0);
        let mut version = BoardVersion::default();
        let unread = BoardLoad { incarnation: UNREAD, ..BoardLoad::default() };
        let seen = loads.board(slot, &mut version).unwrap_or(unread);
        let view = View::of(&seen, seen.prefill.at());
        let mut new = Self {
            front: Front { view, version, slot, settled: true },
            rank,
            generation,
            about: Box::new(About {
                traits,
                aged_speed: None,
                since,
                slow_start_factor,
                returned_at,
                return_factor,
                recent_work: RecentWork::default(),
                working_tokens: 0,
            }),
            issued: seen.applied,
            measured: Measured::default(),
            peers: loads.peer_load(slot),
            peer_tokens: 0,
            ahead_wait: Wait::default(),
            seen,
            seen_at: since,
            overlay: VecDeque::new(),
            answer: None,
            booked: SmallVec::new(),
        };
        new.view_at(since.max(seen.prefill.at()));
        new
    }

    pub(super) fn slot(&self) -> Slot {
        self.front.slot
    }

    /// Reads its speed, with `typical` for unknown parts, and the fill of its cache.
    pub(super) fn measure<V: LoadView>(&mut self, loads: &V, typical: EngineSpeed) {
        let speed = self.about.speed(loads.with_speed(self.slot(), SpeedCell::published), typical);
        let full = |blocks: u32| f64::from(loads.held_blocks(self.slot())) >= FULL_SHARE * f64::from(blocks);
        self.measured = Measured { speed, is_full: self.about.traits.total_kv_blocks.is_some_and(full) };
    }

    /// Speed and fill of the cache at the last measurement.
    pub(super) fn measured(&self) -> Measured {
        self.measured
    }

    /// Whether its sketch contains all of its prompts.
    pub(super) fn is_settled(&self) -> bool {
        self.overlay.is_empty()
    }

    /// The board and the load by other replicas at the last refresh.
    pub(super) fn published(&self) -> (BoardLoad, PeerLoad) {
        (self.seen, self.peers)
    }

    /// Sketch of the prompts on the board.
    pub(super) fn sketch(&self) -> PromptSketch {
        self.seen.prompts
    }

    /// Whether no consistent board has been read yet.
    pub(super) fn is_unread(&self) -> bool {
        self.seen.incarnation == UNREAD
    }

    /// Records a query or its reply.
    pub(super) fn ask(&mut self, answer: Answer) {
        self.answer = Some(answer);
        self.front.settled = false;
    }

    /// Records the absence of an awaited reply. Returns whether one was awaited.
    pub(super) fn miss(&mut self) -> bool {
        let is_awaited = matches!(self.answer, Some(Answer::Awaited));
        if is_awaited {
            self.answer = Some(Answer::Missed);
        }
        is_awaited
    }

    /// Reads the board.
    pub(super) fn refresh<V: LoadView>(&mut self, loads: &V, now: Timestamp) -> News {
        self.answer = None;
        let news = loads.board(self.slot(), &mut self.front.version);
        let mut reborn = false;
        if let Some(load) = news {
            if load.incarnation != self.seen.incarnation {
                self.overlay.clear();
                self.issued = load.applied;
                reborn = true;
            }
            self.seen = load;
            self.seen_at = now;
        }
        let before = self.load_max();
        self.booked.clear();
        while self.overlay.front().is_some_and(|ahead| !is_after(ahead.number, self.seen.applied)) {
            self.overlay.pop_front();
        }
        self.peers = loads.peer_load(self.slot());
        self.view_at(now);
        self.ahead_wait = Wait::default();
        for ahead in &self.overlay {
            self.front.view.add(ahead.added);
            self.ahead_wait.add(ahead.added);
        }
        self.front.settled = self.overlay.is_empty();
        let after = self.load_max();
        let fell = after.0 < before.0 || after.1 < before.1 || after.2 < before.2;
        match (reborn, fell) {
            (true, _) => News::Reborn,
            (false, true) => News::Fell,
            (false, false) => News::Nothing,
        }
    }

    /// Updates the prefill tokens of the view to `now`.
    pub(super) fn age(&mut self, now: Timestamp) {
        self.view_at(now);
        let earlier = self.overlay.len() - self.booked.len();
        self.overlay.iter().take(earlier).for_each(|ahead| self.front.view.add(ahead.added));
    }

    /// Sets the view to the board and the load by other replicas at `now`, without the overlay.
    fn view_at(&mut self, now: Timestamp) {
        self.front.view = View::of(&self.seen, now);
        if self.peers.is_idle() {
            self.peer_tokens = 0;
        } else {
            self.peer_tokens = self.peers.prefill_tokens_left(Wait::of(&self.seen, now).modelled, now);
            self.front.view.add_peers(&self.peers, self.peer_tokens);
        }
    }

    /// Upper bounds of blocks, prefill tokens and requests.
    fn load_max(&self) -> (u64, u64, u32) {
        (self.active_blocks_max(), self.prefill_tokens_max(), self.requests())
    }

    /// Whether its slow start is in progress.
    pub(super) fn is_starting(&self) -> bool {
        self.about.slow_start_factor != 1.0
    }

    /// Whether a prefill on it is long overdue, so that the prompts its requests will have computed are unknown.
    pub(super) fn is_overdue(&self) -> bool {
        self.seen.prefill.is_overdue()
    }

    /// Time of its last observed load change.
    pub(super) fn seen_at(&self) -> Timestamp {
        self.seen_at
    }

    /// Whether its load falls with time alone.
    pub(super) fn decays(&self) -> bool {
        self.seen.prefill.decays() || self.peers.decays()
    }

    /// Upper bound of active and booked blocks.
    pub(super) fn active_blocks_max(&self) -> u64 {
        self.booked
            .iter()
            .fold(self.front.view.active_blocks.1, |sum, booked| sum.saturating_add(booked.added.blocks.1))
    }

    /// Upper bound of prefill tokens to compute.
    pub(super) fn prefill_tokens_max(&self) -> u64 {
        self.booked
            .iter()
            .fold(self.front.view.prefill_tokens.1, |sum, booked| sum.saturating_add(booked.added.prefill_tokens))
    }

    /// Blocks that a step reads, with bookings of the batch. Saturates.
    pub(super) fn read_blocks(&self) -> u32 {
        self.booked.iter().fold(self.front.view.read_blocks, |sum, booked| sum.saturating_add(booked.added.read_blocks))
    }

    /// Active and booked requests.
    pub(super) fn requests(&self) -> u32 {
        self.front.view.requests + u32::try_from(self.booked.len()).unwrap_or(u32::MAX)
    }

    /// Projected load of this rank with a request of the current batch, as bounds that are exact if its shared blocks
    /// are known. Includes earlier bookings of the batch.
    #[inline(always)] // inlined into the loop over all ranks, which is most of a decision
    pub(super) fn project(&self, candidate: ProjectedPrompt<'_>) -> Projected {
        if !self.front.settled {
            return self.project_unsettled(candidate);
        }
        let shared_blocks_max = u64::from(self.seen.prompts.shared_blocks_max(candidate.fingerprint));
        let View { active_blocks, prefill_tokens, requests, read_blocks } = self.front.view;
        let most = active_blocks.0 + candidate.block_count;
        let least = most - shared_blocks_max.min(candidate.block_count);
        Projected { active_blocks, potential_blocks: (least, most), prefill_tokens, requests, read_blocks }
    }

    #[inline(never)]
    fn project_unsettled(&self, candidate: ProjectedPrompt<'_>) -> Projected {
        let mut projected = match &self.answer {
            Some(Answer::Given { load, shared_blocks }) => {
                let shared = u64::from(shared_blocks.get(candidate.in_batch).copied().unwrap_or(0));
                let mut view = View::exactly(load);
                view.add_peers(&self.peers, self.peer_tokens);
                self.project_from(candidate, view, (shared, shared))
            }
            Some(Answer::Awaited | Answer::Missed) | None => self.project_board(candidate),
        };
        if matches!(self.answer, Some(Answer::Missed)) {
            projected.take_worst(); // without a reply the upper bounds apply
        }
        projected
    }

    /// Projected load without the reply to a query.
    pub(super) fn project_board(&self, candidate: ProjectedPrompt<'_>) -> Projected {
        self.project_from(candidate, self.front.view, (0, self.shared_blocks_max(candidate)))
    }

    fn project_from(&self, candidate: ProjectedPrompt<'_>, mut view: View, mut shared: (u64, u64)) -> Projected {
        let request_blocks = candidate.block_count;
        for booked in &self.booked {
            view.add(booked.added);
            let with_it = u64::from(candidate.prompt.shared_blocks(&booked.prompt));
            shared = (shared.0.max(with_it), shared.1.max(with_it));
        }
        let lo = view.active_blocks.0 + request_blocks - shared.1.min(request_blocks);
        let hi = view.active_blocks.1 + request_blocks - shared.0.min(request_blocks);
        let View { active_blocks, prefill_tokens, requests, read_blocks } = view;
        Projected { active_blocks, potential_blocks: (lo, hi), prefill_tokens, requests, read_blocks }
    }

    /// Whether a query has been answered or has timed out.
    pub(super) fn has_reply(&self) -> bool {
        matches!(self.answer, Some(Answer::Given { .. } | Answer::Missed))
    }

    /// Upper bound of request blocks that are already active here, before bookings of the batch.
    fn shared_blocks_max(&self, candidate: ProjectedPrompt<'_>) -> u64 {
        // The board does not show the prompts in the overlay.
        let known = self.overlay.len() == self.booked.len();
        let most = if known {
            self.seen.prompts.shared_blocks_max(candidate.fingerprint)
        } else {
            candidate.fingerprint.block_count()
        };
        u64::from(most)
    }

    /// Prefill backlog ahead of a new request at `now`, including bookings of the batch. Load replies do not contain it.
    pub(super) fn wait(&self, now: Timestamp) -> Wait {
        let own = Wait::of(&self.seen, now);
        let peers = self.peers.prefill_left(own.modelled, now);
        let own = own.and(self.ahead_wait);
        Wait {
            modelled: own.modelled.saturating_add(peers),
            unmodelled_tokens: own.unmodelled_tokens.saturating_add(self.peers.unmodelled_tokens.into()),
        }
    }

    /// Adds a Book and numbers it.
    pub(super) fn book(&mut self, candidate: ProjectedPrompt<'_>, prefill: Option<PrefillLoadHint>) -> BookNumber {
        let with = self.project(candidate).potential_blocks;
        let nothing = ProjectedPrompt {
            prompt: &NOTHING,
            block_count: 0,
            fingerprint: &PromptFingerprint::unshared(),
            ..candidate
        };
        let without = self.project(nothing).potential_blocks;
        let added = Added {
            blocks: (with.0.saturating_sub(without.0), with.1.saturating_sub(without.1)),
            read_blocks: u32::try_from(candidate.block_count).unwrap_or(u32::MAX),
            prefill_tokens: prefill.map_or(0, |hint| u64::from(hint.effective_tokens())),
            prefill_duration: prefill.and_then(PrefillLoadHint::expected_duration),
        };
        self.booked.push(Booked { prompt: candidate.prompt.clone(), added });
        self.front.settled = false;
        self.issued = self.issued.wrapping_add(1);
        self.overlay.push_back(Ahead { number: self.issued, added });
        self.ahead_wait.add(added);
        BookNumber { incarnation: self.seen.incarnation, number: self.issued }
    }
}

impl Default for Measured {
    fn default() -> Self {
        Self { speed: EngineSpeed::prior(1), is_full: false }
    }
}

/// Share of used blocks from which a cache counts as full.
const FULL_SHARE: f64 = 0.9;

/// Incarnation of a board without any consistent read. No sequence actor uses it: the first snapshot counts as a new
/// incarnation, and Books continue from its applied number.
const UNREAD: u32 = u32::MAX;

const NOTHING: PromptBlocks = PromptBlocks::Counted(0);

/// Whether `number` was counted after `other`, across the wrap.
fn is_after(number: u32, other: u32) -> bool {
    number != other && number.wrapping_sub(other) < u32::MAX / 2
}
