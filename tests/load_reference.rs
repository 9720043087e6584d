//! Reference model of `ActiveSequences` for property tests.
//!
//! Keeps lists of all blocks and requests, and derives every result by scanning them: no tree, no running sums, no
//! summaries. Shares only input types with the real implementation.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pointsman::internals::load::{BookedBlocks, PrefillLoadHint, Projection, PromptBlocks, RankLoad, Weight};
use pointsman::internals::protocol::{BookingId, SequenceHash};
use pointsman::protocol::Timestamp;

/// A prefill is overdue after its expected end plus this multiple of its expected time, plus the slack.
const OVERDUE_FACTOR: u32 = 2;
const OVERDUE_SLACK: Duration = Duration::from_secs(1);

/// Maximum of the report count, and its minimum for a rank that is assumed to report.
const REPORTS_MAX: u8 = 8;
const REPORTS_MIN: u8 = 4;

/// Identity of a block in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ReferenceBlock {
    /// The same for all prompts with the same prefix.
    Shared(SequenceHash),
    /// The n-th private block of one booking.
    Private(BookingId, u32),
}

#[derive(Clone, Debug)]
struct ReferenceRequest {
    prompt: Vec<ReferenceBlock>,
    /// Prompt blocks read for each sequence.
    reads: Vec<u32>,
    output: Vec<Weight>,
    prefill: Option<ReferencePrefill>,
    /// Position in the order of arrival.
    arrival: u64,
}

#[derive(Clone, Copy, Debug)]
struct ReferencePrefill {
    tokens: u128,
    nanos: Option<u128>,
    /// Credited nanoseconds.
    spent: u128,
    /// Whether the expected end has passed.
    done: bool,
    /// Times of booking and of the expected end.
    booked: u128,
    ended: u128,
    is_reported: bool,
    is_overdue: bool,
}

/// Reference model of one rank.
#[derive(Clone, Debug)]
pub(crate) struct ReferenceSequences {
    assume_kv_reuse: bool,
    requests: BTreeMap<BookingId, ReferenceRequest>,
    weights: BTreeMap<ReferenceBlock, Weight>,
    now: Timestamp,
    arrivals: u64,
    /// Received reports minus missing reports.
    reports: u8,
}

impl ReferenceSequences {
    /// Creates a rank without bookings.
    pub(crate) fn new(assume_kv_reuse: bool) -> Self {
        Self {
            assume_kv_reuse,
            requests: BTreeMap::new(),
            weights: BTreeMap::new(),
            now: Timestamp::default(),
            arrivals: 0,
            reports: 0,
        }
    }

    /// Books a request; `None` for a duplicate.
    pub(crate) fn book(
        &mut self,
        booking: BookingId,
        prompt: &PromptBlocks,
        prefill: Option<PrefillLoadHint>,
        now: Timestamp,
    ) -> Option<BookedBlocks> {
        if self.requests.contains_key(&booking) {
            return None;
        }
        self.change(now);
        let reads = match prompt {
            PromptBlocks::Several { sequences, read_blocks, .. } => vec![*read_blocks; *sequences as usize],
            PromptBlocks::Hashed(_) | PromptBlocks::Counted(_) => vec![prompt.block_count()],
        };
        let prompt = self.blocks(booking, prompt);
        let added = prompt.iter().filter(|block| !self.weights.contains_key(block)).count();
        for &block in &prompt {
            self.weights.entry(block).or_insert(Weight::ONE);
        }
        let prefill = prefill.map(|hint| ReferencePrefill {
            tokens: hint.effective_tokens().into(),
            nanos: hint.expected_duration().map(|duration| duration.as_nanos()).filter(|_| !self.is_overdue()),
            spent: 0,
            done: false,
            booked: self.now.0.into(),
            ended: 0,
            is_reported: hint.is_reported(),
            is_overdue: false,
        });
        let booked = BookedBlocks { shared_blocks: (prompt.len() - added) as u32, added_blocks: added as u32 };
        let (output, arrival) = (Vec::new(), self.arrivals);
        self.requests.insert(booking, ReferenceRequest { prompt, reads, output, prefill, arrival });
        self.arrivals += 1;
        Some(booked)
    }

    /// Completes a prefill; returns whether there was one to complete.
    pub(crate) fn complete_prefill(&mut self, booking: BookingId, now: Timestamp) -> bool {
        let Some(prefill) = self.requests.get(&booking).and_then(|request| request.prefill) else { return false };
        if prefill.is_reported {
            self.reports = (self.reports + 1).min(REPORTS_MAX);
        }
        self.change(now);
        self.requests.entry(booking).and_modify(|request| request.prefill = None);
        true
    }

    /// Adds output blocks that are read together; returns whether there were any and the booking exists.
    pub(crate) fn push_output(&mut self, booking: BookingId, decays: &[Option<Weight>]) -> bool {
        let Some(request) = self.requests.get_mut(&booking).filter(|_| !decays.is_empty()) else { return false };
        for decay in decays {
            request.output.push(Weight::ONE);
            if let Some(decay) = decay {
                request.output.fill(*decay);
            }
        }
        if let Some(&decay) = decays.iter().flatten().next_back() {
            for block in self.exclusive_suffix(booking) {
                self.weights.insert(block, decay);
            }
        }
        true
    }

    /// Ends a booking; returns whether it existed.
    pub(crate) fn free(&mut self, booking: BookingId, now: Timestamp) -> bool {
        let Some(request) = self.requests.get(&booking).cloned() else { return false };
        self.change(now);
        if request.prefill.is_some_and(|prefill| prefill.is_reported) && !request.output.is_empty() {
            self.reports = self.reports.saturating_sub(2);
        }
        self.requests.remove(&booking);
        let used: BTreeSet<ReferenceBlock> =
            self.requests.values().flat_map(|request| request.prompt.clone()).collect();
        self.weights.retain(|block, _| used.contains(block));
        true
    }

