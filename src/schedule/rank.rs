//! What the scheduler keeps of each rank: its board, the overlay of Books not seen there yet, and, while a
//! batch is in flight, its exact answer and what the batch has booked on it.

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;

use super::{BookNumber, LoadAnswer};
use crate::load::{BoardLoad, BoardSlot, PromptBlocks, RankLoad};
use crate::protocol::{Generation, Slot, Timestamp, WorkerRank};

/// The ranks that may be chosen, in [`WorkerRank`] order.
#[derive(Debug, Default)]
pub(super) struct Ranks {
    all: Vec<Rank>,
    /// Slot to position in `all`.
    positions: Vec<Option<usize>>,
}

#[derive(Debug)]
pub(super) struct Rank {
    pub(super) rank: WorkerRank,
    pub(super) slot: Slot,
    pub(super) generation: Generation,
    /// It let a load query time out and has given no sign since: chosen only when nobody else is left.
    pub(super) suspect: bool,
    board: Arc<BoardSlot>,
    /// The last good copy of the board.
    seen: BoardLoad,
    /// The seen load with the overlay on top, as of the batch's start and with its Books since.
    view: View,
    /// Books numbered above what the board has applied.
    overlay: VecDeque<Ahead>,
    issued: u32,
    answer: Option<Answer>,
    /// What the current batch has booked here.
    booked: SmallVec<[Booked; 1]>,
}

/// A rank's load between bounds (each lowest, highest).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct View {
    pub(super) active_blocks: (u64, u64),
    pub(super) prefill_tokens: (u64, u64),
    pub(super) requests: u32,
}

/// A Book that the board has not shown yet.
#[derive(Clone, Copy, Debug)]
struct Ahead {
    number: u32,
    added_blocks: (u32, u32),
    prefill_tokens: u64,
}

#[derive(Debug)]
struct Answer {
    batch: u64,
    state: AnswerState,
}

#[derive(Debug)]
enum AnswerState {
    Awaited,
    Given {
        load: RankLoad,
        shared_blocks: SmallVec<[u32; 2]>,
    },
    /// The batch was closed without it.
    Missed,
}

#[derive(Debug)]
struct Booked {
    prompt: PromptBlocks,
    added_blocks: u64,
    prefill_tokens: u64,
}

/// What a rank's load would be, with a request on it. Each lowest, highest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Projected {
    pub(super) potential_blocks: (u64, u64),
    pub(super) prefill_tokens: (u64, u64),
    pub(super) requests: u32,
}

impl Ranks {
    pub(super) fn as_slice(&self) -> &[Rank] {
        &self.all
    }

    /// Slots in use lie below this.
    pub(super) fn slots(&self) -> usize {
        self.positions.len()
    }

    pub(super) fn position(&self, rank: WorkerRank) -> Option<usize> {
        self.all.binary_search_by_key(&rank, |known| known.rank).ok()
    }

    pub(super) fn at_mut(&mut self, position: usize) -> &mut Rank {
        &mut self.all[position]
    }

    /// Adds a rank, or replaces an earlier incarnation of it.
    pub(super) fn admit(&mut self, rank: WorkerRank, slot: Slot, generation: Generation, board: Arc<BoardSlot>) {
        let new = Rank::new(rank, slot, generation, board);
        match self.all.binary_search_by_key(&rank, |known| known.rank) {
            Ok(position) => self.all[position] = new,
            Err(position) => self.all.insert(position, new),
        }
        self.index();
    }

    pub(super) fn retire(&mut self, slot: Slot, generation: Generation) {
        self.all.retain(|rank| (rank.slot, rank.generation) != (slot, generation));
        self.index();
    }

    fn index(&mut self) {
        self.positions.clear();
        for (position, rank) in self.all.iter().enumerate() {
            let at = rank.slot.index();
            if self.positions.len() <= at {
                self.positions.resize(at + 1, None);
            }
            self.positions[at] = Some(position);
        }
    }

