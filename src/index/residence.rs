//! What one rank holds in one tier, by the engine's names.
//!
//! Owns the rank's spans and the finding of a block by its engine hash. Promises that each name stands for one
//! block, that a block is held exactly while it has a name, and that the name a block has had longest is the
//! one it is reported by. A block of which there are several copies keeps its name until each copy was taken away.
//! Costs about 30 bytes a held block: 8 for its name, the rest for an entry of the table that names are found
//! through, which keeps no keys of its own. Further copies are counted in a table of their own, 16 bytes or so for
//! each block that has any. Leaves the tree to [`super::hold`].

use std::mem::size_of;

use ahash::RandomState;
use hashbrown::HashMap;
use smallvec::SmallVec;

use super::arena::Arena;
use super::span::Span;
use super::table::{Listing, Spot, Table};
use crate::protocol::{EngineHash, StoredBlock};

/// How many names are looked up before the first is acted upon. A lookup is two or three cache misses in a row;
/// lookups that do not wait for each other's outcome overlap theirs.
pub(super) const CHUNK: usize = 16;

/// Further copies that are counted at most, of all blocks together. Bounds what a publisher that stores one block over
/// and over can cost; a copy that is not counted is an [`Applied::duplicates`](super::Applied::duplicates).
pub(super) const COPIES_MAX: u32 = 1 << 16;

/// Up to so many blocks, tables double when they grow.
const SMALL_ROOM: usize = 8_192;

/// What naming a block came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Named {
    /// It had that name.
    Already,
    /// The name is new.
    New,
    /// The name stood for another block, which keeps others.
    Moved,
    /// The name stood for another block, which has none left and must be released.
    MovedFrom(Spot),
}

/// What taking a name away came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// Nothing: the name is not known.
    Unknown,
    /// The block is still held: under another name, or as another copy.
    StillHeld,
    /// That was the block's only name: it must be released.
    LastName(Spot),
}

/// A name that was looked up.
#[derive(Clone, Copy, Debug)]
pub(super) struct Located {
    hash: u64,
    /// Absent for what is not listed, and not looked for where there are aliases.
    listing: Option<Listing>,
    /// Whether there were aliases then.
    aliased: bool,
}

/// One rank's blocks in one tier.
#[derive(Debug)]
pub(super) struct Residence {
    spans: Arena<Span>,
    /// Heap bytes that the spans own.
    owned: usize,
    /// Every held block by its first name, which is read through its span.
    names: Table,
    /// Further names. Engines that give a block two names are rare.
    aliases: Option<Box<Aliases>>,
    /// Present while some block has more than one copy.
    copies: Option<Box<Copies>>,
    hasher: RandomState,
}

/// Further copies of blocks: an engine that does not de-duplicate stores each, and removes each, under one name.
#[derive(Debug)]
struct Copies {
    /// Copies beside the first, by name. Every name is known, no number is zero.
    further: HashMap<EngineHash, u32, RandomState>,
    total: u32,
}

#[derive(Debug)]
struct Aliases {
    spots: HashMap<EngineHash, Spot, RandomState>,
    /// Each block's further names, in the order in which they came.
    names: HashMap<Spot, SmallVec<[EngineHash; 2]>, RandomState>,
    /// Heap bytes of the lists that are too long to be kept in the map.
    spilled: usize,
}

impl Residence {
    pub(super) fn new(hasher: RandomState) -> Self {
        Self { spans: Arena::new(), owned: 0, names: Table::default(), aliases: None, copies: None, hasher }
    }

    /// The block of that name.
    pub(super) fn find(&self, name: EngineHash) -> Option<Spot> {
        let first = self.listing(name, self.hasher.hash_one(name)).and_then(|listing| self.names.get(listing));
        first.or_else(|| self.aliases.as_ref()?.spots.get(&name).copied())
    }

    pub(super) fn span(&self, id: u32) -> &Span {
        &self.spans[id]
    }

    /// A new span on a node's run, with room for `len` blocks.
    pub(super) fn open(&mut self, node: u32, len: usize) -> u32 {
        let span = Span::on(node, len);
        self.owned += span.bytes();
        self.spans.insert(span)
    }

