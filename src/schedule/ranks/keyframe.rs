//! The state of all ranks in a keyframe.

use super::Ranks;
use crate::record::bytes::{Reader, Recorded, put_number};
use crate::schedule::rank::Rank;
use crate::schedule::rank_status::RankStatus;

impl Ranks {
    /// Whether there are no columns, or they are those of the last refresh, so that a keyframe changes nothing.
    pub(crate) fn columns_are_fresh(&self) -> bool {
        self.columns.as_ref().is_none_or(|columns| columns.epoch() == self.refreshed_at)
    }

    /// Writes the state. Columns are rebuilt, here and by [`read`](Self::read), unless the refresh has just done so.
    pub(crate) fn put(&mut self, to: &mut Vec<u8>) {
        if !self.columns_are_fresh() {
            self.rebuild_columns();
        }
        self.refreshed_at.put(to);
        self.typical.put(to);
        self.touched.put(to);
        put_number(to, self.all.len() as u64);
        for (rank, status) in self.all.iter().zip(&self.statuses) {
            put_number(to, status.to_bits());
            rank.put(to);
        }
    }

    /// Replaces the state by a written one. `None` if the bytes are malformed.
    pub(crate) fn read(&mut self, from: &mut Reader<'_>) -> Option<()> {
        self.refreshed_at = Recorded::read(from)?;
        self.typical = Recorded::read(from)?;
        self.touched = Recorded::read(from)?;
        let ranks = from.list(|from| Some((RankStatus::from_bits(from.number()?), Rank::read(from)?)))?;
        (self.statuses, self.all) = ranks.into_iter().unzip();
        let is_sorted = self.all.is_sorted_by(|a, b| a.rank < b.rank);
        let slots_fit = self.all.iter().all(|rank| rank.slot().index() < SLOTS_MAX);
        (is_sorted && slots_fit).then_some(())?;
        self.look_for_trouble();
        self.index();
        Some(())
    }

    pub(crate) fn put_statuses(&self, to: &mut Vec<u8>) {
        put_number(to, self.statuses.len() as u64);
        self.statuses.iter().for_each(|status| put_number(to, status.to_bits()));
    }

    /// Replaces the statuses, except that the own ranks keep whether they are returning: statuses may have been written
    /// after the refresh that ends a return, which the reader performs later, and with it sets the cost factor to 1. What
    /// begins a return is in keyframes. `None` if there is not one status per rank.
    pub(crate) fn read_statuses(&mut self, from: &mut Reader<'_>) -> Option<()> {
        let statuses = from.list(|from| from.number().map(RankStatus::from_bits))?;
        (statuses.len() == self.all.len()).then_some(())?;
        for (own, status) in self.statuses.iter_mut().zip(statuses) {
            *own = RankStatus { returning: own.returning, ..status };
        }
        self.look_for_trouble();
        Some(())
    }
}

/// Bound of slots in a record, so that damaged bytes cause no large table.
pub(crate) const SLOTS_MAX: usize = 1 << 20;
