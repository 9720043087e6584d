//! Stores and removals of pages by a decoder: see [`super::fold`].
//!
//! A rank folds while all its stores in device memory are of one size that divides the pool's. A store of the pool's size
//! shows that the smaller ones were partial blocks; from then on they do not count. Only the main cache group is folded.
//! Pages with images, and the blocks behind them, match no request, and copies of pages in a lower tier count by the names
//! of blocks.

use std::num::NonZeroU32;

use super::Finding;
use super::decoder::Decoder;
use super::event::{TokenForm, WireEvent};
use super::finding::Output;
use super::fold::Fold;
use crate::hashing::HashScheme;
use crate::protocol::{EngineHash, KvEvent, RepeatedStore, StorageTier};

impl Decoder {
    /// Whether blocks are folded. The state then contains tokens, and is not part of a snapshot.
    #[must_use]
    pub fn is_folding(&self) -> bool {
        self.fold.is_some()
    }

    /// The size of the pages that a device store of the main group consists of; `None` if it has no pages to fold.
    pub(super) fn page_size(&self, event: &WireEvent<'_>) -> Option<NonZeroU32> {
        let size = NonZeroU32::new(u32::try_from(event.block_size?).ok()?)?;
        let is_part = size < self.config.block_size && self.config.block_size.get().is_multiple_of(size.get());
        let is_used = self.fold.as_ref().map_or(!self.has_blocks, |fold| fold.page_size() == size);
        (is_part && is_used && event.token_form != TokenForm::None).then_some(size)
    }

    /// Stores pages. Appends the stores of the blocks that they complete.
    pub(super) fn store_pages(
        &mut self,
        event: &WireEvent<'_>,
        page_size: NonZeroU32,
        output: &mut Output<'_>,
    ) -> Result<(), Finding> {
        self.check_tokens(event)?;
        let report = &mut output.report;
        let scheme = self.scheme();
        let n_pages = self.usable_blocks(event, HashScheme { block_size: page_size, ..scheme }, report)?;
        let limits = &self.config.limits;
        let fold = self.fold.get_or_insert_with(|| Box::new(Fold::new(page_size, scheme, limits.folded_tokens_max)));
        report.page_size = Some(page_size.get());
        let mut at = event.parent.and_then(|parent| fold.find(parent));
        if event.parent.is_some() && at.is_none() {
            report.findings.add(Finding::UnknownPage); // after a late start, like blocks behind an unknown parent
            return Ok(());
        }
        let parent = at.map(|page| fold.namespace(page)).unwrap_or_default();
        let base = self.keys.read(event, n_pages, parent, scheme, limits, &mut report.findings)?;
        let is_copy = RepeatedStore::of(StorageTier::Device, event.parent.is_some(), false) == RepeatedStore::Copy;
        let (mut held, mut start, mut fits) = (Vec::new(), 0, true);
        for (end, mut namespace) in self.keys.runs(base, n_pages) {
            if !self.keys.objects.is_empty() {
                report.findings.add(Finding::UnknownNamespace);
                namespace = namespace.within(u64::MAX);
            }
            let tokens = &self.lists.tokens[start * page_size.get() as usize..];
            let stored = fold.store(at, &self.lists.hashes[start..end], tokens, namespace, is_copy, &mut held);
            fits = stored.is_ok() && !fold.is_overworked();
            (at, start) = (stored.unwrap_or_default(), end);
            if !fits {
                break;
            }
        }
        if !fits {
            self.lose(Finding::TooLarge, Some(StorageTier::Device), output);
            return Ok(());
        }
        report.stored_blocks = report.stored_blocks.saturating_add(held.len() as u32);
        for stored in held.chunk_by(|(_, block), (parent, _)| *parent == Some(block.engine_hash)) {
            let blocks = stored.iter().map(|(_, block)| *block).collect();
            output.events.push(self.changed(StorageTier::Device, KvEvent::Stored { parent: stored[0].0, blocks }));
        }
        Ok(())
    }

    /// Replaces the names of removed pages by those of the blocks that are no longer held.
    pub(super) fn remove_pages(&mut self, output: &mut Output<'_>) {
        let Some(fold) = &mut self.fold else { return };
        let mut gone: Vec<EngineHash> = Vec::new();
        fold.remove(&self.lists.hashes, &mut gone);
        if fold.is_overworked() {
            return self.lose(Finding::TooLarge, Some(StorageTier::Device), output);
        }
        self.lists.hashes.clear();
        self.lists.hashes.extend(gone.iter().map(|name| name.0));
    }

    /// Removes the names of inner pages from those of copies in a lower tier.
    pub(super) fn keep_block_names(&mut self) {
        if let Some(fold) = &self.fold {
            self.lists.hashes.retain(|name| !fold.is_inner(*name));
        }
    }
}
