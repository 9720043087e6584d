//! What ranks' caches are believed to hold, from the router's own decisions.
//!
//! Owns one shard's beliefs: where engines send no events, all that is known of their caches; beside events, what was
//! routed a moment ago and the engine has not said yet. One structure serves four models ([`Kind`]):
//!
//! - **Time to live.** A prompt counts as cached on the rank it was routed to until so long after it was last routed
//!   there, prefix by prefix: a longer prompt keeps its beginning alive.
//! - **Modelled LRU.** A rank is taken to hold as many blocks as it has. A booking holds its prompt's blocks and private
//!   ones, which nobody matches: what is left over of the prompt, and its output. Released, they stay until room is
//!   needed: the longest released go first, of one prompt the deepest first. What is in use stays, over capacity too.
//! - **Until events.** As by time to live, for ranks that publish no events; of the others nothing is guessed.
//! - **Beside events.** A routed prompt counts as cached until the engine's own events say so (*confirmed*), take back
//!   what they had said of it (*retracted*), or nothing comes in time: then what is missing was a *wrong* guess.
//!
//! Promises that beliefs have no holes: a rank believed to hold a block is believed to hold those before it. That every
//! guessed block is counted once, when the last prompt that needs it goes ([`Counts`]). And that no event, decision or
//! release is an error: those of ranks, generations and bookings that are not known do nothing.
//!
//! Costs per routed prompt its comparison with what is there and steps per run, none per block. An event costs a look
//! at each prediction of its rank, not at others'. Knows no time of its own: what has run out goes when
//! [`Predictions::expire`] is called.
//!
//! Where it loses: a model of an engine is not the engine. The engine's own prefix cache may evict by other rules, and
//! output blocks are never matched, although the next turn of a conversation begins with them.

mod seats;
mod trie;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::config::{ApproximatePolicy, RouterConfig, UseKvEvents};
use crate::hashing::HashedPrompt;
use crate::index::depth::Depths;
use crate::index::{Index, Overlaps};
use crate::protocol::WorkerRank;
use crate::protocol::{BlockHash, BookingId, Generation, KvEvent, RouterEvent, Slot, StorageTier, Timestamp};
use seats::{Seat, Seats};
use trie::{Mark, Tries};

/// How long beliefs last, and what ends them before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A routed prompt counts as cached for so long after it was last routed.
    Ttl {
        /// How long.
        ttl: Duration,
    },
    /// Ranks hold as many blocks as they have, the least recently used going first.
    Lru {
        /// How long a prompt counts as cached on a rank whose capacity is not known.
        fallback_ttl: Duration,
    },
    /// On ranks that publish no events a routed prompt counts as cached for so long after it was last routed. On others
    /// their events alone count.
    UntilEvents {
        /// How long.
        ttl: Duration,
    },
    /// A routed prompt counts as cached until events say so, but not for longer than this.
    BesideEvents {
        /// How long.
        ttl: Duration,
    },
}

impl Kind {
    /// What a configuration asks for; nothing where events or load alone decide.
    ///
    /// ```
    /// use pointsman::RouterConfig;
    /// use pointsman::predict::Kind;
    ///
    /// assert_eq!(Kind::of(&RouterConfig::default()), None);
    /// let config = RouterConfig { use_kv_events: false.into(), ..RouterConfig::default() };
    /// assert!(matches!(Kind::of(&config), Some(Kind::Ttl { .. })));
    /// ```
    #[must_use]
    pub fn of(config: &RouterConfig) -> Option<Self> {
        if !config.has_index() {
            return None;
        }
        let ttl = Duration::from_millis(config.approximate_ttl_ms);
        match (config.use_kv_events, config.approximate_policy) {
            (UseKvEvents::Yes, _) => {
                config.predicted_ttl_ms.map(|ttl_ms| Self::BesideEvents { ttl: Duration::from_millis(ttl_ms) })
            }
            (UseKvEvents::Auto, _) => Some(Self::UntilEvents { ttl }),
            (UseKvEvents::No, ApproximatePolicy::Ttl) => Some(Self::Ttl { ttl }),
            (UseKvEvents::No, ApproximatePolicy::Lru) => Some(Self::Lru { fallback_ttl: ttl }),
        }
    }

