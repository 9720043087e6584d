//! Blocks of one rank in one tier, addressed by engine hash (name).
//!
//! Owns the rank's spans and the lookup of a block by name. Each name refers to one block, a block is held exactly
//! while it has a name, and its oldest name is the one in query results. A block with several copies keeps its name
//! until every copy is removed. Cost: about 30 bytes per held block, 8 for the name and the rest for an entry of the
//! lookup table, which stores no keys. Further copies are counted in a separate table at about 16 bytes per block with
//! copies. [`super::hold`] updates the tree.

use std::mem::size_of;

use ahash::RandomState;

use super::aliases::Aliases;
use super::arena::Arena;
use super::copies::Copies;
use super::digest::{finalize, offset};
use super::span::Span;
use super::steps;
use super::table::{Listing, Spot, Table};
use crate::protocol::{EngineHash, StorageTier, StoredBlock};

/// Number of names that are looked up before the first is processed. A lookup has two or three dependent cache misses;
/// independent lookups overlap theirs.
pub(super) const CHUNK: usize = 16;

/// Number of blocks up to which tables double when they grow.
const SMALL_ROOM: usize = 8_192;

/// Result of naming a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Named {
    /// The block already had that name.
    Already,
    /// The name is new.
    New,
    /// The name referred to another block, which has other names left.
    Moved,
    /// The name referred to another block, which has no name left and must be released.
    MovedFrom(Spot),
}

/// Result of removing a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// The name is unknown.
    Unknown,
    /// The block is still held, under another name or as another copy.
    StillHeld,
    /// The block has no name left and must be released.
    LastName(Spot),
}

/// Result of a name lookup.
#[derive(Clone, Copy, Debug)]
pub(super) struct Located {
    hash: u64,
    /// `None` for a name that is not listed, or if the lookup was skipped because aliases exist.
    listing: Option<Listing>,
    /// Whether aliases existed at the time of the lookup.
    aliased: bool,
}

/// Blocks of one rank in one tier.
#[derive(Debug)]
pub(super) struct Residence {
    spans: Arena<Span>,
    /// Heap bytes owned by the spans.
    owned: usize,
    /// Every held block by its first name. The name itself is stored in the span.
    names: Table,
    /// Further names. Few engines give a block two names.
    aliases: Option<Box<Aliases>>,
    /// Present since the first further copy.
    copies: Option<Box<Copies>>,
    /// Whether no block was ever released.
    is_unremoved: bool,
    hasher: RandomState,
    /// Sum of the values of all names, and the offset of the tier: see [`super::BlockDigest`].
    digest: u64,
    digest_offset: u64,
}

impl Residence {
    pub(super) fn new(tier: StorageTier, hasher: RandomState) -> Self {
        Self {
            spans: Arena::new(),
            owned: 0,
            names: Table::default(),
            aliases: None,
            copies: None,
            is_unremoved: true,
            hasher,
            digest: 0,
            digest_offset: offset(tier),
        }
    }

    /// The block with that name.
    pub(super) fn find(&self, name: EngineHash) -> Option<Spot> {
        let first = self.listing(name, self.hasher.hash_one(name)).and_then(|listing| self.names.get(listing));
        first.or_else(|| self.aliases.as_ref()?.spot(name))
    }

    pub(super) fn span(&self, id: u32) -> &Span {
        &self.spans[id]
    }

    /// Creates a span on a node's run, with room for `len` blocks.
    pub(super) fn open(&mut self, node: u32, len: usize) -> u32 {
        let span = Span::on(node, len);
        self.owned += span.bytes();
        self.spans.insert(span)
    }

    /// Frees an empty span.
    pub(super) fn close(&mut self, id: u32) {
        debug_assert_eq!(self.spans[id].extent(), 0, "only an empty span is freed");
        self.owned -= self.spans[id].bytes();
        self.spans.remove(id);
    }

    /// Fast path of a store, which covers nearly all stores: appends leading `blocks` that are new and have new names,
    /// directly behind the span's last block. Returns the number of appended blocks.
    pub(super) fn append(&mut self, span: u32, offset: u32, blocks: &[StoredBlock]) -> usize {
        if self.aliases.is_some() || !self.spans[span].ends_at(offset) {
            return 0;
        }
        self.make_room(blocks.len());
        // The span contains the names before the table lists them, because a later name of the list can be compared
        // with an earlier one.
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
        let values = blocks[..listed as usize].iter().map(|block| self.digest_value(block.engine_hash));
        self.digest = values.fold(self.digest, u64::wrapping_add);
        listed as usize
    }

