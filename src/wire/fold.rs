//! Folding of an engine's pages into blocks of the pool.
//!
//! A *page* is a block of an engine whose block size divides the pool's; SGLang's default page has one token. A block of
//! the pool is held while all its pages are. It has the name of its last page, because that name depends on all tokens
//! before it.
//!
//! The pages of one block on one chain form a *strip*. A prompt that continues behind an inner page, beside another
//! prompt, begins a strip there, which repeats the tokens before it. A removed page keeps its place while later pages of its
//! strip exist, so that storing it again restores their blocks.
//!
//! Tokens are kept as long as their page, because any page can be followed by another prompt.
//! Memory for each page of one token, in complete blocks of 16: 8 bytes for the name, 4 for the token, 1 for the copies, 6
//! to 11 in the table of names, and 4 of the strip, which reserves the memory of a whole block. The number of tokens is
//! bounded. A removal or a repeated store visits the strips behind its page: none in an engine that removes later pages
//! first. Others cannot make this expensive, because the owner drops the pages if [`Fold::is_overworked`].

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use ahash::RandomState;
use hashbrown::HashTable;
use smallvec::{SmallVec, smallvec};

use super::Finding;
use super::namespace::Namespace;
use crate::hashing::{BlockHasher, HashScheme, MmBlocks};
use crate::protocol::{EngineHash, StoredBlock};

/// The strip above a strip that begins a block.
const NONE: u32 = u32::MAX;

/// Visited strips of one batch.
const WORK_MAX: usize = 1 << 22;

/// A block that is held from now on, and the block before it.
pub(super) type FoldedBlock = (Option<EngineHash>, StoredBlock);

/// Pages of one rank in device memory.
#[derive(Debug)]
pub(super) struct Fold {
    /// Hashing of the pool's blocks.
    scheme: HashScheme<'static>,
    page_size: NonZeroU32,
    pages_per_block: u32,
    tokens_max: usize,
    strips: Vec<Strip>,
    free: Vec<u32>,
    /// By page: its number is that of its strip, times the pages per block, plus its position in the block.
    names: Vec<u64>,
    /// Copies by page; 0 for a removed page. More than 255 are not counted.
    copies: Vec<u8>,
    /// Tokens by strip, from the start of the block.
    tokens: Vec<u32>,
    /// Pages with a place, by name.
    pages: HashTable<u32>,
    /// Strips that begin behind an inner page, by the strip of that page.
    branches: BTreeSet<(u32, u32)>,
    hasher: RandomState,
    work: usize,
}

/// Pages of one block on one chain.
#[derive(Clone, Copy, Debug)]
struct Strip {
    /// The strip of the page before the first; [`NONE`] for the first page of a block.
    above: u32,
    /// Positions of the first page and behind the last one.
    start: u32,
    end: u32,
    /// Removed pages from the start of the block to the end of the strip.
    holes: u32,
    branches: u32,
    /// Name of the block before.
    parent: Option<EngineHash>,
    namespace: Namespace,
}

impl Strip {
    fn first(parent: Option<EngineHash>) -> Self {
        Self { above: NONE, start: 0, end: 0, holes: 0, branches: 0, parent, namespace: Namespace::default() }
    }
}

impl Fold {
    /// Folds pages of `page_size` tokens into blocks of `scheme`, whose size is a multiple of it. `tokens_max` bounds the
    /// tokens of all strips.
    pub(super) fn new(page_size: NonZeroU32, scheme: HashScheme<'static>, tokens_max: usize) -> Self {
        let pages_per_block = scheme.block_size.get() / page_size.get();
        debug_assert_eq!(pages_per_block * page_size.get(), scheme.block_size.get(), "blocks consist of whole pages");
        Self {
            scheme,
            page_size,
            pages_per_block,
            tokens_max,
            strips: Vec::new(),
            free: Vec::new(),
            names: Vec::new(),
            copies: Vec::new(),
            tokens: Vec::new(),
            pages: HashTable::new(),
            branches: BTreeSet::new(),
            hasher: RandomState::new(),
            work: 0,
        }
    }

    /// Tokens per page.
    pub(super) fn page_size(&self) -> NonZeroU32 {
        self.page_size
    }

    /// Forgets every page.
    pub(super) fn clear(&mut self) {
        *self = Self::new(self.page_size, self.scheme, self.tokens_max);
    }

    /// The page with that name.
    pub(super) fn find(&self, name: u64) -> Option<u32> {
        self.pages.find(self.hasher.hash_one(name), |page| self.names[*page as usize] == name).copied()
    }

    /// Namespace of a page.
    pub(super) fn namespace(&self, page: u32) -> Namespace {
        self.strip(page / self.pages_per_block).namespace
    }

