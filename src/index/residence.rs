//! What one rank holds in one tier, by the engine's names.
//!
//! Owns the rank's spans and the finding of a block by its engine hash. Promises that each name stands for one
//! block, that a block is held exactly while it has a name, and that the name a block has had longest is the
//! one it is reported by. Costs about 26 bytes a held block: 8 for its name, the rest for an entry of the table
//! that names are found through, which keeps no keys of its own. Leaves the tree to [`super::hold`].

use std::mem::size_of;

use ahash::RandomState;
use hashbrown::hash_table::Entry;
use hashbrown::{HashMap, HashTable};
use smallvec::SmallVec;

use super::arena::Arena;
use super::span::Span;
use super::tree::RUN_BLOCKS_MAX;
use crate::protocol::{EngineHash, StoredBlock};

/// How many names are looked up before the first is acted upon. A lookup is two or three cache misses in a row;
/// lookups that do not wait for each other's outcome overlap theirs.
pub(super) const CHUNK: usize = 16;

/// One block: the one at `offset` of the run that `span` lies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Spot {
    pub(super) span: u32,
    pub(super) offset: u32,
}

/// A block as the table lists it: its spot, and twelve bits of its name's hash in the bits that no offset uses.
/// The table itself compares seven bits, and each false match would cost the two cache misses of reading a name.
#[derive(Clone, Copy, Debug)]
struct Listed {
    span: u32,
    offset_and_check: u32,
}

const _: () = assert!(RUN_BLOCKS_MAX <= 1 << Listed::OFFSET_BITS);

impl Listed {
    const OFFSET_BITS: u32 = 20;

    fn new(spot: Spot, hash: u64) -> Self {
        debug_assert!(spot.offset < RUN_BLOCKS_MAX, "no run is longer");
        Self { span: spot.span, offset_and_check: Self::check(hash) | spot.offset }
    }

    fn spot(self) -> Spot {
        Spot { span: self.span, offset: self.offset_and_check & !(u32::MAX << Self::OFFSET_BITS) }
    }

    /// Whether this may be the block of a name with that hash.
    fn may_be(self, hash: u64) -> bool {
        (self.offset_and_check ^ Self::check(hash)) >> Self::OFFSET_BITS == 0
    }

    /// Bits from the middle of the hash: the table goes by both ends.
    fn check(hash: u64) -> u32 {
        ((hash >> 32) as u32) << Self::OFFSET_BITS
    }
}

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
    /// The block keeps other names.
    StillNamed,
    /// That was the block's only name: it must be released.
    LastName(Spot),
}

/// One rank's blocks in one tier.
#[derive(Debug)]
pub(super) struct Residence {
    spans: Arena<Span>,
    /// Every held block by its first name, which is read through its span.
    names: HashTable<Listed>,
    /// Further names. Engines that give a block two names are rare.
    aliases: Option<Box<Aliases>>,
    hasher: RandomState,
}

#[derive(Debug)]
struct Aliases {
    spots: HashMap<EngineHash, Spot, RandomState>,
    /// Each block's further names, in the order in which they came.
    names: HashMap<Spot, SmallVec<[EngineHash; 2]>, RandomState>,
}

impl Residence {
    pub(super) fn new(hasher: RandomState) -> Self {
        Self { spans: Arena::new(), names: HashTable::new(), aliases: None, hasher }
    }

    /// The block of that name.
    pub(super) fn find(&self, name: EngineHash) -> Option<Spot> {
        let (spans, hash) = (&self.spans, self.hasher.hash_one(name));
        let first = self.names.find(hash, |listed| is_named(spans, *listed, name, hash));
        let first = first.map(|listed| listed.spot());
        first.or_else(|| self.aliases.as_ref()?.spots.get(&name).copied())
    }

    pub(super) fn span(&self, id: u32) -> &Span {
        &self.spans[id]
    }

    /// A new span on a node's run, with room for `len` blocks.
    pub(super) fn open(&mut self, node: u32, len: usize) -> u32 {
        self.spans.insert(Span::on(node, len))
    }

    /// Frees a span that holds nothing any more.
    pub(super) fn close(&mut self, id: u32) {
        debug_assert_eq!(self.spans[id].extent(), 0, "a span with blocks stays");
        self.spans.remove(id);
    }

