//! Decoder of one rank's KV event stream.
//!
//! Processes batches in order, validates each event, and keeps the state between events: namespaces and cache groups.

use std::num::NonZeroU32;
use std::ops::Range;

use super::event::{Lists, Tag, TokenForm, WireEvent};
use super::finding::Output;
use super::fold::Fold;
use super::group::{BesideGroup, Groups, is_complete, removed_before};
use super::keys::StoreKeys;
use super::medium::{is_of_connector, tier};
use super::msgpack::Cursor;
use super::namespace::{Namespace, Namespaces};
use super::{DecoderLimits, DecoderState, Finding, Report, StoreMismatch};
use crate::hashing::{BlockHasher, HashScheme};
use crate::protocol::{BlockHash, EngineHash, KvEvent, RepeatedStore, RouterEvent, StorageTier};
use crate::protocol::{StoredBlock, WorkerRank};

/// Tier and content of a change.
type Change = (StorageTier, KvEvent);

/// Identity of the stream and the hashing rules of its pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WireConfig {
    /// The rank that publishes the stream.
    pub rank: WorkerRank,
    /// All ranks of the worker. If there are several, batches labelled with a rank other than `rank` are rejected.
    pub ranks: Range<u32>,
    /// Tokens per block of the pool.
    pub block_size: NonZeroU32,
    /// Whether the pool hashes EAGLE token pairs.
    pub is_eagle: bool,
    /// Size limits of a batch.
    pub limits: DecoderLimits,
}

/// Decodes the batches of one rank, in order.
///
/// ```
/// use std::num::NonZeroU32;
/// use pointsman::protocol::{EngineHash, KvEvent, WorkerId, WorkerRank};
/// use pointsman::internals::wire::{Decoder, DecoderLimits, WireConfig};
///
/// let mut decoder = Decoder::new(WireConfig {
///     rank: WorkerRank::new(WorkerId(7), 0),
///     ranks: 0..1,
///     block_size: NonZeroU32::new(4).expect("not zero"),
///     is_eagle: false,
///     limits: DecoderLimits::default(),
/// });
/// // [1.5, [["BlockRemoved", [17], "GPU"]], 0]
/// let payload = b"\x93\xca\x3f\xc0\x00\x00\x91\x93\xacBlockRemoved\x91\x11\xa3GPU\x00";
/// let mut events = Vec::new();
/// let report = decoder.decode(payload, &mut events);
/// assert_eq!((report.events, report.usable), (1, 1));
/// assert!(report.findings.is_empty());
/// assert_eq!(events[0].data, KvEvent::Removed { blocks: vec![EngineHash(17)] });
/// ```
#[derive(Debug)]
pub struct Decoder {
    pub(super) config: WireConfig,
    pub(super) namespaces: Namespaces,
    pub(super) groups: Groups,
    /// Whether a connector has announced blocks in a lower tier.
    pub(super) has_connector: bool,
    /// Whether the rank has stored blocks of the pool's size in device memory.
    pub(super) has_blocks: bool,
    /// Pages of a rank with smaller blocks.
    pub(super) fold: Option<Box<Fold>>,
    pub(super) lists: Lists,
    pub(super) keys: StoreKeys,
}

impl Decoder {
    /// A decoder at the start of a stream.
    #[must_use]
    pub fn new(config: WireConfig) -> Self {
        Self {
            lists: Lists::new(config.limits),
            config,
            namespaces: Namespaces::default(),
            groups: Groups::default(),
            has_connector: false,
            has_blocks: false,
            fold: None,
            keys: StoreKeys::default(),
        }
    }

    /// A decoder that continues a stream.
    #[must_use]
    pub fn resume(config: WireConfig, state: &DecoderState) -> Self {
        let groups = Groups::resumed(&state.groups);
        let keys = StoreKeys::resumed(&state.identities);
        let (namespaces, has_connector) = (Namespaces::resumed(&state.namespaces), state.has_connector);
        Self { groups, namespaces, has_connector, has_blocks: true, keys, ..Self::new(config) }
    }

    /// State between two batches.
    #[must_use]
    pub fn state(&self) -> DecoderState {
        DecoderState {
            groups: self.groups.records(),
            has_connector: self.has_connector,
            identities: self.keys.identities(),
            namespaces: self.namespaces.sorted(),
        }
    }

    /// Number of remembered blocks with a namespace.
    #[must_use]
    pub fn namespaces(&self) -> usize {
        self.namespaces.len()
    }

