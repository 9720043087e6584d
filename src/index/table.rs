//! Hash table from name hashes to the blocks of one rank.
//!
//! The table stores no names: the caller of a lookup compares the name of each candidate block. Designed for lists of
//! names that arrive together, in a table that exceeds the near caches, so a search reads one cache line. A line has
//! seven places, one hash byte (tag) per place, and a count of the blocks that found the line full and continued to the
//! next. The counts bound the search, so a removed block leaves no tombstone and churn requires no cleanup. A listed
//! block keeps its place until it is removed. Cost: about one cache miss per access, and 18 to 27 bytes per block, up
//! to 37 in a small table. The table does not grow; its owner rebuilds it from the names in memory order.

use std::hint::black_box;
use std::mem::size_of;

use super::tree::RUN_BLOCKS_MAX;

/// Position of a block: `offset` in the run of `span`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Spot {
    pub(super) span: u32,
    pub(super) offset: u32,
}

/// Table entry of a block: its spot, and twelve bits of its name's hash in the bits that offsets do not use. Tags have
/// only eight bits, and each false match would cost the two cache misses of reading a name.
#[derive(Clone, Copy, Debug, Default)]
struct TableEntry {
    span: u32,
    offset_and_check: u32,
}

const _: () = assert!(RUN_BLOCKS_MAX <= 1 << TableEntry::OFFSET_BITS);

impl TableEntry {
    const OFFSET_BITS: u32 = 20;

    fn new(spot: Spot, hash: u64) -> Self {
        debug_assert!(spot.offset < RUN_BLOCKS_MAX, "no offset exceeds the maximum run length");
        Self { span: spot.span, offset_and_check: Self::check(hash) | spot.offset }
    }

    fn spot(self) -> Spot {
        Spot { span: self.span, offset: self.offset_and_check & !(u32::MAX << Self::OFFSET_BITS) }
    }

    /// Whether the entry can belong to a name with that hash.
    fn may_be(self, hash: u64) -> bool {
        (self.offset_and_check ^ Self::check(hash)) >> Self::OFFSET_BITS == 0
    }

    /// Hash bits that neither the tag nor the line depends on.
    fn check(hash: u64) -> u32 {
        ((hash >> 8) as u32) << Self::OFFSET_BITS
    }
}

/// Position of a block in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Listing {
    line: u32,
    place: u32,
}

const PLACES: usize = 7;

/// One cache line of the table.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Line {
    /// One byte per place, zero if vacant. The highest byte counts the listed blocks that continued to the next line; a
    /// saturated count stays.
    tags: u64,
    listed: [TableEntry; PLACES],
}

const _: () = assert!(size_of::<Line>() == 64);

impl Line {
    /// The lowest bit of each place's byte.
    const PLACE: u64 = 0x0001_0101_0101_0101;
    const PASSED: u32 = 8 * PLACES as u32;

    /// The highest bit of each place's byte that equals `tag`.
    fn tagged(&self, tag: u8) -> u64 {
        let differ = self.tags ^ (Self::PLACE * u64::from(tag));
        // Adding to the low seven bits of a byte carries into its eighth bit unless they are zero, and not beyond it.
        let low = Self::PLACE * 0x7f;
        !(((differ & low) + low) | differ) & (Self::PLACE << 7)
    }

    fn vacant(&self) -> Option<usize> {
        first(self.tagged(0))
    }

    fn put(&mut self, place: usize, hash: u64, spot: Spot) {
        self.tags |= u64::from(tag(hash)) << (8 * place);
        self.listed[place] = TableEntry::new(spot, hash);
    }

    fn passed(&self) -> u64 {
        self.tags >> Self::PASSED
    }

    fn pass(&mut self) {
        if self.passed() < 0xff {
            self.tags += 1 << Self::PASSED;
        }
    }

    fn unpass(&mut self) {
        debug_assert!(self.passed() > 0, "a block listed in a later line passed this line");
        if self.passed() < 0xff {
            self.tags -= 1 << Self::PASSED;
        }
    }
}

/// Table from name hashes to blocks.
#[derive(Debug, Default)]
pub(super) struct Table {
    lines: Vec<Line>,
    len: usize,
}

impl Table {
    /// An empty table with room for `len` blocks.
    pub(super) fn with_room(len: usize) -> Self {
        debug_assert!(u32::try_from(len).is_ok(), "spots are numbered by u32");
        Self { lines: vec![Line::default(); (2 * len).div_ceil(PLACES)], len: 0 }
    }

    /// Heap bytes of a table with room for `len` blocks.
    pub(super) fn bytes_of(len: usize) -> usize {
        (2 * len).div_ceil(PLACES) * size_of::<Line>()
    }

    /// Number of blocks.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Maximum number of blocks: half the number of places. The CPU cannot predict full lines, so continuing to the
    /// next line costs more than the saved place is worth.
    pub(super) fn room(&self) -> usize {
        self.lines.len() * PLACES / 2
    }

