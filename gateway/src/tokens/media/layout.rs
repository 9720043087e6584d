//! Expansion of placeholder tokens, and the positions of media items.
//!
//! Up to the first item that is not known exactly, tokens and spans equal those of the engine. The rest has the
//! estimated length, so that the load is counted, and a span with a hash of its own, so that no block of it matches.

use std::sync::Arc;

use pointsman::hashing::MmSpan;

use super::lengths::{LengthReport, MediaLengths};
use super::placeholders::Placeholders;
use super::{MediaItem, MediaKind};

/// Limit of a prompt with estimated items, in tokens.
const TOKENS_MAX: usize = 1 << 20;

/// A prompt with media.
#[derive(Debug)]
pub(in crate::tokens) struct MediaLayout {
    /// The tokens.
    pub(in crate::tokens) ids: Vec<u32>,
    /// The items, and the part that matches no cache.
    pub(in crate::tokens) spans: Vec<MmSpan>,
    /// First token of the part that matches no cache; `None` if all items are known exactly.
    pub(in crate::tokens) unknown_from: Option<usize>,
    /// Receiver of the prompt length reported by the engine; `None` if it determines no item.
    pub(in crate::tokens) report: Option<LengthReport>,
}

/// Hash of an item with a known name.
fn hash_of(item: &MediaItem) -> Option<u64> {
    item.name.as_deref().and_then(MmSpan::hash_of_id)
}

impl MediaLayout {
    /// Expands the placeholders of the template's tokens. `is_in_order`: the placeholders have the order of the items.
    /// `None` if the template emitted no placeholder.
    pub(in crate::tokens) fn of(
        template_ids: &[u32],
        items: &[MediaItem],
        placeholders: &Placeholders,
        is_in_order: bool,
        lengths: &Arc<MediaLengths>,
    ) -> Option<Self> {
        let positions: Vec<usize> =
            (0..template_ids.len()).filter(|at| placeholders.all.contains(&template_ids[*at])).collect();
        if positions.is_empty() {
            return None;
        }
        // A literal placeholder in a client's text, or a template that omits items.
        let is_one_to_one = is_in_order
            && positions.len() == items.len()
            && positions.iter().zip(items).all(|(position, item)| {
                (item.kind == MediaKind::Image) == (Some(template_ids[*position]) == placeholders.image)
            });
        let mut layout = Self { ids: Vec::new(), spans: Vec::new(), unknown_from: None, report: None };
        let mut copied = 0;
        for (n, position) in positions.iter().enumerate() {
            layout.ids.extend_from_slice(&template_ids[copied..*position]);
            copied = position + 1;
            let placeholder = template_ids[*position];
            let item = items.get(n).filter(|_| is_one_to_one);
            let mm_hash = item.filter(|item| item.kind == MediaKind::Image).and_then(hash_of);
            layout.add(placeholder, mm_hash, lengths, placeholders.image == Some(placeholder));
        }
        layout.ids.extend_from_slice(&template_ids[copied..]);
        if let Some(start) = layout.unknown_from {
            let (mm_hash, end) = (lengths.unique_hash(), layout.ids.len());
            layout.spans.push(MmSpan { mm_hash, start, end });
        }
        if is_one_to_one {
            layout.report = report(template_ids.len() - positions.len(), items, lengths);
        }
        Some(layout)
    }

    /// Appends an item.
    fn add(&mut self, placeholder: u32, mm_hash: Option<u64>, lengths: &MediaLengths, is_repeated: bool) {
        let start = self.ids.len();
        let known = mm_hash.and_then(|mm_hash| Some((mm_hash, lengths.get(mm_hash)? as usize)));
        let length = known.map_or_else(|| lengths.mean() as usize, |(_, length)| length);
        let fits = start + length <= TOKENS_MAX;
        let length = if fits { length } else { 1 };
        self.ids.resize(start + length, placeholder);
        match known.filter(|_| fits) {
            Some((mm_hash, _)) if self.unknown_from.is_none() => {
                self.spans.push(MmSpan { mm_hash, start, end: start + length });
            }
            // A structured expansion may merge with the token before it.
            _ if self.unknown_from.is_none() => {
                self.unknown_from = Some(if is_repeated { start } else { start.saturating_sub(1) });
            }
            _ => {}
        }
    }
}

/// The report of a prompt with `text_tokens` tokens besides the items, if it shows the length of one item.
fn report(text_tokens: usize, items: &[MediaItem], lengths: &Arc<MediaLengths>) -> Option<LengthReport> {
    if items.iter().any(|item| item.kind != MediaKind::Image) {
        return None;
    }
    let hashes: Vec<Option<u64>> = items.iter().map(hash_of).collect();
    let is_known = |hash: &Option<u64>| hash.and_then(|hash| lengths.get(hash)).map(|length| length as usize);
    // A single known item is confirmed or corrected.
    let subject = *hashes.iter().find(|hash| is_known(hash).is_none()).or(hashes.first())?;
    let mut known_tokens = text_tokens;
    let mut n_items = 0;
    for hash in &hashes {
        if *hash == subject {
            n_items += 1;
        } else {
            known_tokens += is_known(hash)?;
        }
    }
    Some(LengthReport { lengths: Arc::clone(lengths), mm_hash: subject, known_tokens, n_items })
}