    /// Frees a span that holds nothing any more.
    pub(super) fn close(&mut self, id: u32) {
        debug_assert_eq!(self.spans[id].extent(), 0, "a span with blocks stays");
        self.owned -= self.spans[id].bytes();
        self.spans.remove(id);
    }

    /// Holds as many of `blocks` as are nothing but new blocks with new names, right behind the span's last
    /// block. Returns how many that were. This is what nearly all stores consist of.
    pub(super) fn append(&mut self, span: u32, offset: u32, blocks: &[StoredBlock]) -> usize {
        if self.aliases.is_some() || !self.spans[span].ends_at(offset) {
            return 0;
        }
        self.make_room(blocks.len());
        // The names are in place before they are listed: any of them may be asked for by a later one.
        self.change(span, |span| span.extend(blocks.iter().map(|block| block.engine_hash)));
        let mut listed = 0;
        'listing: for chunk in blocks.chunks(CHUNK) {
            let hashes = self.hashes(chunk.iter().map(|block| block.engine_hash));
            for (block, hash) in chunk.iter().zip(hashes) {
                let spot = Spot { span, offset: offset + listed };
                let is_it = |other| name_of(&self.spans, other) == block.engine_hash;
                if !self.names.insert_new(hash, spot, is_it) {
                    break 'listing;
                }
                listed += 1;
            }
        }
        self.spans[span].keep(offset + listed);
        listed as usize
    }

    /// Gives the block at `spot` a name, and holds it if it was not held. The name leaves whatever block had it.
    pub(super) fn name(&mut self, spot: Spot, name: EngineHash) -> Named {
        let before = self.find(name);
        if before == Some(spot) {
            return Named::Already;
        }
        self.make_room(1);
        let taken = if before.is_some() { self.take_all(name) } else { Taken::Unknown };
        if self.spans[spot.span].holds(spot.offset) {
            self.add_alias(spot, name);
        } else {
            self.change(spot.span, |span| span.hold(spot.offset, name));
            self.list(spot);
        }
        match taken {
            Taken::Unknown => Named::New,
            Taken::StillHeld => Named::Moved,
            Taken::LastName(from) => Named::MovedFrom(from),
        }
    }

    /// Looks up to [`CHUNK`] names up, to be handed to [`Residence::take_located`].
    pub(super) fn locate(&self, names: &[EngineHash]) -> [Located; CHUNK] {
        let aliased = self.aliases.is_some();
        let mut located = self.hashes(names.iter().copied()).map(|hash| Located { hash, listing: None, aliased });
        if !aliased {
            for (located, &name) in located.iter_mut().zip(names) {
                located.listing = self.listing(name, located.hash);
            }
        }
        located
    }

    /// Counts another copy of the block of that name, which must be known, unless there are too many.
    pub(super) fn add_copy(&mut self, name: EngineHash) -> bool {
        debug_assert!(self.find(name).is_some(), "a copy is of a block that is held");
        let hasher = &self.hasher;
        let copies = self
            .copies
            .get_or_insert_with(|| Box::new(Copies { further: HashMap::with_hasher(hasher.clone()), total: 0 }));
        if copies.total == COPIES_MAX {
            return false;
        }
        copies.total += 1;
        *copies.further.entry(name).or_default() += 1;
        true
    }

    /// Forgets the further copies of the block of that name: the next removal is of the last one.
    pub(super) fn drop_copies(&mut self, name: EngineHash) {
        let Some(copies) = &mut self.copies else { return };
        copies.total -= copies.further.remove(&name).unwrap_or_default();
        self.settle_copies();
    }

    /// Takes one of several copies away, if there are several.
    fn take_copy(&mut self, name: EngineHash) -> bool {
        let Some(copies) = &mut self.copies else { return false };
        let Some(further) = copies.further.get_mut(&name) else { return false };
        (*further, copies.total) = (*further - 1, copies.total - 1);
        if *further == 0 {
            copies.further.remove(&name);
            self.settle_copies();
        }
        true
    }

    /// Gives back memory that few copies do not need.
    fn settle_copies(&mut self) {
        let Some(copies) = &mut self.copies else { return };
        if copies.total == 0 {
            self.copies = None;
        } else if copies.further.len() < copies.further.capacity() / 4 {
            copies.further.shrink_to(copies.further.len() * 2);
        }
    }

    /// Takes a name away, or one copy of its block. The block of its last name counts as held until it is released.
    pub(super) fn take(&mut self, name: EngineHash) -> Taken {
        if self.take_copy(name) { Taken::StillHeld } else { self.take_last(name) }
    }

    /// Takes a name away with all copies of its block.
    fn take_all(&mut self, name: EngineHash) -> Taken {
        self.drop_copies(name);
        self.take_last(name)
    }

    fn take_last(&mut self, name: EngineHash) -> Taken {
        let hash = self.hasher.hash_one(name);
        match self.listing(name, hash).and_then(|listing| Some((listing, self.names.get(listing)?))) {
            Some((listing, spot)) => self.strike(spot, listing, hash),
            None if self.remove_alias(name) => Taken::StillHeld,
            None => Taken::Unknown,
        }
    }

    /// [`Residence::take`], for a name that was looked up before other names were taken.
    pub(super) fn take_located(&mut self, name: EngineHash, located: &Located) -> Taken {
        let Located { hash, listing, aliased } = *located;
        if aliased {
            return self.take(name); // an alias may have taken the place of the name before it
        }
        if self.take_copy(name) {
            return Taken::StillHeld;
        }
        match listing.and_then(|listing| Some((listing, self.names.get(listing)?))) {
            Some((listing, spot)) => self.strike(spot, listing, hash),
            None => Taken::Unknown, // or it came twice, and was taken
        }
    }

    /// Strikes the block at `spot` off, where it is listed by a name with that hash.
    fn strike(&mut self, spot: Spot, listing: Listing, hash: u64) -> Taken {
        self.names.remove(listing, hash);
        let Some(heir) = self.first_alias(spot) else { return Taken::LastName(spot) };
        self.remove_alias(heir);
        self.spans[spot.span].rename(spot.offset, heir);
        self.list(spot);
        Taken::StillHeld
    }

    /// Gives up a block whose last name was taken.
    pub(super) fn release(&mut self, spot: Spot) {
        self.owned += self.spans[spot.span].release(spot.offset);
    }

    /// Gives back memory that what is left of a span does not need.
    pub(super) fn settle_span(&mut self, id: u32) {
        self.change(id, Span::settle);
    }

    /// Gives back memory that few names do not need.
    pub(super) fn settle(&mut self) {
        if self.names.room() > 64 && self.names.len() < self.names.room() / 4 {
            self.rebuild(self.names.len() * 2);
        }
    }

    /// Number of blocks held.
    pub(super) fn held_blocks(&self) -> usize {
        self.names.len()
    }

    /// Number of names and further copies: of removals until nothing is held.
    pub(super) fn removable(&self) -> usize {
        let aliases = self.aliases.as_ref().map_or(0, |aliases| aliases.spots.len());
        self.names.len() + aliases + self.copies.as_ref().map_or(0, |copies| copies.total as usize)
    }

    /// Every name with further copies of its block and how many these are, in the order of blocks.
    pub(super) fn copied(&self) -> Vec<(Spot, EngineHash, u32)> {
        let Some(copies) = &self.copies else { return Vec::new() };
        let spot = |name| self.find(name).expect("a copy is of a block that is held");
        let mut copied: Vec<_> = copies.further.iter().map(|(name, further)| (spot(*name), *name, *further)).collect();
        copied.sort_unstable_by_key(|(spot, name, _)| (spot.span, spot.offset, *name));
        copied
    }

    /// Every span with its number.
    pub(super) fn spans(&self) -> impl Iterator<Item = (u32, &Span)> {
        self.spans.iter().filter(|(_, span)| span.extent() > 0)
    }

    /// Every block with further names, in order.
    pub(super) fn aliased(&self) -> Vec<(Spot, &[EngineHash])> {
        let Some(aliases) = &self.aliases else { return Vec::new() };
        let mut aliased: Vec<_> = aliases.names.iter().map(|(spot, names)| (*spot, names.as_slice())).collect();
        aliased.sort_unstable_by_key(|(spot, _)| (spot.span, spot.offset));
        aliased
    }

    /// Heap bytes owned, as counted whenever they changed.
    pub(super) fn bytes(&self) -> usize {
        let aliases = self.aliases.as_ref().map_or(0, |aliases| aliases.bytes());
        self.spans.bytes() + self.owned + self.names.bytes() + aliases + self.copies_bytes()
    }

    fn copies_bytes(&self) -> usize {
        self.copies.as_ref().map_or(0, |copies| size_of::<Copies>() + copies.further.allocation_size())
    }

    /// Heap bytes owned, looked up in every span.
    pub(super) fn bytes_visited(&self) -> usize {
        let spans = self.spans.iter().map(|(_, span)| span.bytes()).sum::<usize>();
        let aliases = self.aliases.as_ref().map_or(0, |aliases| {
            let spilled = aliases.names.values().map(spilled).sum::<usize>();
            aliases.bytes() - aliases.spilled + spilled
        });
        self.spans.bytes() + spans + self.names.bytes() + aliases + self.copies_bytes()
    }

    /// Heap bytes that `more` blocks on a new span add beside their names: none while there is a place for them.
    pub(super) fn growth(&self, more: usize) -> usize {
        let needed = self.names.len() + more;
        let room = if needed > self.names.room() { self.room_for(needed) } else { 0 };
        self.spans.growth() + Table::bytes_of(room).saturating_sub(self.names.bytes())
    }

    /// Gives back what is left of the table and of the storage of spans after many blocks were given up, if that is
    /// much. Tells `moved` of each span that has another number now.
    pub(super) fn fit(&mut self, mut moved: impl FnMut(&Span, u32)) {
        let len = self.names.len();
        let mut stale = self.names.room() > len + len / 8 + 64;
        // Aliases are listed by span.
        if self.aliases.is_none() && self.spans.vacant() > self.spans.len() / 4 + 16 {
            let mut renumbered = Vec::new();
            self.spans.compact(|_, new| renumbered.push(new));
            for id in renumbered {
                moved(&self.spans[id], id);
                stale = true;
            }
        }
        if stale {
            self.rebuild(len + len / 16);
        }
    }

    /// Says that a span's run has another number now.
    pub(super) fn renumber(&mut self, mut new: impl FnMut(u32) -> u32) {
        for span in self.spans.iter_mut().filter(|span| span.extent() > 0) {
            span.node = new(span.node);
        }
    }

    /// The names of a block, the one it has had longest first; none of a block that is not held.
    pub(super) fn names_of(&self, spot: Spot) -> impl Iterator<Item = EngineHash> {
        let span = &self.spans[spot.span];
        let first = span.holds(spot.offset).then(|| span.name(spot.offset));
        let others = self.aliases.as_ref().and_then(|aliases| aliases.names.get(&spot)).filter(|_| first.is_some());
        first.into_iter().chain(others.into_iter().flatten().copied())
    }

    /// Makes the table large enough for `more` blocks. All blocks held must be listed now.
    fn make_room(&mut self, more: usize) {
        let needed = self.names.len() + more;
        if needed > self.names.room() {
            self.rebuild(self.room_for(needed));
        }
    }

    /// How many blocks a table is built for that is too small for `needed`. Building lists every block once more: twice
    /// for each new one where tables grow by half, four times where by a quarter. Small ones double, for they are small.
    fn room_for(&self, needed: usize) -> usize {
        let room = self.names.room();
        needed.max(room + room.min(SMALL_ROOM.max(room / 2)))
    }

    /// Changes a span and counts what it owns.
    fn change(&mut self, id: u32, change: impl FnOnce(&mut Span)) {
        let span = &mut self.spans[id];
        let before = span.bytes();
        change(span);
        self.owned = self.owned + span.bytes() - before;
    }

    /// Builds the table anew, with room for `len` blocks. Reads names span by span, not at random.
    fn rebuild(&mut self, len: usize) {
        let mut names = Table::with_room(len);
        for (span, held) in self.spans() {
            for stretch in held.stretches() {
                for (offset, name) in (stretch.start..).zip(held.names(stretch)) {
                    names.insert(self.hasher.hash_one(*name), Spot { span, offset });
                }
            }
        }
        debug_assert_eq!(names.len(), self.names.len(), "all blocks held were listed");
        self.names = names;
    }

    /// Every block held, with its first name.
    fn blocks(&self) -> impl Iterator<Item = (Spot, EngineHash)> {
        self.spans().flat_map(|(id, span)| {
            let offsets = span.stretches().flat_map(|stretch| stretch.start..stretch.end);
            offsets.map(move |offset| (Spot { span: id, offset }, span.name(offset)))
        })
    }

    fn list(&mut self, spot: Spot) {
        let hash = self.hasher.hash_one(name_of(&self.spans, spot));
        self.names.insert(hash, spot);
    }

    /// The hashes of up to [`CHUNK`] names, and what the table says of them on its way here.
    fn hashes(&self, names: impl Iterator<Item = EngineHash>) -> [u64; CHUNK] {
        let mut hashes = [0; CHUNK];
        for (hash, name) in hashes.iter_mut().zip(names) {
            *hash = self.hasher.hash_one(name);
            self.names.fetch(*hash);
        }
        hashes
    }

    /// Where the table lists a name with that hash.
    fn listing(&self, name: EngineHash, hash: u64) -> Option<Listing> {
        self.names.find(hash, |spot| name_of(&self.spans, spot) == name)
    }

    fn first_alias(&self, spot: Spot) -> Option<EngineHash> {
        self.aliases.as_ref()?.names.get(&spot)?.first().copied()
    }

    fn add_alias(&mut self, spot: Spot, name: EngineHash) {
        let hasher = &self.hasher;
        let aliases = self.aliases.get_or_insert_with(|| {
            let (spots, names) = (HashMap::with_hasher(hasher.clone()), HashMap::with_hasher(hasher.clone()));
            Box::new(Aliases { spots, names, spilled: 0 })
        });
        aliases.spots.insert(name, spot);
        let names = aliases.names.entry(spot).or_default();
        let before = spilled(names);
        names.push(name);
        aliases.spilled += spilled(names) - before;
    }

    /// Whether there was such an alias.
    fn remove_alias(&mut self, name: EngineHash) -> bool {
        let Some(aliases) = &mut self.aliases else { return false };
        let Some(spot) = aliases.spots.remove(&name) else { return false };
        let names = aliases.names.get_mut(&spot).expect("an alias is listed with its block");
        names.retain(|other| *other != name);
        if names.is_empty() {
            aliases.spilled -= spilled(names);
            aliases.names.remove(&spot);
        }
        if aliases.spots.is_empty() {
            self.aliases = None;
        }
        true
    }

    /// Checks what the type promises.
    pub(super) fn check_invariants(&self) {
        self.spans().for_each(|(_, span)| span.check_invariants());
        self.names.check_invariants(self.blocks().map(|(spot, name)| (self.hasher.hash_one(name), spot)));
        assert!(self.blocks().all(|(spot, name)| self.find(name) == Some(spot)), "a block is found by its name");
        assert_eq!(self.spans().count(), self.spans.len(), "no span is empty");
        assert_eq!(self.bytes(), self.bytes_visited(), "no byte is missed");
        if let Some(copies) = &self.copies {
            assert!(copies.further.iter().all(|(name, further)| *further > 0 && self.find(*name).is_some()));
            assert_eq!(copies.further.values().sum::<u32>(), copies.total, "no copy is missed");
            assert!(copies.total > 0 && copies.total <= COPIES_MAX, "no room is kept for copies where there are none");
        }
        let Some(aliases) = &self.aliases else { return };
        assert!(!aliases.spots.is_empty(), "no room is kept for aliases where there are none");
        let listed = aliases.names.iter().all(|(spot, names)| {
            let held = self.spans[spot.span].holds(spot.offset);
            held && !names.is_empty() && names.iter().all(|name| self.find(*name) == Some(*spot))
        });
        assert!(listed, "every alias leads to its held block");
        assert_eq!(aliases.names.values().map(|names| names.len()).sum::<usize>(), aliases.spots.len());
    }
}

impl Aliases {
    fn bytes(&self) -> usize {
        size_of::<Self>() + self.spots.allocation_size() + self.names.allocation_size() + self.spilled
    }
}

fn spilled(names: &SmallVec<[EngineHash; 2]>) -> usize {
    if names.spilled() { names.capacity() * size_of::<EngineHash>() } else { 0 }
}

fn name_of(spans: &Arena<Span>, spot: Spot) -> EngineHash {
    spans[spot.span].name(spot.offset)
}
