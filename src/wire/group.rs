//! Cache groups: which blocks are the main attention's.
//!
//! Owns what was learned of an engine's groups. Engines with several kinds of attention keep a cache group for each,
//! and tell of each, under the same block hashes. Requests are matched by the main attention's blocks only.

/// What stores have said about the groups of one rank.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Groups {
    /// One bit for each group that was seen as main attention.
    main: u64,
    /// Likewise as another kind.
    other: u64,
}

impl Groups {
    /// Whether an event is about the main attention. A kind decides and is remembered; without one what was learned
    /// of the group; without that, the first group is the main one, and an event that names none is of it.
    pub(super) fn is_main(&mut self, group_idx: Option<u64>, spec_kind: Option<&[u8]>) -> bool {
        // Groups from 64 on, which nobody has, are known only by their kind.
        let bit = group_idx.and_then(|idx| 1_u64.checked_shl(u32::try_from(idx).ok()?)).unwrap_or(0);
        match (spec_kind, group_idx) {
            (Some(b"full_attention" | b"mla_attention" | b"sink_full_attention"), _) => {
                (self.main, self.other) = (self.main | bit, self.other & !bit);
                true
            }
            (Some(_), _) => {
                (self.main, self.other) = (self.main & !bit, self.other | bit);
                false
            }
            (None, _) if self.main & bit != 0 => true,
            (None, _) if self.other & bit != 0 => false,
            (None, idx) => idx.is_none_or(|idx| idx == 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_remembered_for_events_without() {
        let mut groups = Groups::default();
        assert!(groups.is_main(None, None) && groups.is_main(Some(0), None));
        assert!(!groups.is_main(Some(1), None) && !groups.is_main(Some(u64::MAX), None));
        assert!(!groups.is_main(Some(0), Some(b"sliding_window")));
        assert!(groups.is_main(Some(1), Some(b"mla_attention")));
        assert!(!groups.is_main(Some(0), None));
        assert!(groups.is_main(Some(1), None));
        assert!(groups.is_main(Some(70), Some(b"full_attention")) && !groups.is_main(Some(70), None));
    }
}