    /// Position of an incarnation of a slot; `None` when it is gone.
    pub(super) fn position_of(&self, slot: Slot, generation: Generation) -> Option<usize> {
        let position = (*self.positions.get(slot.index())?)?;
        (self.all[position].generation == generation).then_some(position)
    }

    fn find(&mut self, slot: Slot, generation: Generation) -> Option<&mut Rank> {
        self.position_of(slot, generation).map(|position| &mut self.all[position])
    }

    /// Reads every board; a batch decides by what it saw at its start.
    pub(super) fn refresh(&mut self, now: Timestamp) {
        for rank in &mut self.all {
            rank.refresh(now);
        }
    }

    pub(super) fn asked(&mut self, batch: u64, slots: &[Slot]) {
        for slot in slots {
            if let Some(Some(position)) = self.positions.get(slot.index()) {
                self.all[*position].answer = Some(Answer { batch, state: AnswerState::Awaited });
            }
        }
    }

    pub(super) fn answered(&mut self, batch: u64, answer: LoadAnswer) {
        if let Some(rank) = self.find(answer.slot, answer.generation) {
            rank.suspect = false;
            let state = AnswerState::Given { load: answer.load, shared_blocks: answer.shared_blocks };
            rank.answer = Some(Answer { batch, state });
        }
    }

    /// Whoever was asked and has not answered is missed, and suspect from now on.
    pub(super) fn close(&mut self, batch: u64) {
        for rank in &mut self.all {
            if let Some(answer) = rank.answer.as_mut().filter(|answer| answer.batch == batch)
                && matches!(answer.state, AnswerState::Awaited)
            {
                answer.state = AnswerState::Missed;
                rank.suspect = true;
            }
        }
    }

    pub(super) fn is_alive(&mut self, slot: Slot, generation: Generation) {
        if let Some(rank) = self.find(slot, generation) {
            rank.suspect = false;
        }
    }
}

impl Rank {
    fn new(rank: WorkerRank, slot: Slot, generation: Generation, board: Arc<BoardSlot>) -> Self {
        let seen = board.read().unwrap_or_default();
        Self {
            rank,
            slot,
            generation,
            suspect: false,
            board,
            issued: seen.applied,
            seen,
            view: View::default(),
            overlay: VecDeque::new(),
            answer: None,
            booked: SmallVec::new(),
        }
        .refreshed()
    }

    fn refreshed(mut self) -> Self {
        self.refresh(self.seen.prefill.at());
        self
    }

    fn refresh(&mut self, now: Timestamp) {
        self.booked.clear();
        if let Some(load) = self.board.read() {
            if load.incarnation != self.seen.incarnation {
                self.overlay.clear();
                self.issued = load.applied;
                self.suspect = false;
            }
            self.seen = load;
        }
        let applied = self.seen.applied;
        while self.overlay.front().is_some_and(|ahead| !is_after(ahead.number, applied)) {
            self.overlay.pop_front();
        }
        let active_blocks = u64::from(self.seen.active_blocks);
        self.view = View {
            active_blocks: (active_blocks, active_blocks),
            prefill_tokens: self.seen.prefill.bounds(now),
            requests: self.seen.requests,
        };
        for ahead in &self.overlay {
            self.view.add(ahead.added_blocks, ahead.prefill_tokens);
        }
        self.answer = self.view.answer_of_an_idle_rank();
    }

    /// Requests active or booked.
    pub(super) fn requests(&self) -> u32 {
        self.view.requests
    }

    /// Whether the exact load is known without asking.
    pub(super) fn is_answered(&self) -> bool {
        matches!(&self.answer, Some(Answer { state: AnswerState::Given { .. }, .. }))
    }