    /// Projection of a prompt.
    pub(crate) fn project(&self, prompt: &PromptBlocks) -> Projection {
        let unbooked = BookingId(u64::MAX);
        let blocks = self.blocks(unbooked, prompt);
        let shared_blocks = blocks.iter().filter(|block| self.weights.contains_key(block)).count() as u32;
        let active_blocks = self.load(self.now).active_blocks;
        let potential_blocks = active_blocks + blocks.len() as u32 - shared_blocks;
        Projection { active_blocks, shared_blocks, potential_blocks }
    }

    /// The load at `now`.
    pub(crate) fn load(&self, now: Timestamp) -> RankLoad {
        let mut then = self.clone();
        then.advance(now);
        let left = then.requests.values().flat_map(|request| request.prefill).map(|prefill| prefill.left());
        RankLoad {
            active_blocks: self.weighted_blocks().round() as u32,
            read_blocks: self
                .requests
                .values()
                .map(|request| request.reads.iter().sum::<u32>() + request.output.len() as u32)
                .sum::<u32>(),
            prefill_tokens: left.sum::<u128>() as u64,
            requests: self.requests.values().map(|request| request.reads.len() as u32).sum(),
        }
    }

    /// Sum of the weights of all blocks, in blocks.
    pub(crate) fn weighted_blocks(&self) -> f64 {
        let output = self.requests.values().flat_map(|request| &request.output);
        self.weights.values().chain(output).map(|weight| weight.fraction()).sum()
    }

    fn blocks(&self, booking: BookingId, prompt: &PromptBlocks) -> Vec<ReferenceBlock> {
        match prompt {
            PromptBlocks::Hashed(hashes) if self.assume_kv_reuse => {
                hashes.iter().copied().map(ReferenceBlock::Shared).collect()
            }
            PromptBlocks::Hashed(_) | PromptBlocks::Counted(_) | PromptBlocks::Several { .. } => {
                (0..prompt.block_count()).map(|n| ReferenceBlock::Private(booking, n)).collect()
            }
        }
    }

    /// From the end of the prompt upward, the blocks on which only the following block or the booking itself depends.
    fn exclusive_suffix(&self, booking: BookingId) -> Vec<ReferenceBlock> {
        let exclusive = |block: &&ReferenceBlock| {
            let prompts = self.requests.values().map(|request| &request.prompt);
            let owners = prompts.clone().filter(|prompt| prompt.last() == Some(block)).count();
            let next =
                |prompt: &Vec<ReferenceBlock>| prompt.windows(2).find(|pair| pair[0] == **block).map(|pair| pair[1]);
            let children: BTreeSet<ReferenceBlock> = prompts.filter_map(next).collect();
            owners + children.len() == 1
        };
        self.requests[&booking].prompt.iter().rev().take_while(exclusive).copied().collect()
    }

    fn is_overdue(&self) -> bool {
        self.requests.values().any(|request| request.prefill.is_some_and(|prefill| prefill.is_overdue))
    }

    /// Advances, and checks for overdue prefills, which stop the progress of the others.
    fn change(&mut self, now: Timestamp) {
        self.advance(now);
        if self.is_overdue() {
            return;
        }
        let now = u128::from(self.now.0);
        let mut line: Vec<&mut ReferenceRequest> = self.requests.values_mut().collect();
        line.sort_by_key(|request| request.arrival);
        let mut prefills: Vec<&mut ReferencePrefill> =
            line.into_iter().filter_map(|request| request.prefill.as_mut()).collect();
        let oldest = prefills.iter().find(|prefill| prefill.done && prefill.is_reported);
        let is_overdue = oldest.is_some_and(|oldest| {
            let due = oldest.ended + (oldest.ended - oldest.booked) * u128::from(OVERDUE_FACTOR);
            due + OVERDUE_SLACK.as_nanos() <= now
        });
        if is_overdue && self.reports >= REPORTS_MIN {
            for prefill in &mut prefills {
                if prefill.done {
                    prefill.is_overdue = prefill.is_reported;
                } else {
                    (prefill.tokens, prefill.nanos, prefill.spent) = (prefill.left(), None, 0);
                }
            }
        }
    }

    /// Credits the elapsed time to the prefills in order of arrival.
    fn advance(&mut self, now: Timestamp) {
        let mut time = u128::from(now.0.saturating_sub(self.now.0));
        let mut clock = u128::from(self.now.0);
        self.now = self.now.max(now);
        let mut line: Vec<&mut ReferenceRequest> = self.requests.values_mut().collect();
        line.sort_by_key(|request| request.arrival);
        for prefill in line.into_iter().filter_map(|request| request.prefill.as_mut()) {
            if prefill.done {
                continue;
            }
            let Some(nanos) = prefill.nanos else { return };
            let share = time.min(nanos - prefill.spent);
            prefill.spent += share;
            time -= share;
            clock += share;
            (prefill.done, prefill.ended) = (prefill.spent == nanos, clock);
            if !prefill.done {
                return;
            }
        }
    }
}

impl ReferencePrefill {
    /// Remaining tokens, including partially computed prefills.
    fn left(self) -> u128 {
        match self.nanos {
            _ if self.done => 0,
            None | Some(0) => self.tokens,
            Some(nanos) => (self.tokens * (nanos - self.spent)).div_ceil(nanos),
        }
    }
}
