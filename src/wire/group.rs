//! Cache groups: detection of the main attention's blocks.
//!
//! Engines with several attention types keep one cache group per type and publish events for each group with the same
//! block hashes. Requests are matched with the blocks of the main attention only. This module remembers the type of
//! each group.

/// Attention types of one rank's cache groups, learned from events.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Groups {
    /// One bit per group known as main attention.
    pub(super) main: u64,
    /// One bit per group known as another type.
    pub(super) other: u64,
}

impl Groups {
    /// Whether an event is about the main attention. An explicit type decides and is remembered. Without a type, the
    /// remembered type of the group decides. For an unknown group, only the first group is main attention; an event
    /// without a group belongs to it.
    pub(super) fn is_main(&mut self, group_idx: Option<u64>, spec_kind: Option<&[u8]>) -> bool {
        // The types of groups from 64 on are not remembered; no known engine has so many.
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
    fn types_are_remembered_for_events_without_a_type() {
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