    /// What a request of the current batch would make of this rank.
    pub(super) fn project(&self, in_batch: usize, prompt: &PromptBlocks) -> Projected {
        let request_blocks = u64::from(prompt.block_count());
        if let Some(Answer { state: AnswerState::Given { load, shared_blocks }, .. }) = &self.answer {
            let shared = u64::from(shared_blocks.get(in_batch).copied().unwrap_or(0));
            return self.project_exactly(load, shared, prompt, request_blocks);
        }
        let (lo, hi) = self.view.active_blocks;
        let missed = matches!(&self.answer, Some(Answer { state: AnswerState::Missed, .. }));
        let least = match (missed, prompt.shares_blocks()) {
            (true, _) => hi + request_blocks,
            (false, true) => lo,
            (false, false) => lo + request_blocks,
        };
        Projected {
            potential_blocks: (least, hi + request_blocks),
            prefill_tokens: if missed {
                (self.view.prefill_tokens.1, self.view.prefill_tokens.1)
            } else {
                self.view.prefill_tokens
            },
            requests: self.view.requests,
        }
    }

    /// The answer, with what the batch booked here since on top of it.
    fn project_exactly(&self, load: &RankLoad, shared: u64, prompt: &PromptBlocks, request_blocks: u64) -> Projected {
        let mut projected = (u64::from(load.active_blocks), load.prefill_tokens, load.requests);
        let mut shared = shared;
        for booked in &self.booked {
            projected.0 += booked.added_blocks;
            projected.1 += booked.prefill_tokens;
            projected.2 += 1;
            shared = shared.max(u64::from(prompt.shared_blocks(&booked.prompt)));
        }
        let potential = projected.0 + request_blocks - shared.min(request_blocks);
        Projected {
            potential_blocks: (potential, potential),
            prefill_tokens: (projected.1, projected.1),
            requests: projected.2,
        }
    }

    /// Counts a Book in, and numbers it.
    pub(super) fn book(&mut self, in_batch: usize, prompt: &PromptBlocks, prefill_tokens: u64) -> BookNumber {
        let projected = self.project(in_batch, prompt);
        let (lo, hi) = match &self.answer {
            Some(Answer { state: AnswerState::Given { load, .. }, .. }) => {
                let before = u64::from(load.active_blocks) + self.booked.iter().map(|b| b.added_blocks).sum::<u64>();
                let added = projected.potential_blocks.0 - before;
                self.booked.push(Booked { prompt: prompt.clone(), added_blocks: added, prefill_tokens });
                (added, added)
            }
            _ => {
                let (lo, hi) = self.view.active_blocks;
                (projected.potential_blocks.0.saturating_sub(lo), projected.potential_blocks.1 - hi)
            }
        };
        self.issued = self.issued.wrapping_add(1);
        let added_blocks = (narrow(lo), narrow(hi));
        self.overlay.push_back(Ahead { number: self.issued, added_blocks, prefill_tokens });
        self.view.add(added_blocks, prefill_tokens);
        BookNumber { incarnation: self.seen.incarnation, number: self.issued }
    }
}

impl View {
    fn add(&mut self, added_blocks: (u32, u32), prefill_tokens: u64) {
        self.active_blocks.0 += u64::from(added_blocks.0);
        self.active_blocks.1 += u64::from(added_blocks.1);
        self.prefill_tokens.0 += prefill_tokens;
        self.prefill_tokens.1 += prefill_tokens;
        self.requests += 1;
    }

    /// Where nothing runs, no block of a newcomer can be active already: nobody need be asked.
    fn answer_of_an_idle_rank(&self) -> Option<Answer> {
        let load = RankLoad { active_blocks: narrow(self.active_blocks.0), prefill_tokens: 0, requests: 0 };
        let idle = self.requests == 0 && self.prefill_tokens.1 == 0;
        let state = AnswerState::Given { load, shared_blocks: SmallVec::new() };
        idle.then_some(Answer { batch: 0, state })
    }
}

/// Whether `number` was counted after `other`, across the wrap.
fn is_after(number: u32, other: u32) -> bool {
    number != other && number.wrapping_sub(other) < u32::MAX / 2
}

fn narrow(blocks: u64) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}