    fn ttl(self) -> Duration {
        match self {
            Self::Ttl { ttl }
            | Self::UntilEvents { ttl }
            | Self::BesideEvents { ttl }
            | Self::Lru { fallback_ttl: ttl } => ttl,
        }
    }
}

/// What a routed prompt will leave in its rank's cache.
///
/// ```
/// use std::num::NonZeroU32;
/// use pointsman::hashing::{BlockHasher, HashScheme, HashedPrompt, MmBlocks};
/// use pointsman::predict::Guess;
///
/// let block_size = NonZeroU32::new(4).expect("not zero");
/// let hasher = BlockHasher::new(HashScheme::new(block_size));
/// let prompt = HashedPrompt::from_tokens(&hasher, &[1, 2, 3, 4, 5, 6], &MmBlocks::NONE);
/// let guess = Guess::of(&prompt, block_size.get());
/// assert_eq!((guess.hashes.len(), guess.private_blocks), (1, 1));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guess {
    /// Its complete blocks.
    pub hashes: Arc<[BlockHash]>,
    /// Blocks that it takes beside them, which no other prompt can match.
    pub private_blocks: u32,
}

impl Guess {
    /// The guess for a prompt in blocks of `block_size` tokens: what its hashes do not cover is private.
    #[must_use]
    pub fn of(prompt: &HashedPrompt, block_size: u32) -> Self {
        let blocks = prompt.isl_tokens().div_ceil(block_size.max(1) as usize);
        let private_blocks = blocks.saturating_sub(prompt.block_hashes().len());
        let private_blocks = u32::try_from(private_blocks).unwrap_or(u32::MAX);
        Self { hashes: Arc::clone(prompt.block_hashes()), private_blocks }
    }
}

/// What became of guessed blocks, each counted once per rank. Blocks that the engine had named before are no guesses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Blocks guessed.
    pub guessed: u64,
    /// The engine has said so.
    pub confirmed: u64,
    /// Beside events: the engine has not said so in time.
    pub wrong: u64,
    /// The engine took back what it had said, or the rank was cleared or removed.
    pub retracted: u64,
    /// Gone to make room: in the modelled cache, or under the bound on all predictions.
    pub evicted: u64,
    /// Without events: not routed again in time.
    pub expired: u64,
}

/// A shard's beliefs. See the module's head.
///
/// ```
/// use std::time::Duration;
/// use pointsman::index::{Index, Overlaps};
/// use pointsman::predict::{Guess, Kind, Predictions};
/// use pointsman::protocol::{BlockHash, Generation, Slot, Timestamp, WorkerId, WorkerRank};
///
/// let mut predictions = Predictions::new(Kind::Ttl { ttl: Duration::from_secs(120) }, 1 << 20);
/// predictions.register(WorkerRank::new(WorkerId(7), 0), Slot(0), Generation(1), None);
/// let index = Index::new();
/// let start = Timestamp::default();
/// let guess = Guess { hashes: [1, 2, 3].map(BlockHash).into(), private_blocks: 1 };
/// predictions.routed(Slot(0), Generation(1), None, &guess, &index, start);
///
/// let mut overlaps = Overlaps::default();
/// index.overlaps(&[BlockHash(1), BlockHash(2)], &mut overlaps);
/// predictions.merge_into(&[BlockHash(1), BlockHash(2)], &mut overlaps);
/// assert_eq!(overlaps.hits()[0].device_blocks, 2);
/// predictions.expire(start + Duration::from_secs(120));
/// assert_eq!(predictions.believed_blocks(), 0);
/// ```
#[derive(Debug)]
pub struct Predictions {
    kind: Kind,
    blocks_max: u64,
    seats: Seats,
    tries: Tries,
    depths: Depths,
    /// Marked ends of ranks that age, oldest first.
    aging: BTreeMap<u64, u32>,
    /// Marked ends of ranks that have a capacity, oldest first.
    capped: BTreeMap<u64, u32>,
    /// Bookings that have not been released.
    claims: BTreeMap<BookingId, Claim>,
    /// Marks made so far.
    stamps: u64,
    /// Blocks that marked prompts name, however many they share.
    named: u64,
    /// Distinct pairs of a rank and a block.
    believed: u64,
    counts: Counts,
    /// The latest time heard of: time does not go back.
    now: Timestamp,
}