    /// Decodes one batch and appends its usable events to `events`, in order. Consecutive removals from one tier are
    /// merged.
    ///
    /// Decodes as much of the batch as possible; the report lists the rejected parts. Time and memory are linear in the
    /// number of bytes.
    pub fn decode(&mut self, payload: &[u8], events: &mut Vec<RouterEvent>) -> Report {
        let n_before = events.len();
        self.fold.iter_mut().for_each(|fold| fold.start_batch());
        let mut report = self.batch(payload, events);
        if report.stored_blocks == 0 && self.fold.is_none() && self.groups.substitute() {
            let cleared = events.drain(n_before..).find(|event| event.data == KvEvent::TierCleared);
            events.extend(cleared);
            report = self.batch(payload, events);
        }
        self.lists.wipe();
        self.lists.shrink();
        self.keys.shrink();
        report
    }

    /// Discards all state after the rank's cache was lost, at the start of a new incarnation.
    pub fn forget(&mut self) {
        *self = Self::new(self.config.clone());
    }

    /// Decodes and applies one event. An error ends the batch.
    pub(super) fn event(&mut self, cursor: &mut Cursor<'_>, output: &mut Output<'_>) -> Result<(), Finding> {
        let start = *cursor;
        let mut event = WireEvent::default();
        match event.read(cursor, &mut self.lists) {
            Ok(()) => {
                if self.config.is_eagle && event.token_form == TokenForm::Ids {
                    self.complete_pairs(&mut event);
                }
                if is_local(&event).is_ok() && self.groups.learn(&event, self.config.block_size) {
                    // The blocks of the substitute are not those of the main group.
                    self.clear_tier(StorageTier::Device);
                    output.events.push(self.changed(StorageTier::Device, KvEvent::TierCleared));
                }
                match self.take(&event, output) {
                    Ok(taken) => {
                        output.report.usable += 1;
                        output.events.extend(taken);
                        self.groups.put_main_first(output.of_batch());
                    }
                    Err(refused) => self.refuse(&event, refused, &mut output.report),
                }
            }
            Err(broken) if broken.ends_batch() => return Err(broken),
            Err(refused) => {
                *cursor = start;
                self.pass(1, cursor)?;
                self.unreadable(event.tag, refused, start, output);
            }
        }
        Ok(())
    }

    /// Adds the token behind the last block to those of the blocks, which then are as complete as pairs.
    #[cold]
    fn complete_pairs(&mut self, event: &mut WireEvent<'_>) {
        if let Some(token) = event.next_token(&self.config.limits).filter(|_| !event.has_bad_token) {
            self.lists.tokens.push(token);
            event.token_form = TokenForm::Pairs;
        }
    }

    /// Counts an event that could not be read. A lost removal or clear leaves no stale blocks.
    #[cold]
    fn unreadable(&mut self, tag: Tag, finding: Finding, start: Cursor<'_>, output: &mut Output<'_>) {
        let skimmed = WireEvent::skimmed_removal(start, &self.config.limits).filter(|_| tag == Tag::Removed);
        match (tag, skimmed.map(|event| self.place(&event))) {
            (Tag::Removed | Tag::Cleared, None) => self.lose(finding, None, output),
            (Tag::Removed, Some(Ok((_, tier)))) => self.lose(finding, Some(tier), output),
            // Blocks that are not used, or none.
            (Tag::Removed, Some(Err(_))) | (Tag::Stored | Tag::Ignored | Tag::Cleared, _) => {
                output.report.findings.add(finding)
            }
        }
    }

    /// Clears a tier, or all, because a removal there was lost: its blocks would be stale for ever.
    #[cold]
    pub(super) fn lose(&mut self, finding: Finding, tier: Option<StorageTier>, output: &mut Output<'_>) {
        output.report.findings.add(finding);
        output.report.lost_removals = Some(finding);
        for tier in StorageTier::ALL.into_iter().filter(|of| tier.is_none_or(|tier| tier == *of)) {
            self.clear_tier(tier);
            output.events.push(self.changed(tier, KvEvent::TierCleared));
        }
    }

    /// Drops lower tiers to make room for a store with a namespace. Some connectors publish no removals.
    #[cold]
    fn drop_crowded_tiers(&mut self, events: &mut Vec<RouterEvent>) -> bool {
        let n_before = events.len();
        while let Some(tier) = self.namespaces.crowded_tier(&self.lists.hashes, self.config.limits.namespaces_max) {
            self.clear_tier(tier);
            events.push(self.changed(tier, KvEvent::TierCleared));
        }
        events.len() > n_before
    }