    /// Holds as many of `blocks` as are nothing but new blocks with new names, right behind the span's last
    /// block. Returns how many that were. This is what nearly all stores consist of.
    pub(super) fn append(&mut self, span: u32, offset: u32, blocks: &[StoredBlock]) -> usize {
        if self.aliases.is_some() || !self.spans[span].ends_at(offset) {
            return 0;
        }
        self.spans[span].make_room(blocks.len());
        self.sweep(blocks.len());
        for (done, block) in blocks.iter().enumerate() {
            let (spans, hasher, name) = (&self.spans, &self.hasher, block.engine_hash);
            let hash = hasher.hash_one(name);
            match self.names.entry(
                hash,
                |listed| is_named(spans, *listed, name, hash),
                |listed| hasher.hash_one(name_of(spans, *listed)),
            ) {
                Entry::Occupied(_) => return done,
                Entry::Vacant(entry) => {
                    entry.insert(Listed::new(Spot { span, offset: offset + done as u32 }, hash));
                }
            }
            self.spans[span].append(name);
        }
        blocks.len()
    }

    /// Gives the block at `spot` a name, and holds it if it was not held. The name leaves whatever block had it.
    pub(super) fn name(&mut self, spot: Spot, name: EngineHash) -> Named {
        let before = self.find(name);
        if before == Some(spot) {
            return Named::Already;
        }
        let taken = if before.is_some() { self.take(name) } else { Taken::Unknown };
        if self.spans[spot.span].holds(spot.offset) {
            self.add_alias(spot, name);
        } else {
            self.spans[spot.span].hold(spot.offset, name);
            self.list(spot);
        }
        match taken {
            Taken::Unknown => Named::New,
            Taken::StillNamed => Named::Moved,
            Taken::LastName(from) => Named::MovedFrom(from),
        }
    }

    /// Where the table lists each of up to [`CHUNK`] names. To be handed to [`Residence::take_listed`].
    pub(super) fn locate(&self, names: &[EngineHash]) -> [Option<usize>; CHUNK] {
        let mut buckets = [None; CHUNK];
        for (bucket, &name) in buckets.iter_mut().zip(names) {
            let hash = self.hasher.hash_one(name);
            *bucket = self.names.find_bucket_index(hash, |listed| is_named(&self.spans, *listed, name, hash));
        }
        buckets
    }

    /// Takes a name away. The block of its last name counts as held until it is released.
    pub(super) fn take(&mut self, name: EngineHash) -> Taken {
        let [bucket, ..] = self.locate(&[name]);
        match bucket {
            Some(bucket) => self.take_listed(name, bucket),
            None if self.remove_alias(name) => Taken::StillNamed,
            None => Taken::Unknown,
        }
    }

    /// [`Residence::take`], for a name that was in `bucket` before other names were taken.
    pub(super) fn take_listed(&mut self, name: EngineHash, bucket: usize) -> Taken {
        let spans = &self.spans;
        let entry = self.names.get_bucket_entry(bucket).ok().filter(|entry| name_of(spans, *entry.get()) == name);
        let Some(entry) = entry else { return self.take(name) };
        let spot = entry.remove().0.spot();
        let Some(heir) = self.first_alias(spot) else { return Taken::LastName(spot) };
        self.remove_alias(heir);
        self.spans[spot.span].rename(spot.offset, heir);
        self.list(spot);
        Taken::StillNamed
    }

    /// Gives up a block whose last name was taken.
    pub(super) fn release(&mut self, spot: Spot) {
        self.spans[spot.span].release(spot.offset);
    }

    /// Gives back memory that what is left of a span does not need.
    pub(super) fn settle_span(&mut self, id: u32) {
        self.spans[id].settle();
    }

    /// Gives back memory that few names do not need.
    pub(super) fn settle(&mut self) {
        if self.names.capacity() > 64 && self.names.len() < self.names.capacity() / 4 {
            let (spans, hasher) = (&self.spans, &self.hasher);
            self.names.shrink_to(self.names.len() * 2, |listed| hasher.hash_one(name_of(spans, *listed)));
        }
    }

