//! Framing of a batch: its time, its events and its rank label.

use super::decoder::Decoder;
use super::finding::Output;
use super::msgpack::{Cursor, MsgpackItem};
use super::{Finding, Report};
use crate::protocol::RouterEvent;

impl Decoder {
    pub(super) fn batch(&mut self, payload: &[u8], events: &mut Vec<RouterEvent>) -> Report {
        let mut output = Output { n_before: events.len(), events, report: Report::default() };
        if payload.len() > self.config.limits.payload_bytes_max {
            self.lose(Finding::TooLarge, None, &mut output);
        } else if let Err(finding) = self.items(Cursor::new(payload), &mut output) {
            match finding {
                Finding::ForeignRank => output.report.findings.add(finding),
                lost => self.lose(lost, None, &mut output),
            }
        }
        output.report
    }

    fn items(&mut self, mut cursor: Cursor<'_>, output: &mut Output<'_>) -> Result<(), Finding> {
        let MsgpackItem::Array(n_items) = cursor.item()? else { return Err(Finding::WrongType) };
        if n_items < 2 {
            return Err(Finding::WrongShape);
        }
        self.pass_time(&mut cursor, &mut output.report)?;
        let MsgpackItem::Array(n_events) = cursor.item()? else { return Err(Finding::WrongType) };
        output.report.events = n_events;
        if n_items == 2 {
            self.events(n_events, &mut cursor, output)?;
        } else {
            self.events_of_rank(n_events, &mut cursor, output)?;
        }
        self.pass(u64::from(n_items).saturating_sub(3), &mut cursor)?;
        if cursor.bytes_left() > 0 {
            output.report.findings.add(Finding::TrailingBytes);
        }
        Ok(())
    }

    /// Decodes the events and the rank label of a batch. The label follows the events, so for a foreign rank the
    /// decoded events are rolled back. Skipping the events first to read the label would cost every batch almost half
    /// as much again; pages cannot be rolled back.
    fn events_of_rank(
        &mut self,
        n_events: u32,
        cursor: &mut Cursor<'_>,
        output: &mut Output<'_>,
    ) -> Result<(), Finding> {
        let (groups, has_connector) = (self.groups.clone(), self.has_connector);
        let (has_blocks, is_folding) = (self.has_blocks, self.fold.is_some());
        let mut ahead = *cursor;
        let is_skipped = self.config.ranks.len() > 1
            && is_folding
            && self.pass(n_events.into(), &mut ahead).is_ok()
            && matches!(self.foreign_rank(&mut { ahead }, &mut Report::default()), Ok(Some(_)));
        if is_skipped {
            *cursor = ahead;
        } else if self.config.ranks.len() > 1 {
            self.namespaces.start_batch();
        }
        let read = if is_skipped { Ok(()) } else { self.events(n_events, cursor, output) };
        // A batch that is truncated before its label counts as a batch of the stream's rank.
        let foreign = read.and_then(|()| self.foreign_rank(cursor, &mut output.report));
        if let Ok(Some(rank)) = foreign {
            output.events.truncate(output.n_before);
            (self.groups, self.has_connector, self.has_blocks) = (groups, has_connector, has_blocks);
            self.fold.take_if(|_| !is_folding);
            self.namespaces.roll_back();
            output.report = Report { events: n_events, foreign_rank: Some(rank), ..Report::default() };
            return Err(Finding::ForeignRank);
        }
        self.namespaces.commit();
        foreign.map(|_| ())
    }

    fn events(&mut self, n_events: u32, cursor: &mut Cursor<'_>, output: &mut Output<'_>) -> Result<(), Finding> {
        let n_read = n_events.min(u32::try_from(self.config.limits.events_max).unwrap_or(u32::MAX));
        for _ in 0..n_read {
            self.event(cursor, output)?;
        }
        if n_read < n_events {
            self.lose(Finding::TooLarge, None, output);
        }
        self.pass(u64::from(n_events - n_read), cursor)
    }

    /// The batch timestamp is unused, but an invalid type is counted because it helps to identify the publisher.
    fn pass_time(&self, cursor: &mut Cursor<'_>, report: &mut Report) -> Result<(), Finding> {
        let start = *cursor;
        match cursor.item()? {
            MsgpackItem::Float(time) if time.is_finite() => {}
            MsgpackItem::Float(_) => report.findings.add(Finding::NotFinite),
            MsgpackItem::Nil | MsgpackItem::Uint(_) | MsgpackItem::Neg(_) => {}
            MsgpackItem::Bool(_)
            | MsgpackItem::Str(_)
            | MsgpackItem::Bin(_)
            | MsgpackItem::Ext(_)
            | MsgpackItem::Array(_)
            | MsgpackItem::Map(_) => {
                self.pass_wrong_type(start, cursor, report)?;
            }
        }
        Ok(())
    }

    /// The rank label of the batch if it differs from the stream's rank. For a worker with a single rank the label is
    /// ignored.
    fn foreign_rank(&self, cursor: &mut Cursor<'_>, report: &mut Report) -> Result<Option<u32>, Finding> {
        let start = *cursor;
        let rank = match cursor.item()? {
            MsgpackItem::Nil => None,
            MsgpackItem::Uint(rank) => Some(u32::try_from(rank).unwrap_or(u32::MAX)),
            MsgpackItem::Neg(_) => Some(u32::MAX),
            MsgpackItem::Bool(_)
            | MsgpackItem::Float(_)
            | MsgpackItem::Str(_)
            | MsgpackItem::Bin(_)
            | MsgpackItem::Ext(_)
            | MsgpackItem::Array(_)
            | MsgpackItem::Map(_) => {
                self.pass_wrong_type(start, cursor, report)?;
                None
            }
        };
        Ok(rank.filter(|rank| self.config.ranks.len() > 1 && *rank != self.config.rank.rank))
    }

    /// Counts and skips the item at `start`, which has another type than expected.
    fn pass_wrong_type<'a>(
        &self,
        start: Cursor<'a>,
        cursor: &mut Cursor<'a>,
        report: &mut Report,
    ) -> Result<(), Finding> {
        report.findings.add(Finding::WrongType);
        *cursor = start;
        self.pass(1, cursor)
    }

    /// Skips unused items at any depth.
    pub(super) fn pass(&self, count: u64, cursor: &mut Cursor<'_>) -> Result<(), Finding> {
        let passed = cursor.pass(count, self.config.limits.nesting_max);
        passed.or_else(|finding| if finding.ends_batch() { Err(finding) } else { Ok(()) })
    }
}