    fn clear_tier(&mut self, tier: StorageTier) {
        self.namespaces.clear_tier(tier);
        self.fold.iter_mut().filter(|_| tier == StorageTier::Device).for_each(|fold| fold.clear());
    }

    /// Counts an event that was read but is unusable.
    fn refuse(&self, event: &WireEvent<'_>, finding: Finding, report: &mut Report) {
        report.findings.add(finding);
        let is_device = tier(event.medium) == Ok(StorageTier::Device);
        if !is_device || matches!(finding, Finding::NotMainAttention | Finding::NonLocal) {
            report.side_events += 1;
            return;
        }
        let size = event.block_size.filter(|size| *size > 0);
        let (Some(size), Tag::Stored, false) = (size, event.tag, event.token_form == TokenForm::None) else { return };
        report.mismatch = match finding {
            Finding::BlockSize => Some(StoreMismatch::BlockSize(u32::try_from(size).unwrap_or(u32::MAX))),
            Finding::Eagle => Some(StoreMismatch::Eagle),
            Finding::NamespacesFull => None,
            other => Some(StoreMismatch::Invalid(other)),
        };
    }

    /// Converts an event. Returns `None` if it has no effect, or is already among the events of the batch.
    fn take(&mut self, event: &WireEvent<'_>, output: &mut Output<'_>) -> Result<Option<RouterEvent>, Finding> {
        let taken = match event.tag {
            Tag::Ignored => None,
            Tag::Cleared => Some(self.cleared(event, &mut output.report)?),
            Tag::Removed => self.removed(event, output)?,
            Tag::Stored => self.store(event, output)?,
        };
        Ok(taken.and_then(|(tier, data)| {
            let has_effect = matches!(data, KvEvent::Cleared | KvEvent::TierCleared | KvEvent::GroupStored { .. })
                || data.block_count() > 0;
            has_effect.then(|| self.changed(tier, data))
        }))
    }

    /// Converts a store. Returns `None` if its blocks are already among the events of the batch.
    fn store(&mut self, event: &WireEvent<'_>, output: &mut Output<'_>) -> Result<Option<Change>, Finding> {
        if tier(event.medium) == Ok(StorageTier::Device) {
            self.groups.offer(event, &self.lists, self.config.block_size);
        }
        Ok(match self.place(event)? {
            (Some(group), tier) => {
                let data = group.stored(event, &self.lists, self.config.block_size)?;
                note(event, &mut output.report);
                Some((tier, data))
            }
            (None, StorageTier::Device) => match self.page_size(event) {
                Some(page_size) => {
                    self.store_pages(event, page_size, output)?;
                    None
                }
                None => Some((StorageTier::Device, self.store_blocks(event, output)?)),
            },
            (None, tier) => {
                self.has_connector |= is_of_connector(event.medium);
                let blocks = self.offloaded(event, tier, &mut output.report)?;
                // Connectors publish each block as an event of its own, and names need no parent.
                if let Some(RouterEvent { tier: same, data: KvEvent::Offloaded { blocks: before, .. }, .. }) =
                    output.of_batch().last_mut()
                    && *same == tier
                    && blocks.iter().all(|(_, block_hash)| block_hash.is_none())
                {
                    before.extend(blocks);
                    return Ok(None);
                }
                Some((tier, KvEvent::Offloaded { parent: event.parent.map(EngineHash), blocks }))
            }
        })
    }

    /// Converts a clear. vLLM clears the pool of the device only, and its connectors keep their copies. SGLang clears all.
    fn cleared(&mut self, event: &WireEvent<'_>, report: &mut Report) -> Result<Change, Finding> {
        is_local(event)?;
        let tier = tier(event.medium)?;
        report.cleared = tier == StorageTier::Device;
        if event.medium.is_some() || self.has_connector {
            self.clear_tier(tier);
            return Ok((tier, KvEvent::TierCleared));
        }
        self.namespaces.clear();
        self.clear_tier(StorageTier::Device);
        Ok((tier, KvEvent::Cleared))
    }

    pub(super) fn changed(&self, tier: StorageTier, data: KvEvent) -> RouterEvent {
        RouterEvent { rank: self.config.rank, tier, data }
    }

