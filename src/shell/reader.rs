//! Shell of the reader of a rank's KV events: the source, its decoder, and snapshots of both.
//!
//! Connections, replays, audits and their errors belong to the task of the reader: they are made of waiting, and the
//! decisions about them are inputs and effects of [`Source`].

use std::collections::VecDeque;

use super::Defect;
use crate::ingest::{IngestEffect, IngestInput, Note, Source, SourceConfig, StreamState};
use crate::protocol::{RouterEvent, Timestamp, WorkerRank};
use crate::snapshot::RankSnapshot;
use crate::wire::{Decoder, Finding, Findings, Report, WireConfig};

/// Effect of a step.
#[expect(clippy::large_enum_variant, reason = "an `Apply` is as frequent as the others, and a box costs more")]
pub enum ReaderEffect<P> {
    /// Send the events to the shard.
    Apply {
        /// Sequence number of their message.
        sequence: u64,
        /// The message.
        payload: P,
        /// The events; possibly none.
        events: Vec<RouterEvent>,
        /// Report of the decoder.
        report: Report,
    },
    /// Remove the blocks of the rank from the index.
    Clear,
    /// Request a replay of all messages from this number on, in place of a running one.
    Replay {
        /// First requested number.
        from: u64,
    },
    /// Replace the subscription.
    Reconnect,
    /// The state of the stream has changed.
    State(StreamState),
    /// Count this note.
    Noted(Note),
}

/// Shell of a reader; `P` is an undecoded message. See the module documentation.
pub struct ReaderShell<P> {
    source: Source<P>,
    decoder: Decoder,
    config: SourceConfig,
    wire: WireConfig,
    effects: Vec<IngestEffect<P>>,
    wanted: VecDeque<IngestEffect<P>>,
    /// Events since the blocks of the rank were last removed, and the findings in them.
    events: u64,
    findings: Findings,
}

impl<P: AsRef<[u8]>> ReaderShell<P> {
    /// A reader that has read nothing. The index must have no blocks of the rank.
    pub fn new(config: SourceConfig, wire: WireConfig, now: Timestamp) -> Self {
        let (source, decoder) = (Source::new(config, now), Decoder::new(wire.clone()));
        let (events, findings) = (0, Findings::default());
        Self { source, decoder, config, wire, effects: Vec::new(), wanted: VecDeque::new(), events, findings }
    }

    /// Passes an input to the source. The effects follow from [`ReaderShell::next_effect`].
    pub fn step(&mut self, input: IngestInput<P>, now: Timestamp) {
        if !matches!(input, IngestInput::Resync) || !Defect::ResyncIgnored.is_planted() {
            self.source.step(input, now, &mut self.effects);
        }
    }

    /// The next effect, including those that follow from the results of earlier ones.
    pub fn next_effect(&mut self, now: Timestamp) -> Option<ReaderEffect<P>> {
        self.wanted.extend(self.effects.drain(..));
        Some(match self.wanted.pop_front()? {
            IngestEffect::Apply { sequence, payload } => {
                let mut events = Vec::new();
                let report = self.decoder.decode(payload.as_ref(), &mut events);
                self.events += u64::from(report.events);
                self.findings += report.findings;
                self.step(IngestInput::Applied(report), now);
                if sequence % 7 == 3 && Defect::MessageSkipped.is_planted() {
                    events.clear();
                }
                ReaderEffect::Apply { sequence, payload, events, report }
            }
            IngestEffect::Clear => {
                self.forget();
                ReaderEffect::Clear
            }
            IngestEffect::Replay { from } => {
                ReaderEffect::Replay { from: from + u64::from(Defect::ReplayBeginsLate.is_planted()) }
            }
            IngestEffect::Reconnect => ReaderEffect::Reconnect,
            IngestEffect::State(state) => ReaderEffect::State(state),
            IngestEffect::Noted(note) => ReaderEffect::Noted(note),
        })
    }

    /// Forgets the state of the decoder, because the blocks of the rank are removed from the index.
    pub fn forget(&mut self) {
        self.decoder.forget();
        (self.events, self.findings) = (0, Findings::default());
    }

    /// The findings that cost hits, in at least one of a hundred events; `None` without any.
    pub fn unused(&self) -> Option<String> {
        let is_frequent = |(finding, count): &(Finding, u64)| finding.costs_hits() && count * 100 >= self.events;
        let frequent = self.findings.iter().filter(is_frequent);
        let named: Vec<_> = frequent.map(|(finding, count)| format!("{count} {}", finding.name())).collect();
        let events = self.events;
        (!named.is_empty())
            .then(|| format!("of {events} events, {} name blocks that no request finds", named.join(", ")))
    }

    /// Whether the blocks of the rank are folded from parts, so that their names in the index are a part of the engine's.
    pub fn is_folding(&self) -> bool {
        self.decoder.is_folding()
    }

    /// Position of the source and identity of the rank, without contents; `None` without a position, or if the decoder
    /// keeps tokens.
    pub fn record(&self, rank: WorkerRank, endpoint: String) -> Option<RankSnapshot> {
        let mut position = self.source.position().filter(|_| !self.is_folding())?;
        position.next += u64::from(Defect::PositionAhead.is_planted());
        Some(RankSnapshot {
            rank,
            endpoint,
            position,
            decoder: self.decoder.state(),
            events: Vec::new(),
            evicted_blocks: 0,
        })
    }

    /// Continues from a snapshot, whose contents replace those of the rank. Returns false, without any change, if the
    /// publisher cannot be verified for lack of a replay endpoint, or the present contents are complete or newer.
    pub fn restore(&mut self, snapshot: &RankSnapshot, now: Timestamp) -> bool {
        let is_superseded = self.source.is_caught_up() && !self.source.is_cold()
            || self.source.position().is_some_and(|present| !snapshot.position.is_newer_than(&present));
        if is_superseded || !self.config.has_replay {
            return false;
        }
        self.source = Source::resume(self.config, now, &snapshot.position);
        self.decoder = Decoder::resume(self.wire.clone(), &snapshot.decoder);
        self.effects.clear();
        true
    }

    /// The source.
    pub fn source(&self) -> &Source<P> {
        &self.source
    }
}
