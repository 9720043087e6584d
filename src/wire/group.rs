//! Cache groups: the role of each group of a hybrid model, learned from events.
//!
//! An engine with several attention types keeps one cache per group of equal layers and publishes events for each group,
//! with the same block hashes. The *main group* is the first one with full attention: its stores have the tokens of
//! every block and build the prefix tree. The groups *beside* it restrict a hit, each by a window: the number of blocks
//! before the end of the hit that the group must hold, or all if there are fewer. Full attention needs every block, a
//! sliding window of `w` tokens the blocks with the `w - 1` tokens before the next one, and a Mamba state the last block.
//!
//! Groups of an unknown type restrict nothing, and so does chunked local attention, whose chunk size is not in the
//! events. A model without full attention has a substitute: the first group that stores every block becomes the main
//! group. A hit then counts while its blocks are complete from the start, which is too strict for prompts beyond the
//! window.

use std::num::NonZeroU32;

use smallvec::SmallVec;

use super::event::{Lists, Tag, WireEvent};
use super::{Finding, GroupRecord};
use crate::protocol::{EngineHash, KvEvent, RouterEvent, StorageTier};

/// Number of remembered groups. No known engine has as many.
const GROUPS_MAX: usize = 64;

/// Window of full attention.
const ALL_BLOCKS: u32 = u32::MAX;

/// A group beside the main one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BesideGroup {
    pub(super) number: u8,
    pub(super) window_blocks: NonZeroU32,
}

/// Cache groups of one rank with a known type.
#[derive(Clone, Debug, Default)]
pub(super) struct Groups {
    known: SmallVec<[GroupRecord; 4]>,
    /// The first group of the batch that can replace the unknown main group.
    substitute: Option<u8>,
}

impl Groups {
    pub(super) fn resumed(records: &[GroupRecord]) -> Self {
        Self { known: records.iter().copied().collect(), substitute: None }
    }

    pub(super) fn records(&self) -> Vec<GroupRecord> {
        self.known.to_vec()
    }

    /// Remembers the type of a group from a store; removals do not state the window. A known type stays until the group has
    /// another known one. Returns true if the blocks held so far are no longer those of the main group: a group with full
    /// attention replaces the substitute, or the main group has another type.
    pub(super) fn learn(&mut self, event: &WireEvent<'_>, block_size: NonZeroU32) -> bool {
        let (Some(group), Some(kind), Tag::Stored) = (number(event), event.spec_kind, event.tag) else { return false };
        let window_blocks = window_blocks(kind, event.spec_window, block_size);
        let is_main = window_blocks == ALL_BLOCKS && self.main().is_none_or(|main| main.window_blocks != ALL_BLOCKS);
        let record = GroupRecord { group, window_blocks, is_main: false };
        let (at, had_main) = (self.known.iter().position(|known| known.group == group), self.main().is_some());
        match at {
            Some(at) if window_blocks > 0 && self.known[at].window_blocks != window_blocks => self.known[at] = record,
            Some(_) if !is_main => return false,
            Some(_) => {}
            None if self.known.len() == GROUPS_MAX => return false,
            None => self.known.push(record),
        }
        if is_main {
            self.known.iter_mut().for_each(|record| record.is_main = record.group == group);
        }
        had_main && (is_main || self.main().is_none())
    }

    /// The group of an event if it is beside the main one; `None` for the main group. While the main group is unknown,
    /// group 0 without a type is the main one. An event without a group belongs to the main group.
    ///
    /// # Errors
    /// [`Finding::NotMainAttention`] if the group has no effect on hits.
    pub(super) fn beside(&self, event: &WireEvent<'_>) -> Result<Option<BesideGroup>, Finding> {
        let known = number(event).and_then(|group| self.known.iter().find(|record| record.group == group));
        // Removals have no window.
        let is_odd = event.spec_kind.is_some_and(|kind| window_blocks(kind, Some(0), NonZeroU32::MIN) == 0);
        match (known, event.group_idx) {
            (Some(record), _) if is_odd && record.window_blocks > 0 => Err(Finding::NotMainAttention),
            (Some(record), _) if record.is_main => Ok(None),
            (Some(record), _) => match NonZeroU32::new(record.window_blocks) {
                Some(window_blocks) => Ok(Some(BesideGroup { number: record.group, window_blocks })),
                None => Err(Finding::NotMainAttention),
            },
            (None, Some(group)) if group > 0 || self.main().is_some() => Err(Finding::NotMainAttention),
            (None, _) if event.spec_kind.is_some_and(|kind| !is_full(kind)) => Err(Finding::NotMainAttention),
            (None, _) => Ok(None),
        }
    }

    /// Records a device store as a substitute for an unknown main group if it has every block of its tokens.
    pub(super) fn offer(&mut self, event: &WireEvent<'_>, lists: &Lists, block_size: NonZeroU32) {
        if event.spec_kind.is_some() && self.substitute.is_none() && self.main().is_none() {
            self.substitute = number(event).filter(|_| is_complete(event, lists, block_size));
        }
    }

    /// Replaces an unknown main group after a batch without a block of it. Returns whether the batch must be decoded
    /// again.
    pub(super) fn substitute(&mut self) -> bool {
        let group = self.substitute.take().filter(|_| self.main().is_none());
        let record = group.and_then(|group| self.known.iter_mut().find(|record| record.group == group));
        record.map(|record| record.is_main = true).is_some()
    }