    /// Whether a page is known and not the last one of its block, so that its name is not that of a block.
    pub(super) fn is_inner(&self, name: u64) -> bool {
        self.find(name).is_some_and(|page| (page + 1) % self.pages_per_block != 0)
    }

    /// Begins another batch.
    pub(super) fn start_batch(&mut self) {
        self.work = 0;
    }

    /// Whether the batch has visited too many strips beside those of its pages.
    pub(super) fn is_overworked(&self) -> bool {
        self.work > WORK_MAX
    }

    /// Stores consecutive pages behind the page `at`, or at the start of a prompt. A page that is held already has one
    /// more copy if `is_copy`. Appends the blocks that become held to `held`, and returns the last page.
    ///
    /// # Errors
    /// [`Finding::TooLarge`]; the stored pages and their blocks are then incomplete.
    pub(super) fn store(
        &mut self,
        mut at: Option<u32>,
        names: &[u64],
        tokens: &[u32],
        namespace: Namespace,
        is_copy: bool,
        held: &mut Vec<FoldedBlock>,
    ) -> Result<Option<u32>, Finding> {
        let (page_tokens, ahead) = (self.page_size.get() as usize, usize::from(self.scheme.is_eagle));
        for (idx, &name) in names.iter().enumerate() {
            let page = match self.find(name) {
                Some(page) => {
                    self.store_again(page, is_copy, held);
                    page
                }
                None => {
                    let page = self.place_behind(at)?;
                    let start = idx * page_tokens;
                    self.fill(page, name, &tokens[start..start + page_tokens + ahead], namespace, held);
                    page
                }
            };
            at = Some(page);
        }
        Ok(at)
    }

    /// Removes one copy of each page. Appends the blocks that are no longer held to `gone`.
    pub(super) fn remove(&mut self, names: &[u64], gone: &mut Vec<EngineHash>) {
        for name in names {
            let Some(page) = self.find(*name) else { continue };
            match self.copies[page as usize] {
                0 => {}
                1 => {
                    self.copies[page as usize] = 0;
                    for strip in self.strips_with(page) {
                        if self.is_held(strip) {
                            gone.push(self.name_of(strip));
                        }
                        self.strip_mut(strip).holes += 1;
                    }
                    self.trim(page / self.pages_per_block);
                }
                copies => self.copies[page as usize] = copies - 1,
            }
        }
    }

    /// The place for a new page behind the page `at`.
    fn place_behind(&mut self, at: Option<u32>) -> Result<u32, Finding> {
        let Some(at) = at else { return self.open(Strip::first(None)) };
        let (above, next) = (at / self.pages_per_block, at % self.pages_per_block + 1);
        if next == self.pages_per_block {
            return self.open(Strip::first(Some(EngineHash(self.names[at as usize]))));
        }
        let strip = *self.strip(above);
        if strip.end == next {
            return Ok(at + 1);
        }
        let holes = self.holes_to(at);
        let page = self.open(Strip { above, start: next, end: next, holes, branches: 0, ..strip })?;
        let branch = page / self.pages_per_block;
        self.branches.insert((above, branch));
        self.strip_mut(above).branches += 1;
        let (from, to) = (self.tokens_of(above).start, self.tokens_of(branch).start);
        let shared = (next * self.page_size.get()) as usize;
        self.tokens.copy_within(from..from + shared, to);
        Ok(page)
    }

    /// A new strip. Returns the place of its first page.
    fn open(&mut self, strip: Strip) -> Result<u32, Finding> {
        let id = match self.free.pop() {
            Some(id) => {
                *self.strip_mut(id) = strip;
                id
            }
            None => {
                let id = self.strips.len();
                let window = self.scheme.block_size.get() as usize + usize::from(self.scheme.is_eagle);
                if (id + 1) * window > self.tokens_max {
                    return Err(Finding::TooLarge);
                }
                self.strips.push(strip);
                self.names.resize((id + 1) * self.pages_per_block as usize, 0);
                self.copies.resize((id + 1) * self.pages_per_block as usize, 0);
                self.tokens.resize((id + 1) * window, 0);
                id as u32
            }
        };
        Ok(id * self.pages_per_block + strip.start)
    }

    /// Stores a page in its place, behind the last page of the strip.
    fn fill(&mut self, page: u32, name: u64, tokens: &[u32], namespace: Namespace, held: &mut Vec<FoldedBlock>) {
        let (id, position) = (page / self.pages_per_block, page % self.pages_per_block);
        (self.names[page as usize], self.copies[page as usize]) = (name, 1);
        let to = self.tokens_of(id).start + (position * self.page_size.get()) as usize;
        self.tokens[to..to + tokens.len()].copy_from_slice(tokens);
        let (names, hasher) = (&self.names, &self.hasher);
        self.pages.insert_unique(hasher.hash_one(name), page, |page| hasher.hash_one(names[*page as usize]));
        let strip = self.strip_mut(id);
        (strip.end, strip.namespace) = (position + 1, namespace);
        if self.is_held(id) {
            held.push(self.block(id));
        }
    }