    /// Names the block at `spot`, and holds it if it was not held. Removes the name from its previous block.
    pub(super) fn name(&mut self, spot: Spot, name: EngineHash) -> Named {
        let before = self.find(name);
        if before == Some(spot) {
            self.copies.iter_mut().for_each(|copies| copies.announce(name));
            return Named::Already;
        }
        self.make_room(1);
        let taken = if before.is_some() { self.take_all(name) } else { Taken::Unknown };
        self.digest = self.digest.wrapping_add(self.digest_value(name));
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

    /// Looks up to [`CHUNK`] names up, for [`Residence::take_located`].
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

    /// Counts another copy of the block with that name, which must be known. Returns false at the limit of copies.
    pub(super) fn add_copy(&mut self, name: EngineHash) -> bool {
        debug_assert!(self.find(name).is_some(), "only held blocks have copies");
        let hasher = &self.hasher;
        self.copies.get_or_insert_with(|| Box::new(Copies::new(hasher))).add(name)
    }

    pub(super) fn copies_mut(&mut self) -> Option<&mut Copies> {
        self.copies.as_deref_mut()
    }

    /// Whether the block with that name has further copies.
    pub(super) fn has_copies(&self, name: EngineHash) -> bool {
        self.copies.as_ref().is_some_and(|copies| copies.contains(name))
    }

    /// Drops the further copies of the block with that name; the next removal removes the last copy.
    pub(super) fn drop_copies(&mut self, name: EngineHash) {
        self.copies.iter_mut().for_each(|copies| copies.forget(name));
    }

    /// Removes one further copy, if there is any.
    fn take_copy(&mut self, name: EngineHash) -> bool {
        self.copies.as_mut().is_some_and(|copies| copies.take(name))
    }

    /// Removes a name, or one copy of its block. A block without a name counts as held until it is released.
    pub(super) fn take(&mut self, name: EngineHash) -> Taken {
        if self.take_copy(name) { Taken::StillHeld } else { self.take_last(name) }
    }

    /// Removes a name with all copies of its block.
    fn take_all(&mut self, name: EngineHash) -> Taken {
        self.drop_copies(name);
        self.take_last(name)
    }

    fn take_last(&mut self, name: EngineHash) -> Taken {
        let hash = self.hasher.hash_one(name);
        match self.listing(name, hash).and_then(|listing| Some((listing, self.names.get(listing)?))) {
            Some((listing, spot)) => self.strike(name, spot, listing, hash),
            None if self.remove_alias(name) => {
                self.digest = self.digest.wrapping_sub(self.digest_value(name));
                Taken::StillHeld
            }
            None => Taken::Unknown,
        }
    }

    /// [`Residence::take`] for a name that was looked up before other names were removed.
    pub(super) fn take_located(&mut self, name: EngineHash, located: &Located) -> Taken {
        let Located { hash, listing, aliased } = *located;
        if aliased {
            return self.take(name); // an alias may have become the first name of the block
        }
        if self.take_copy(name) {
            return Taken::StillHeld;
        }
        match listing.and_then(|listing| Some((listing, self.names.get(listing)?))) {
            Some((listing, spot)) => self.strike(name, spot, listing, hash),
            None => Taken::Unknown, // unknown, or listed twice in the event and already removed
        }
    }

    /// Removes the table entry of the block at `spot`, which has this first name. Its oldest alias becomes its first
    /// name.
    fn strike(&mut self, name: EngineHash, spot: Spot, listing: Listing, hash: u64) -> Taken {
        self.digest = self.digest.wrapping_sub(self.digest_value(name));
        self.names.remove(listing, hash);
        let Some(heir) = self.first_alias(spot) else { return Taken::LastName(spot) };
        self.remove_alias(heir);
        self.spans[spot.span].rename(spot.offset, heir);
        self.list(spot);
        Taken::StillHeld
    }

    /// Whether no block was ever released.
    pub(super) fn is_unremoved(&self) -> bool {
        self.is_unremoved
    }

    /// Releases a block without a name.
    pub(super) fn release(&mut self, spot: Spot) {
        self.is_unremoved = false;
        self.owned += self.spans[spot.span].release(spot.offset);
    }

    /// Shrinks the name table.
    pub(super) fn shrink(&mut self) {
        if self.names.room() > 64 && self.names.len() < self.names.room() / 4 {
            self.rebuild(self.names.len() * 2);
        }
    }

    /// Number of held blocks.
    pub(super) fn held_blocks(&self) -> usize {
        self.names.len()
    }

    /// Sum over all names: see [`super::BlockDigest`].
    pub(super) fn digest(&self) -> u64 {
        self.digest
    }

    #[inline]
    fn digest_value(&self, name: EngineHash) -> u64 {
        finalize(name.0.wrapping_add(self.digest_offset))
    }

    /// Number of names.
    pub(super) fn names_count(&self) -> usize {
        self.names.len() + self.aliases.as_ref().map_or(0, |aliases| aliases.len())
    }

    /// All names, in any order.
    pub(super) fn names(&self) -> impl Iterator<Item = EngineHash> {
        let aliases = self.aliases.iter().flat_map(|aliases| aliases.names());
        self.blocks().map(|(_, name)| name).chain(aliases)
    }

    /// Number of names and further copies, which is the number of removals until the residence is empty.
    pub(super) fn removable(&self) -> usize {
        self.names_count() + self.copies.as_ref().map_or(0, |copies| copies.total as usize)
    }

    pub(super) fn copies(&self) -> Option<&Copies> {
        self.copies.as_deref()
    }

    /// Every span with its number.
    pub(super) fn spans(&self) -> impl Iterator<Item = (u32, &Span)> {
        self.spans.iter().filter(|(_, span)| span.extent() > 0)
    }

    /// Every block with further names, ordered by block.
    pub(super) fn aliased(&self) -> Vec<(Spot, Vec<EngineHash>)> {
        let Some(aliases) = &self.aliases else { return Vec::new() };
        aliases.spots().into_iter().map(|spot| (spot, aliases.of(spot).collect())).collect()
    }

    /// Heap bytes owned, from running totals.
    pub(super) fn bytes(&self) -> usize {
        let aliases = self.aliases.as_ref().map_or(0, |aliases| aliases.bytes());
        self.spans.bytes() + self.owned + self.names.bytes() + aliases + self.copies_bytes()
    }

    fn copies_bytes(&self) -> usize {
        self.copies.as_ref().map_or(0, |copies| size_of::<Copies>() + copies.bytes())
    }

    /// Heap bytes owned, summed over every span.
    pub(super) fn bytes_visited(&self) -> usize {
        let spans = self.spans.iter().map(|(_, span)| span.bytes()).sum::<usize>();
        let aliases = self.aliases.as_ref().map_or(0, |aliases| aliases.bytes());
        self.spans.bytes() + spans + self.names.bytes() + aliases + self.copies_bytes()
    }

    /// Heap bytes that `more` blocks on a new span add beyond their names: zero if the table and the arena have room.
    pub(super) fn growth(&self, more: usize) -> usize {
        let needed = self.names.len() + more;
        let room = if needed > self.names.room() { self.room_for(needed) } else { 0 };
        self.spans.growth() + Table::bytes_of(room).saturating_sub(self.names.bytes())
    }

    /// Shrinks the table and the span storage after many removals. Calls `moved` with each span that has a new number.
    pub(super) fn fit(&mut self, mut moved: impl FnMut(&Span, u32)) {
        let len = self.names.len();
        let mut stale = self.names.room() > len + len / 8 + 64;
        // Aliases refer to spans by number, so spans cannot be renumbered while aliases exist.
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

    /// Updates the node numbers of all spans.
    pub(super) fn renumber(&mut self, mut new: impl FnMut(u32) -> u32) {
        for span in self.spans.iter_mut().filter(|span| span.extent() > 0) {
            span.node = new(span.node);
        }
    }

    /// The names of a block, oldest first; empty if the block is not held.
    pub(super) fn names_of(&self, spot: Spot) -> impl Iterator<Item = EngineHash> {
        let span = &self.spans[spot.span];
        let first = span.holds(spot.offset).then(|| span.name(spot.offset));
        let others = self.aliases.as_ref().filter(|_| first.is_some());
        first.into_iter().chain(others.into_iter().flat_map(move |aliases| aliases.of(spot)))
    }

    /// Makes the table large enough for `more` blocks. All held blocks must be listed at this point.
    fn make_room(&mut self, more: usize) {
        let needed = self.names.len() + more;
        if needed > self.names.room() {
            self.rebuild(self.room_for(needed));
        }
    }

    /// New table size if it is too small for `needed` blocks. A rebuild lists every block again: two more insertions
    /// per block if tables grow by half, four if by a quarter. Small tables double.
    fn room_for(&self, needed: usize) -> usize {
        let room = self.names.room();
        needed.max(room + room.min(SMALL_ROOM.max(room / 2)))
    }

    /// Changes a span and updates the byte count.
    pub(super) fn change(&mut self, id: u32, change: impl FnOnce(&mut Span)) {
        let span = &mut self.spans[id];
        let before = span.bytes();
        change(span);
        self.owned = self.owned + span.bytes() - before;
    }

    /// Rebuilds the table with room for `len` blocks. Reads names span by span, for sequential memory access, unless
    /// most spans are vacant.
    fn rebuild(&mut self, len: usize) {
        let mut names = Table::with_room(len);
        steps::add(self.names.room() + self.spans.vacant().min(self.spans.len()));
        if self.spans.vacant() > self.spans.len() {
            for spot in self.names.spots() {
                names.insert(self.hasher.hash_one(name_of(&self.spans, spot)), spot);
            }
            self.names = names;
            return;
        }
        for (span, held) in self.spans() {
            for stretch in held.stretches() {
                for (offset, name) in (stretch.start..).zip(held.names(stretch)) {
                    names.insert(self.hasher.hash_one(*name), Spot { span, offset });
                }
            }
        }
        debug_assert_eq!(names.len(), self.names.len(), "all held blocks were listed");
        self.names = names;
    }

    /// Every held block with its first name.
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

    /// Hashes of up to [`CHUNK`] names. Prefetches their lines of the table.
    fn hashes(&self, names: impl Iterator<Item = EngineHash>) -> [u64; CHUNK] {
        let mut hashes = [0; CHUNK];
        for (hash, name) in hashes.iter_mut().zip(names) {
            *hash = self.hasher.hash_one(name);
            self.names.fetch(*hash);
        }
        hashes
    }

    /// Position of a name in the table.
    fn listing(&self, name: EngineHash, hash: u64) -> Option<Listing> {
        self.names.find(hash, |spot| name_of(&self.spans, spot) == name)
    }

    fn first_alias(&self, spot: Spot) -> Option<EngineHash> {
        self.aliases.as_ref()?.oldest(spot)
    }

    fn add_alias(&mut self, spot: Spot, name: EngineHash) {
        let hasher = &self.hasher;
        self.aliases.get_or_insert_with(|| Box::new(Aliases::new(hasher))).add(spot, name);
    }

    /// Returns whether the alias existed.
    fn remove_alias(&mut self, name: EngineHash) -> bool {
        let Some(aliases) = &mut self.aliases else { return false };
        let existed = aliases.remove(name);
        if aliases.len() == 0 {
            self.aliases = None;
        }
        existed
    }

    /// Checks the invariants of the type.
    pub(super) fn check_invariants(&self) {
        self.spans().for_each(|(_, span)| span.check_invariants());
        self.names.check_invariants(self.blocks().map(|(spot, name)| (self.hasher.hash_one(name), spot)));
        assert!(self.blocks().all(|(spot, name)| self.find(name) == Some(spot)), "a block is found by its name");
        assert_eq!(self.spans().count(), self.spans.len(), "no span is empty");
        let sum = self.names().map(|name| self.digest_value(name)).fold(0, u64::wrapping_add);
        assert_eq!(self.digest, sum, "the digest is the sum over all names");
        assert_eq!(self.bytes(), self.bytes_visited(), "counted bytes match the visited bytes");
        if let Some(copies) = &self.copies {
            copies.check_invariants(|name| self.find(name).is_some());
        }
        let Some(aliases) = &self.aliases else { return };
        aliases.check_invariants();
        assert!(
            aliases.spots().iter().all(|spot| self.spans[spot.span].holds(spot.offset)),
            "a name of a block not held"
        );
        assert!(aliases.names().all(|name| self.find(name) == aliases.spot(name)), "a further name is a first name");
    }
}

fn name_of(spans: &Arena<Span>, spot: Spot) -> EngineHash {
    spans[spot.span].name(spot.offset)
}