/// A booking on a rank with a capacity.
#[derive(Clone, Copy, Debug)]
struct Claim {
    slot: Slot,
    end: u32,
    private_blocks: u32,
}

/// Why a prompt goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    Confirmed,
    Expired,
    Retracted,
    Evicted,
}

impl Predictions {
    /// Believes nothing yet. `blocks_max` bounds the blocks that remembered prompts name; the oldest go first.
    #[must_use]
    pub fn new(kind: Kind, blocks_max: u64) -> Self {
        Self {
            kind,
            blocks_max,
            seats: Seats::default(),
            tries: Tries::new(),
            depths: Depths::new(),
            aging: BTreeMap::new(),
            capped: BTreeMap::new(),
            claims: BTreeMap::new(),
            stamps: 0,
            named: 0,
            believed: 0,
            counts: Counts::default(),
            now: Timestamp::default(),
        }
    }

    /// Lets `rank` sit in `slot` from now on, as [`Index::register`] does. Its capacity matters to a modelled LRU only;
    /// another one than before is taken over, and one that was or becomes unknown starts the rank anew.
    pub fn register(&mut self, rank: WorkerRank, slot: Slot, generation: Generation, capacity_blocks: Option<u32>) {
        let capacity = capacity_blocks.filter(|_| matches!(self.kind, Kind::Lru { .. })).map(u64::from);
        if let Some(seat) = self.seats.get_mut(slot) {
            if seat.generation > generation {
                return;
            }
            let stays = (seat.rank, seat.generation) == (rank, generation);
            if stays && seat.capacity.is_some() == capacity.is_some() {
                seat.capacity = capacity;
                return self.evict(slot);
            }
            let occupant = seat.rank;
            self.remove_rank(occupant);
        }
        self.remove_rank(rank);
        let root = self.tries.plant(slot);
        self.seats.insert(slot, Seat::new(rank, generation, capacity, root));
    }

    /// Forgets a rank and what it was believed to hold. Visits every booking.
    pub fn remove_rank(&mut self, rank: WorkerRank) {
        let Some(slot) = self.seats.slot_of(rank) else { return };
        let of_rank = |(_, claim): &(BookingId, Claim)| claim.slot == slot;
        let claims: Vec<_> = self.claims.iter().map(|(id, claim)| (*id, *claim)).filter(of_rank).collect();
        for (booking, _) in claims {
            self.let_go(booking);
        }
        self.forget(slot, Why::Retracted);
        if let Some(seat) = self.seats.remove(slot) {
            self.tries.fell(seat.root);
        }
    }

    /// A prompt was routed to the rank that sits in `slot` in this generation. A booking that is told of is held until
    /// [`Predictions::released`] where the rank has a capacity. Again is harmless.
    ///
    /// `index` is what the engines themselves said: what the rank holds by it needs no guess.
    pub fn routed(
        &mut self,
        slot: Slot,
        generation: Generation,
        booking: Option<BookingId>,
        guess: &Guess,
        index: &Index,
        now: Timestamp,
    ) {
        self.expire(now);
        let Some(seat) = self.seats.get(slot).filter(|seat| seat.generation == generation) else { return };
        if seat.publishes {
            return; // what it says is known
        }
        let (root, is_capped) = (seat.root, seat.capacity.is_some());
        let booking = booking.filter(|_| is_capped);
        if booking.is_some_and(|booking| self.claims.contains_key(&booking)) {
            return;
        }
        let blocks = guess.hashes.len() as u32;
        let real_blocks = match self.kind {
            Kind::BesideEvents { .. } => index.device_depth(slot, &guess.hashes),
            Kind::Ttl { .. } | Kind::UntilEvents { .. } | Kind::Lru { .. } => 0,
        };
        if real_blocks == blocks && booking.is_none() {
            return; // nothing to guess, or nothing at all
        }
        let end = self.enter(slot, root, &guess.hashes, real_blocks);
        if let Some(booking) = booking {
            self.tries.claim(end);
            self.claims.insert(booking, Claim { slot, end, private_blocks: guess.private_blocks });
            self.seats.expect_mut(slot).private_active += u64::from(guess.private_blocks);
        } else {
            let stamp = self.next_stamp();
            self.remember(end, Mark { stamp, at: self.now, real_blocks });
        }
        self.evict(slot);
        self.keep_bound();
    }

