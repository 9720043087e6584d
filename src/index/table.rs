//! Where one rank's blocks are, by the hashes of their names.
//!
//! Owns a hash table that keeps no names: whoever asks tells whether a block it comes upon is the one. Made for
//! lists of names that come in together, each at a random place of a table that no cache near the core holds, so
//! a search reads one cache line: seven places, a byte of a hash for each that decides which to look at, and a
//! count of the blocks that found the line full and went on to the next. The counts say how far a search must go,
//! so a removed block leaves no mark and churn needs no sweeping. Promises that a block stays where it is listed until
//! it is removed. Costs about one cache miss an access and 18 to 27 bytes a block, a small table up to 37. Does not
//! grow by itself: its owner builds it anew from the names, in the order in which they lie in memory.

use std::hint::black_box;
use std::mem::size_of;

use super::tree::RUN_BLOCKS_MAX;

/// One block: the one at `offset` of the run that `span` lies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Spot {
    pub(super) span: u32,
    pub(super) offset: u32,
}

/// A block as the table lists it: its spot, and twelve bits of its name's hash in the bits that no offset uses.
/// A line's tags are eight bits, and each false match would cost the two cache misses of reading a name.
#[derive(Clone, Copy, Debug, Default)]
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

    /// Bits that neither the tag nor the line depends on.
    fn check(hash: u64) -> u32 {
        ((hash >> 8) as u32) << Self::OFFSET_BITS
    }
}

/// Where the table lists a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Listing {
    line: u32,
    place: u32,
}

const PLACES: usize = 7;

/// A cache line of the table.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Line {
    /// A byte for each place, zero where it is vacant; the highest byte counts the blocks that went on to the
    /// next line and are still there. A count that reached its maximum stays.
    tags: u64,
    listed: [Listed; PLACES],
}

const _: () = assert!(size_of::<Line>() == 64);

impl Line {
    /// The lowest bit of each byte that belongs to a place.
    const PLACE: u64 = 0x0001_0101_0101_0101;
    const PASSED: u32 = 8 * PLACES as u32;

    /// The highest bit of each place's byte that equals `tag`.
    fn tagged(&self, tag: u8) -> u64 {
        let differ = self.tags ^ (Self::PLACE * u64::from(tag));
        // Adding to the low seven bits of each byte carries into the eighth unless they are zero, and no further.
        let low = Self::PLACE * 0x7f;
        !(((differ & low) + low) | differ) & (Self::PLACE << 7)
    }

    fn vacant(&self) -> Option<usize> {
        first(self.tagged(0))
    }

    fn put(&mut self, place: usize, hash: u64, spot: Spot) {
        self.tags |= u64::from(tag(hash)) << (8 * place);
        self.listed[place] = Listed::new(spot, hash);
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
        debug_assert!(self.passed() > 0, "what is removed behind a line went past it");
        if self.passed() < 0xff {
            self.tags -= 1 << Self::PASSED;
        }
    }
}

/// Blocks by the hashes of their names.
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

    /// Number of blocks there may be: half as many as places. The core does not foresee
    /// which lines are full, so that going on to the next costs more than the place saved is worth.
    pub(super) fn room(&self) -> usize {
        self.lines.len() * PLACES / 2
    }

    /// Brings the line that a search for that hash starts with near the core. Searches branch on what they read, so
    /// that each waits for memory before the next can start; these do not, and overlap.
    pub(super) fn fetch(&self, hash: u64) {
        if let Some(line) = self.lines.get(self.home(hash)) {
            black_box(line.tags);
        }
    }

    /// Where the block is listed that `is` the one, among those whose names may have that hash.
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

    /// The block listed where [`Table::find`] told, unless it was removed since.
    pub(super) fn get(&self, at: Listing) -> Option<Spot> {
        let line = &self.lines[at.line as usize];
        (line.tags >> (8 * at.place) & 0xff != 0).then(|| line.listed[at.place as usize].spot())
    }

    /// Lists a block. There must be room.
    pub(super) fn insert(&mut self, hash: u64, spot: Spot) {
        assert!(self.len < self.room(), "the owner makes room");
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

    /// Lists a block unless one is found of which `is` holds. There must be room. Returns whether it was listed.
    #[inline]
    pub(super) fn insert_new(&mut self, hash: u64, spot: Spot, is: impl Fn(Spot) -> bool) -> bool {
        let home = self.home(hash);
        let line = &mut self.lines[home];
        // Nearly always the first line tells all.
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

    /// Strikes a block off whose name has that hash.
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

    /// The line that a search starts with.
    fn home(&self, hash: u64) -> usize {
        (((hash >> 32) * self.lines.len() as u64) >> 32) as usize
    }

    fn after(&self, line: usize) -> usize {
        if line + 1 < self.lines.len() { line + 1 } else { 0 }
    }

    /// Checks what the type promises, given the hashes of the names of all blocks listed.
    pub(super) fn check_invariants(&self, hashes: impl Iterator<Item = (u64, Spot)>) {
        let mut passed = vec![0; self.lines.len()];
        let mut len = 0;
        for (hash, spot) in hashes {
            let listing = self.find(hash, |other| other == spot).expect("every block is found");
            let mut at = self.home(hash);
            while at != listing.line as usize {
                passed[at] += 1;
                at = self.after(at);
            }
            len += 1;
        }
        assert_eq!(self.len, len, "no other block is listed");
        assert!(self.len <= self.room(), "some line is never full");
        let agrees = |(line, passed): (&Line, u64)| line.passed() == passed || line.passed() == 0xff;
        assert!(self.lines.iter().zip(passed).all(agrees), "each line knows what went past it");
        let taken =
            self.lines.iter().map(|line| (0..PLACES).filter(|place| line.tags >> (8 * place) & 0xff != 0).count());
        assert_eq!(self.len, taken.sum::<usize>(), "each block is listed once");
    }
}

/// The byte that stands for a hash, never zero.
fn tag(hash: u64) -> u8 {
    (hash as u8).max(1)
}

/// The first byte with its highest bit set.
fn first(bytes: u64) -> Option<usize> {
    (bytes != 0).then(|| bytes.trailing_zeros() as usize / 8)
}