    /// Prefetches the first line of a search for that hash. A search branches on its loads, so consecutive searches
    /// wait for memory one by one; prefetches overlap.
    pub(super) fn fetch(&self, hash: u64) {
        if let Some(line) = self.lines.get(self.home(hash)) {
            black_box(line.tags);
        }
    }

    /// Position of the block that satisfies `is`, among the blocks whose names can have that hash.
    pub(super) fn find(&self, hash: u64, is: impl Fn(Spot) -> bool) -> Option<Listing> {
        let mut at = self.home(hash);
        for _ in 0..self.lines.len() {
            let line = &self.lines[at];
            let mut tagged = line.tagged(tag(hash));
            while let Some(place) = first(tagged) {
                let listed = line.listed[place];
                if listed.may_be(hash) && is(listed.spot()) {
                    return Some(Listing { line: at as u32, place: place as u32 });
                }
                tagged &= tagged - 1;
            }
            if line.passed() == 0 {
                return None;
            }
            at = self.after(at);
        }
        None
    }

    /// The block at a position returned by [`Table::find`], unless it was removed since.
    pub(super) fn get(&self, at: Listing) -> Option<Spot> {
        let line = &self.lines[at.line as usize];
        (line.tags >> (8 * at.place) & 0xff != 0).then(|| line.listed[at.place as usize].spot())
    }

    /// Every listed block.
    pub(super) fn spots(&self) -> impl Iterator<Item = Spot> {
        let taken = |line: &Line, place: &usize| line.tags >> (8 * place) & 0xff != 0;
        self.lines.iter().flat_map(move |line| {
            (0..PLACES).filter(move |place| taken(line, place)).map(|place| line.listed[place].spot())
        })
    }

    /// Lists a block. The table must have room.
    pub(super) fn insert(&mut self, hash: u64, spot: Spot) {
        assert!(self.len < self.room(), "the owner makes room before inserting");
        self.len += 1;
        let mut at = self.home(hash);
        loop {
            let line = &mut self.lines[at];
            if let Some(place) = line.vacant() {
                return line.put(place, hash, spot);
            }
            line.pass();
            at = self.after(at);
        }
    }

    /// Lists a block unless a listed block satisfies `is`. The table must have room. Returns whether it was listed.
    #[inline]
    pub(super) fn insert_new(&mut self, hash: u64, spot: Spot, is: impl Fn(Spot) -> bool) -> bool {
        let home = self.home(hash);
        let line = &mut self.lines[home];
        // In the common case the first line is sufficient.
        if line.tagged(tag(hash)) == 0
            && line.passed() == 0
            && let Some(place) = line.vacant()
        {
            line.put(place, hash, spot);
            self.len += 1;
            return true;
        }
        self.insert_unless_found(hash, spot, is)
    }

    #[inline(never)]
    fn insert_unless_found(&mut self, hash: u64, spot: Spot, is: impl Fn(Spot) -> bool) -> bool {
        let new = self.find(hash, is).is_none();
        if new {
            self.insert(hash, spot);
        }
        new
    }

    /// Removes a block whose name has that hash.
    pub(super) fn remove(&mut self, listing: Listing, hash: u64) {
        let mut at = self.home(hash);
        while at != listing.line as usize {
            self.lines[at].unpass();
            at = self.after(at);
        }
        self.lines[at].tags &= !(0xff << (8 * listing.place));
        self.len -= 1;
    }

    /// Heap bytes owned.
    pub(super) fn bytes(&self) -> usize {
        self.lines.capacity() * size_of::<Line>()
    }

    /// First line of a search.
    fn home(&self, hash: u64) -> usize {
        (((hash >> 32) * self.lines.len() as u64) >> 32) as usize
    }

    fn after(&self, line: usize) -> usize {
        if line + 1 < self.lines.len() { line + 1 } else { 0 }
    }

    /// Checks the invariants of the type, given the name hashes of all listed blocks.
    pub(super) fn check_invariants(&self, hashes: impl Iterator<Item = (u64, Spot)>) {
        let mut passed = vec![0; self.lines.len()];
        let mut len = 0;
        for (hash, spot) in hashes {
            let listing = self.find(hash, |other| other == spot).expect("every listed block is found");
            let mut at = self.home(hash);
            while at != listing.line as usize {
                passed[at] += 1;
                at = self.after(at);
            }
            len += 1;
        }
        assert_eq!(self.len, len, "no further block is listed");
        assert!(self.len <= self.room(), "at least one line has room");
        let agrees = |(line, passed): (&Line, u64)| line.passed() == passed || line.passed() == 0xff;
        assert!(self.lines.iter().zip(passed).all(agrees), "each line counts the blocks that passed it");
        assert_eq!(self.len, self.spots().count(), "each block is listed once");
    }
}

/// Tag of a hash; never zero.
fn tag(hash: u64) -> u8 {
    (hash as u8).max(1)
}

/// The first byte with its highest bit set.
fn first(bytes: u64) -> Option<usize> {
    (bytes != 0).then(|| bytes.trailing_zeros() as usize / 8)
}