    /// Group, if it is beside the main one, and tier of an event about local blocks. Groups beside the main one count in
    /// device memory only.
    fn place(&self, event: &WireEvent<'_>) -> Result<(Option<BesideGroup>, StorageTier), Finding> {
        is_local(event)?;
        match (self.groups.beside(event)?, tier(event.medium)?) {
            (Some(_), StorageTier::HostPinned | StorageTier::Disk | StorageTier::External) => {
                Err(Finding::NotMainAttention)
            }
            place => Ok(place),
        }
    }

    /// Converts a removal. Returns `None` if its blocks are already among the events of the batch.
    fn removed(&mut self, event: &WireEvent<'_>, output: &mut Output<'_>) -> Result<Option<Change>, Finding> {
        let (group, tier) = self.place(event)?;
        if self.lists.hashes.is_empty() && event.bad_hashes > 0 {
            return Err(Finding::BadHash);
        }
        note(event, &mut output.report);
        if group.is_none() {
            self.lists.hashes.iter().for_each(|name| self.namespaces.removed(*name, tier));
        }
        if self.fold.is_some() && group.is_none() && tier == StorageTier::Device {
            self.remove_pages(output);
        }
        let names = self.lists.hashes.iter().copied().map(EngineHash);
        let group = group.map(|group| group.number);
        // Engines publish each removed block as an event of its own. A list per event would cost more than the rest of
        // its decoding.
        let last = output.of_batch().last_mut();
        if let Some(blocks) = last.and_then(|last| removed_before(last, tier, group)) {
            blocks.extend(names);
            return Ok(None);
        }
        let blocks = names.collect();
        Ok(Some(match group {
            None => (tier, KvEvent::Removed { blocks }),
            Some(group) => (tier, KvEvent::GroupRemoved { group, blocks }),
        }))
    }

    /// Converts a store of the main group in device memory.
    fn store_blocks(&mut self, event: &WireEvent<'_>, output: &mut Output<'_>) -> Result<KvEvent, Finding> {
        let Output { events, report, .. } = output;
        let stored = match self.stored(event, report) {
            Err(Finding::NamespacesFull) if self.drop_crowded_tiers(events) => self.stored(event, report)?,
            stored => stored?,
        };
        self.has_blocks = true;
        if self.fold.take().is_some() {
            events.push(self.changed(StorageTier::Device, KvEvent::TierCleared));
        }
        Ok(stored)
    }

    fn stored(&mut self, event: &WireEvent<'_>, report: &mut Report) -> Result<KvEvent, Finding> {
        self.check_form(event)?;
        if self.groups.is_substituted() {
            if !is_complete(event, &self.lists, self.config.block_size) {
                return Err(Finding::NotMainAttention);
            }
            report.findings.add(Finding::NoMainAttention);
        }
        let n_blocks = self.usable_blocks(event, self.scheme(), report)?;
        let mut blocks = Vec::with_capacity(n_blocks);
        let repeated = RepeatedStore::of(StorageTier::Device, event.parent.is_some(), self.groups.has_several());
        self.hash(event, n_blocks, report, |namespaces, engine_hash, block_hash, namespace| {
            namespaces.stored(engine_hash.0, namespace, repeated != RepeatedStore::Announcement);
            blocks.push(StoredBlock { engine_hash, block_hash });
        })?;
        report.stored_blocks = report.stored_blocks.saturating_add(n_blocks as u32);
        Ok(KvEvent::Stored { parent: event.parent.map(EngineHash), blocks })
    }

    /// Number of leading blocks of a device store that have a name and all tokens. Counts the defects of the others.
    pub(super) fn usable_blocks(
        &self,
        event: &WireEvent<'_>,
        scheme: HashScheme<'_>,
        report: &mut Report,
    ) -> Result<usize, Finding> {
        let n_blocks = self.lists.hashes.len().min(scheme.block_count(self.lists.tokens.len()));
        let lacks_tokens = n_blocks < self.lists.hashes.len();
        if n_blocks == 0 {
            // If no block is usable, the whole event is rejected, and only the first cause counts.
            let causes = [
                (event.bad_hashes > 0, Finding::BadHash),
                (event.has_bad_token, Finding::BadToken),
                (lacks_tokens, Finding::TokensMissing),
            ];
            if let Some((_, cause)) = causes.into_iter().find(|(is_so, _)| *is_so) {
                return Err(cause);
            }
        }
        if event.has_bad_token {
            report.findings.add(Finding::BadToken);
        } else if lacks_tokens {
            report.findings.add(Finding::TokensMissing);
        }
        note(event, report);
        Ok(n_blocks)
    }