    /// Moves a store of the main group at the start of a prompt before the stores of the groups with lower numbers, which
    /// precede it in the stream: the index recognises from the groups whether its blocks were held before.
    pub(super) fn put_main_first(&self, events: &mut [RouterEvent]) {
        let Some((RouterEvent { data: KvEvent::Stored { parent: None, .. }, .. }, before)) = events.split_last() else {
            return;
        };
        // Those of one prompt have ascending numbers.
        let mut next = self.main().map_or(0, |main| main.group);
        let lower = before.iter().rev().take_while(|event| match event.data {
            KvEvent::GroupStored { group, starts_prompt: true, .. } if group < next => {
                next = group;
                true
            }
            _ => false,
        });
        let lower = lower.count();
        let first = events.len() - 1 - lower;
        events[first..].rotate_right(1);
    }

    /// Whether the rank has groups beside the main one.
    pub(super) fn has_several(&self) -> bool {
        self.known.len() > 1
    }

    /// Whether the main group is a substitute for full attention.
    pub(super) fn is_substituted(&self) -> bool {
        self.main().is_some_and(|main| main.window_blocks != ALL_BLOCKS)
    }

    fn main(&self) -> Option<&GroupRecord> {
        self.known.iter().find(|record| record.is_main)
    }
}

impl BesideGroup {
    /// Converts a store, which may leave out blocks. An event without blocks still makes the group known to the index.
    ///
    /// # Errors
    /// [`Finding::NotMainAttention`] for another block size than the pool's.
    pub(super) fn stored(
        self,
        event: &WireEvent<'_>,
        lists: &Lists,
        block_size: NonZeroU32,
    ) -> Result<KvEvent, Finding> {
        if event.block_size != Some(u64::from(block_size.get())) {
            return Err(Finding::NotMainAttention);
        }
        let Self { number: group, window_blocks } = self;
        let blocks = lists.hashes.iter().copied().map(EngineHash).collect();
        Ok(KvEvent::GroupStored { group, window_blocks, starts_prompt: event.parent.is_none(), blocks })
    }
}

/// The list of a removal from the same tier and group.
pub(super) fn removed_before(
    event: &mut RouterEvent,
    in_tier: StorageTier,
    from_group: Option<u8>,
) -> Option<&mut Vec<EngineHash>> {
    match &mut event.data {
        KvEvent::Removed { blocks } if event.tier == in_tier && from_group.is_none() => Some(blocks),
        KvEvent::GroupRemoved { group, blocks } if from_group == Some(*group) => Some(blocks),
        _ => None,
    }
}

/// Whether a store has the pool's block size and every block of its tokens. Groups with a window leave out blocks that
/// no hit needs, and their events do not contain the positions of the others.
pub(super) fn is_complete(event: &WireEvent<'_>, lists: &Lists, block_size: NonZeroU32) -> bool {
    let block_size = block_size.get() as usize;
    event.block_size == Some(block_size as u64)
        && !lists.hashes.is_empty()
        && lists.tokens.len() == lists.hashes.len() * block_size
}

/// Number of the group of an event, unless it is too high to be remembered.
fn number(event: &WireEvent<'_>) -> Option<u8> {
    event.group_idx.and_then(|group| u8::try_from(group).ok())
}

fn is_full(kind: &[u8]) -> bool {
    matches!(kind, b"full_attention" | b"mla_attention" | b"sink_full_attention")
}

/// Window of a group in blocks; 0 if the events do not describe it.
fn window_blocks(kind: &[u8], window_tokens: Option<u64>, block_size: NonZeroU32) -> u32 {
    match (kind, window_tokens) {
        (b"mamba", _) => 1,
        (b"sliding_window" | b"sliding_window_mla", Some(tokens)) => {
            let blocks = tokens.saturating_sub(1).div_ceil(u64::from(block_size.get())).max(1);
            u32::try_from(blocks).unwrap_or(ALL_BLOCKS - 1).min(ALL_BLOCKS - 1)
        }
        (kind, _) if is_full(kind) => ALL_BLOCKS,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK_SIZE: NonZeroU32 = NonZeroU32::new(4).expect("not zero");

    fn event(group: impl Into<Option<u64>>, kind: Option<&[u8]>) -> WireEvent<'_> {
        let mut event = WireEvent::default();
        (event.tag, event.group_idx, event.spec_kind, event.spec_window) = (Tag::Stored, group.into(), kind, Some(9));
        event
    }

    fn learn(groups: &mut Groups, group: u64, kind: &[u8]) -> Result<Option<(u8, u32)>, Finding> {
        let event = event(group, Some(kind));
        groups.learn(&event, BLOCK_SIZE);
        groups.beside(&event).map(|beside| beside.map(|group| (group.number, group.window_blocks.get())))
    }

    #[test]
    fn a_main_store_moves_before_the_groups_of_its_own_prompt_only() {
        let mut groups = Groups::default();
        _ = [(0, &b"mamba"[..]), (1, b"sliding_window"), (2, b"full_attention")]
            .map(|(group, kind)| learn(&mut groups, group, kind));
        let of_group = |group| KvEvent::GroupStored {
            group,
            window_blocks: NonZeroU32::MIN,
            starts_prompt: true,
            blocks: Vec::new(),
        };
        let main = || KvEvent::Stored { parent: None, blocks: Vec::new() };
        let mut events = Vec::new();
        for data in [of_group(0), of_group(1), main(), of_group(0), of_group(1), main()] {
            events.push(RouterEvent { rank: crate::test_support::rank(0), tier: StorageTier::Device, data });
            groups.put_main_first(&mut events);
        }
        let data: Vec<_> = events.into_iter().map(|event| event.data).collect();
        assert_eq!(data, [main(), of_group(0), of_group(1), main(), of_group(0), of_group(1)]);
    }
}