    /// A booking has generated so many more blocks. They are private to it.
    pub fn output_blocks(&mut self, booking: BookingId, blocks: u32) {
        let Some(claim) = self.claims.get_mut(&booking) else { return };
        let added = blocks.min(u32::MAX - claim.private_blocks);
        claim.private_blocks += added;
        let slot = claim.slot;
        self.seats.expect_mut(slot).private_active += u64::from(added);
        self.evict(slot);
    }

    /// A booking has ended: what it held may go when room is needed.
    pub fn released(&mut self, booking: BookingId, now: Timestamp) {
        self.expire(now);
        if let Some(slot) = self.let_go(booking) {
            self.evict(slot);
            self.keep_bound();
        }
    }

    /// Whether it matters which ranks publish their events.
    #[must_use]
    pub fn is_until_events(&self) -> bool {
        matches!(self.kind, Kind::UntilEvents { .. })
    }

    /// Says whether a rank publishes its events, for [`Kind::UntilEvents`]: while it does, nothing is speculated about it.
    /// Ranks publish nothing until this is said.
    pub fn set_publishes(&mut self, rank: WorkerRank, publishes: bool) {
        if !self.is_until_events() {
            return;
        }
        let Some(slot) = self.seats.slot_of(rank) else { return };
        let before = std::mem::replace(&mut self.seats.expect_mut(slot).publishes, publishes);
        if publishes && !before {
            self.forget(slot, Why::Retracted);
        }
    }

    /// Takes in what an event made of `index`, to which it was just applied. Beside events only.
    pub fn observe(&mut self, event: &RouterEvent, index: &Index) {
        if !matches!(self.kind, Kind::BesideEvents { .. }) {
            return;
        }
        let Some(slot) = self.seats.slot_of(event.rank) else { return };
        match &event.data {
            KvEvent::Cleared => self.forget(slot, Why::Retracted),
            KvEvent::Stored { .. } | KvEvent::Removed { .. } if event.tier != StorageTier::Device => {}
            KvEvent::Stored { .. } | KvEvent::Removed { .. } => self.compare(slot, index),
        }
    }

    /// Drops what has run out by `now`. A step per prompt that goes.
    pub fn expire(&mut self, now: Timestamp) {
        self.now = self.now.max(now);
        let ttl = self.kind.ttl();
        while let Some((_, &end)) = self.aging.first_key_value() {
            if self.tries.mark(end).is_some_and(|mark| mark.at + ttl > self.now) {
                return;
            }
            self.take(end, u32::MAX, Why::Expired);
        }
    }

    /// Raises each rank's device hit to what it is believed to hold, and adds ranks that only beliefs know: what is
    /// known of a rank is the greater of both. What lower tiers add is counted from there on; beliefs never add to it.
    pub fn merge_into(&self, hashes: &[BlockHash], overlaps: &mut Overlaps) {
        if self.believed > 0 {
            let generation = |slot| self.seats.get(slot).map(|seat| seat.generation).unwrap_or_default();
            self.depths.merge_into(hashes, generation, overlaps);
        }
    }

    /// What became of guesses so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Blocks believed to be held now, each once per rank.
    #[must_use]
    pub fn believed_blocks(&self) -> u64 {
        self.believed
    }

    /// Heap bytes owned, the hashes of remembered prompts included. Visits everything: not for hot paths.
    #[must_use]
    pub fn bytes(&self) -> usize {
        // B-trees' nodes cannot be seen; they are two thirds full or so.
        let marks = (self.aging.len() + self.capped.len()) * size_of::<(u64, u32)>() * 3;
        let claims = self.claims.len() * size_of::<(BookingId, Claim)>() * 3 / 2;
        marks + claims + self.seats.bytes() + self.tries.bytes() + self.depths.bytes()
    }