    /// Stores a page that has a place.
    fn store_again(&mut self, page: u32, is_copy: bool, held: &mut Vec<FoldedBlock>) {
        let copies = &mut self.copies[page as usize];
        if *copies > 0 {
            *copies = copies.saturating_add(is_copy.into());
            return;
        }
        *copies = 1;
        for strip in self.strips_with(page) {
            self.strip_mut(strip).holes -= 1;
            if self.is_held(strip) {
                held.push(self.block(strip));
            }
        }
    }

    /// The strips whose block contains the page, up to their ends.
    fn strips_with(&mut self, page: u32) -> SmallVec<[u32; 8]> {
        let (strip, position) = (page / self.pages_per_block, page % self.pages_per_block);
        let mut found: SmallVec<[u32; 8]> = smallvec![strip];
        let mut at = 0;
        while let Some(&above) = found.get(at) {
            if self.strip(above).branches > 0 {
                let branches = self.branches.range((above, 0)..=(above, NONE)).map(|(_, branch)| *branch);
                found.extend(branches.filter(|branch| self.strip(*branch).start > position));
                self.work += self.strip(above).branches as usize;
            }
            at += 1;
        }
        found
    }

    /// Frees the last pages of a strip while they are removed, an empty strip, and then those above it.
    fn trim(&mut self, mut id: u32) {
        while id != NONE && self.strip(id).branches == 0 {
            let Strip { above, start, mut end, .. } = *self.strip(id);
            while end > start && self.copies[(id * self.pages_per_block + end - 1) as usize] == 0 {
                end -= 1;
                let page = id * self.pages_per_block + end;
                let hash = self.hasher.hash_one(self.names[page as usize]);
                if let Ok(listed) = self.pages.find_entry(hash, |other| *other == page) {
                    listed.remove();
                }
            }
            let strip = self.strip_mut(id);
            (strip.holes, strip.end) = (strip.holes - (strip.end - end), end);
            if end > start {
                return;
            }
            self.free.push(id);
            if self.branches.remove(&(above, id)) {
                self.strip_mut(above).branches -= 1;
            }
            id = above;
        }
        if self.pages.len() < self.pages.capacity() / 4 {
            let (names, hasher) = (&self.names, &self.hasher);
            self.pages.shrink_to(self.pages.len() * 2, |page| hasher.hash_one(names[*page as usize]));
        }
    }

    /// Removed pages from the start of the block to the page `at`.
    fn holes_to(&self, at: u32) -> u32 {
        let (mut id, mut end) = (at / self.pages_per_block, at % self.pages_per_block + 1);
        let mut holes = 0;
        while id != NONE {
            let strip = self.strip(id);
            let first = id * self.pages_per_block;
            let pages = &self.copies[(first + strip.start) as usize..(first + end) as usize];
            holes += pages.iter().filter(|copies| **copies == 0).count() as u32;
            (id, end) = (strip.above, strip.start);
        }
        holes
    }

    /// Whether all pages of the block at whose end the strip lies are held.
    fn is_held(&self, id: u32) -> bool {
        let strip = self.strip(id);
        strip.end == self.pages_per_block && strip.holes == 0
    }

    fn block(&self, id: u32) -> FoldedBlock {
        let strip = self.strip(id);
        let hasher = BlockHasher::with_seed(self.scheme, strip.namespace.seed());
        let block_hash = hasher.hashes(&self.tokens[self.tokens_of(id)], &MmBlocks::NONE).next();
        let block_hash = block_hash.expect("a strip has the tokens of a block");
        (strip.parent, StoredBlock { engine_hash: self.name_of(id), block_hash })
    }

    /// Name of the block at the end of a complete strip.
    fn name_of(&self, id: u32) -> EngineHash {
        EngineHash(self.names[((id + 1) * self.pages_per_block - 1) as usize])
    }

    fn tokens_of(&self, id: u32) -> std::ops::Range<usize> {
        let window = self.scheme.block_size.get() as usize + usize::from(self.scheme.is_eagle);
        id as usize * window..(id as usize + 1) * window
    }

    fn strip(&self, id: u32) -> &Strip {
        &self.strips[id as usize]
    }

    fn strip_mut(&mut self, id: u32) -> &mut Strip {
        &mut self.strips[id as usize]
    }
}