    /// Number of blocks held.
    pub(super) fn held_blocks(&self) -> usize {
        self.names.len()
    }

    /// Number of names, which is more than the blocks held where some have several.
    pub(super) fn known_names(&self) -> usize {
        self.names.len() + self.aliases.as_ref().map_or(0, |aliases| aliases.spots.len())
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

    /// Heap bytes owned. Visits every span.
    pub(super) fn bytes(&self) -> usize {
        let aliases = self.aliases.as_ref().map_or(0, |aliases| {
            let spilled = aliases.names.values().filter(|names| names.spilled()).map(|names| names.capacity());
            size_of::<Aliases>()
                + aliases.spots.allocation_size()
                + aliases.names.allocation_size()
                + spilled.sum::<usize>() * size_of::<EngineHash>()
        });
        let spans = self.spans.iter().map(|(_, span)| span.bytes()).sum::<usize>();
        self.spans.bytes() + spans + self.names.allocation_size() + aliases
    }

    /// Builds the table anew at its size when marks of removed entries, not entries, leave no room for `more`.
    /// Left to itself it would double. At least a quarter of it is won, so this is rare.
    fn sweep(&mut self, more: usize) {
        let (len, room) = (self.names.len(), self.names.num_buckets() / 8 * 7);
        if self.names.capacity() - len >= more || len + more > room / 4 * 3 {
            return;
        }
        let (spans, hasher) = (&self.spans, &self.hasher);
        let hash = |listed: &Listed| hasher.hash_one(name_of(spans, *listed));
        let mut swept = HashTable::with_capacity(room);
        for listed in &self.names {
            swept.insert_unique(hash(listed), *listed, hash);
        }
        self.names = swept;
    }

    fn list(&mut self, spot: Spot) {
        self.sweep(1);
        let (spans, hasher) = (&self.spans, &self.hasher);
        let hash = hasher.hash_one(spans[spot.span].name(spot.offset));
        self.names.insert_unique(hash, Listed::new(spot, hash), |listed| hasher.hash_one(name_of(spans, *listed)));
    }

    fn first_alias(&self, spot: Spot) -> Option<EngineHash> {
        self.aliases.as_ref()?.names.get(&spot)?.first().copied()
    }

    fn add_alias(&mut self, spot: Spot, name: EngineHash) {
        let hasher = &self.hasher;
        let aliases = self.aliases.get_or_insert_with(|| {
            let (spots, names) = (HashMap::with_hasher(hasher.clone()), HashMap::with_hasher(hasher.clone()));
            Box::new(Aliases { spots, names })
        });
        aliases.spots.insert(name, spot);
        aliases.names.entry(spot).or_default().push(name);
    }

    /// Whether there was such an alias.
    fn remove_alias(&mut self, name: EngineHash) -> bool {
        let Some(aliases) = &mut self.aliases else { return false };
        let Some(spot) = aliases.spots.remove(&name) else { return false };
        let names = aliases.names.get_mut(&spot).expect("an alias is listed with its block");
        names.retain(|other| *other != name);
        if names.is_empty() {
            aliases.names.remove(&spot);
        }
        if aliases.spots.is_empty() {
            self.aliases = None;
        }
        true
    }

    /// Checks what the type promises.
    pub(super) fn check_invariants(&self) {
        let mut held = 0;
        for (id, span) in self.spans() {
            span.check_invariants();
            for stretch in span.stretches() {
                for offset in stretch.start..stretch.end {
                    let spot = Spot { span: id, offset };
                    assert_eq!(self.find(span.name(offset)), Some(spot), "a block is found by its name");
                    held += 1;
                }
            }
        }
        assert_eq!(self.names.len(), held, "the table lists held blocks only");
        assert_eq!(self.spans().count(), self.spans.len(), "no span is empty");
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

fn name_of(spans: &Arena<Span>, listed: Listed) -> EngineHash {
    let Spot { span, offset } = listed.spot();
    spans[span].name(offset)
}

fn is_named(spans: &Arena<Span>, listed: Listed, name: EngineHash, hash: u64) -> bool {
    listed.may_be(hash) && name_of(spans, listed) == name
}