    /// Checks what the type promises. For tests: visits everything.
    ///
    /// # Panics
    /// When an invariant is broken.
    pub fn check_invariants(&self) {
        self.depths.check_invariants();
        self.tries.check_invariants(self.seats.iter().count());
        let (mut believed, mut marked, mut named) = (0, 0, 0);
        for (slot, seat) in self.seats.iter() {
            assert_eq!(seat.blocks, self.tries.block_count(slot), "a rank's blocks are counted");
            let of_slot = self.claims.values().filter(|claim| claim.slot == slot);
            let private = of_slot.map(|claim| u64::from(claim.private_blocks)).sum::<u64>();
            assert_eq!(seat.private_active, private, "private blocks in use are counted");
            seat.check_invariants();
            believed += seat.blocks;
            for (stamp, &end) in &seat.ends {
                let order = if seat.capacity.is_some() { &self.capped } else { &self.aging };
                assert_eq!(order.get(stamp), Some(&end), "what a rank remembers stands in order");
                assert_eq!(self.tries.mark(end).map(|mark| mark.stamp), Some(*stamp), "and its end is marked");
                assert_eq!(self.tries.slot(end), slot, "on the rank's own trie");
                marked += 1;
                named += u64::from(self.tries.prompt(end).1);
            }
        }
        assert_eq!(marked, self.aging.len() + self.capped.len(), "no order names what no rank remembers");
        assert_eq!((believed, named), (self.believed, self.named), "blocks are counted");
        assert!(self.named <= self.blocks_max, "the bound is kept");
        assert!(self.claims.values().all(|claim| self.seats.get(claim.slot).is_some()), "no booking outlives its rank");
    }

    /// Lets a prompt into a rank's trie. Its end is to be claimed or remembered next.
    fn enter(&mut self, slot: Slot, root: u32, hashes: &Arc<[BlockHash]>, known_blocks: u32) -> u32 {
        let seat = self.seats.expect_mut(slot);
        let order = if seat.capacity.is_some() { &mut self.capped } else { &mut self.aging };
        let named = &mut self.named;
        let entered = self.tries.enter(root, hashes, known_blocks, |mark, depth| {
            order.remove(&mark.stamp);
            seat.ends.remove(&mark.stamp);
            *named -= u64::from(depth);
        });
        let blocks = hashes.len() as u32;
        if entered.shared_blocks < blocks {
            self.depths.raise(slot, hashes);
            let added = u64::from(blocks - entered.shared_blocks);
            seat.blocks += added;
            self.believed += added;
            self.counts.guessed += u64::from(blocks - entered.shared_blocks.max(known_blocks));
        }
        entered.end
    }

    /// Marks the end of a prompt, unless a booking keeps it.
    fn remember(&mut self, end: u32, mark: Mark) {
        if self.tries.is_root(end) || self.tries.is_claimed(end) {
            return; // a prompt without blocks, or one that its booking's release will remember
        }
        let seat = self.seats.expect_mut(self.tries.slot(end));
        let order = if seat.capacity.is_some() { &mut self.capped } else { &mut self.aging };
        order.insert(mark.stamp, end);
        seat.ends.insert(mark.stamp, end);
        self.named += u64::from(self.tries.prompt(end).1);
        let before = self.tries.set_mark(end, Some(mark));
        debug_assert_eq!(before, None, "an end is remembered once");
    }

    /// Takes up to `blocks_max` blocks off the end of a remembered prompt, as far as nothing else needs them, and
    /// forgets it unless there are more to take.
    fn take(&mut self, end: u32, blocks_max: u32, why: Why) {
        let Some(mark) = self.tries.set_mark(end, None) else { return };
        let slot = self.tries.slot(end);
        let (hashes, depth) = self.tries.prompt(end);
        let hashes = Arc::clone(hashes);
        let seat = self.seats.expect_mut(slot);
        let order = if seat.capacity.is_some() { &mut self.capped } else { &mut self.aging };
        order.remove(&mark.stamp);
        seat.ends.remove(&mark.stamp);
        self.named -= u64::from(depth);
        let (mut keep, counts, kind) = (depth, &mut self.counts, self.kind);
        let rest = self.tries.give_up(end, blocks_max, |blocks, guessed| {
            keep = blocks.start;
            if guessed {
                let real = mark.real_blocks.clamp(blocks.start, blocks.end);
                counts.count(kind, why, u64::from(real - blocks.start), u64::from(blocks.end - real));
            }
        });
        if keep < depth {
            self.depths.lower(slot, &hashes[..depth as usize], keep);
            seat.blocks -= u64::from(depth - keep);
            self.believed -= u64::from(depth - keep);
        }
        if let Some(rest) = rest {
            self.remember(rest, mark);
        }
    }