    /// Converts a store in a lower tier. A connector announces blocks that the device mostly has, and often only their
    /// names, or tokens without salt and images. The content counts only if it is stated completely or follows from the
    /// parent; it is then used for names that no tier has.
    fn offloaded(
        &mut self,
        event: &WireEvent<'_>,
        tier: StorageTier,
        report: &mut Report,
    ) -> Result<Vec<(EngineHash, Option<BlockHash>)>, Finding> {
        if self.lists.hashes.is_empty() && event.bad_hashes > 0 {
            return Err(Finding::BadHash);
        }
        note(event, report);
        self.keep_block_names();
        let n_blocks = self.lists.hashes.len();
        let has_tokens = !event.has_bad_token && self.scheme().block_count(self.lists.tokens.len()) >= n_blocks;
        let states_keys = event.extra_keys.or(event.odd_keys[1]).is_some() || event.cache_salt.is_some();
        let mut blocks = Vec::with_capacity(n_blocks);
        if has_tokens && self.check_form(event).is_ok() && (event.parent.is_some() || states_keys) {
            self.hash(event, n_blocks, report, |namespaces, engine_hash, block_hash, namespace| {
                namespaces.offloaded(engine_hash.0, namespace, tier);
                blocks.push((engine_hash, Some(block_hash)));
            })?;
        } else {
            for &name in &self.lists.hashes {
                self.namespaces.offloaded(name, Namespace::default(), tier);
                blocks.push((EngineHash(name), None));
            }
        }
        Ok(blocks)
    }

    pub(super) fn scheme(&self) -> HashScheme<'static> {
        HashScheme { is_eagle: self.config.is_eagle, ..HashScheme::new(self.config.block_size) }
    }

    fn check_form(&self, event: &WireEvent<'_>) -> Result<(), Finding> {
        if event.block_size != Some(u64::from(self.config.block_size.get())) {
            return Err(Finding::BlockSize);
        }
        self.check_tokens(event)
    }

    /// EAGLE pairs contain the tokens of plain blocks, but not the reverse.
    pub(super) fn check_tokens(&self, event: &WireEvent<'_>) -> Result<(), Finding> {
        let lacks_pairs = self.config.is_eagle && event.token_form == TokenForm::Ids;
        if lacks_pairs { Err(Finding::Eagle) } else { Ok(()) }
    }

    /// Hashes the first blocks of a store. Calls `push` with the name, the hash and the namespace of each.
    fn hash(
        &mut self,
        event: &WireEvent<'_>,
        n_blocks: usize,
        report: &mut Report,
        mut push: impl FnMut(&mut Namespaces, EngineHash, BlockHash, Namespace),
    ) -> Result<(), Finding> {
        let (scheme, limits) = (self.scheme(), &self.config.limits);
        let names = &self.lists.hashes[..n_blocks];
        let parent = event.parent.map(|name| self.namespaces.of(name)).unwrap_or_default();
        let base = self.keys.read(event, n_blocks, parent, scheme, limits, &mut report.findings)?;
        if !(base.is_default() && self.keys.changes.is_empty()) {
            self.namespaces.room_for(names, limits.namespaces_max)?;
        }
        let mut start = 0;
        for (end, namespace) in self.keys.runs(base, n_blocks) {
            let objects = self.keys.objects(start, end);
            let tokens = &self.lists.tokens[start * self.config.block_size.get() as usize..];
            let hashes = BlockHasher::with_seed(scheme, namespace.seed()).hashes(tokens, &objects);
            for (name, block_hash) in names[start..end].iter().zip(hashes) {
                push(&mut self.namespaces, EngineHash(*name), block_hash, namespace);
            }
            start = end;
        }
        Ok(())
    }
}

fn is_local(event: &WireEvent<'_>) -> Result<(), Finding> {
    let is_local = event.locality.is_none_or(|locality| locality.eq_ignore_ascii_case(b"local"));
    if is_local { Ok(()) } else { Err(Finding::NonLocal) }
}

/// Counts the defects that affect only a part of the event.
fn note(event: &WireEvent<'_>, report: &mut Report) {
    report.findings.add_many(Finding::BadHash, event.bad_hashes);
    report.findings.add_many(Finding::WrongType, event.misplaced);
}