    /// Ends a booking, if there is such a one. Returns where it was.
    fn let_go(&mut self, booking: BookingId) -> Option<Slot> {
        let Claim { slot, end, private_blocks } = self.claims.remove(&booking)?;
        let stamp = self.next_stamp();
        self.seats.expect_mut(slot).release_private(stamp, private_blocks);
        self.tries.unclaim(end);
        self.remember(end, Mark { stamp, at: self.now, real_blocks: 0 });
        Some(slot)
    }

    /// Makes a modelled cache fit its capacity, if something in it is not in use.
    fn evict(&mut self, slot: Slot) {
        while let Some(seat) = self.seats.get_mut(slot) {
            let over = seat.blocks_over_capacity();
            if over == 0 {
                return;
            }
            let over = u32::try_from(over).unwrap_or(u32::MAX);
            let oldest = seat.ends.first_key_value().map(|(stamp, end)| (*stamp, *end));
            // A booking's private blocks lie deeper than its prompt's.
            if seat.evict_private(oldest.map(|(stamp, _)| stamp), over) {
                continue;
            }
            let Some((_, end)) = oldest else { return };
            self.take(end, over, Why::Evicted);
        }
    }

    /// Lets the oldest go until the rest is within the bound.
    fn keep_bound(&mut self) {
        while self.named > self.blocks_max {
            let heads = [self.aging.first_key_value(), self.capped.first_key_value()];
            let Some((_, &end)) = heads.into_iter().flatten().min() else { return };
            self.take(end, u32::MAX, Why::Evicted);
        }
    }

    /// Forgets what a rank is believed to hold, but for what bookings hold.
    fn forget(&mut self, slot: Slot, why: Why) {
        while let Some((_, &end)) = self.seats.get(slot).and_then(|seat| seat.ends.first_key_value()) {
            self.take(end, u32::MAX, why);
        }
    }

    /// Compares each prediction of a rank with what the index holds now.
    fn compare(&mut self, slot: Slot, index: &Index) {
        let ends = self.seats.get(slot).map(|seat| &seat.ends).into_iter().flatten();
        let ends: smallvec::SmallVec<[u32; 16]> = ends.map(|(_, end)| *end).collect();
        for end in ends {
            let (hashes, blocks) = self.tries.prompt(end);
            let real_blocks = index.device_depth(slot, &hashes[..blocks as usize]);
            let Some(mark) = self.tries.mark(end) else { continue };
            if real_blocks == blocks {
                self.take(end, u32::MAX, Why::Confirmed);
            } else if real_blocks < mark.real_blocks {
                self.take(end, u32::MAX, Why::Retracted);
            } else if real_blocks > mark.real_blocks {
                self.tries.set_mark(end, Some(Mark { real_blocks, ..mark }));
            }
        }
    }

    fn next_stamp(&mut self) -> u64 {
        self.stamps += 1;
        self.stamps
    }
}

impl Counts {
    /// Counts guessed blocks that go: those that the engine has named, and the others.
    fn count(&mut self, kind: Kind, why: Why, named: u64, unnamed: u64) {
        match (why, kind) {
            (Why::Expired, Kind::BesideEvents { .. }) => {
                self.confirmed += named;
                self.wrong += unnamed;
            }
            (Why::Expired, Kind::Ttl { .. } | Kind::UntilEvents { .. } | Kind::Lru { .. }) => {
                self.expired += named + unnamed
            }
            (Why::Confirmed, _) => self.confirmed += named + unnamed,
            (Why::Retracted, _) => self.retracted += named + unnamed,
            (Why::Evicted, _) => self.evicted += named + unnamed,
        }
    }
}

#[cfg(test)]
mod tests;
