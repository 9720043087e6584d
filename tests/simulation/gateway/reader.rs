//! Readers of KV events: start of the shipped shell, subscription and replay.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use pointsman::internals::protocol::Slot;
use pointsman::internals::shell::reader::{ReaderEffect, ReaderShell};
use pointsman::internals::shell::shard::ShardMsg;
use pointsman::internals::wire::{DecoderLimits, WireConfig};
use pointsman::protocol::{KvEvent, RouterEvent, StorageTier, WorkerRank};
use pointsman::{
    Backoff, RouterConfig, Snapshot, StreamState,
    internals::ingest::{IngestInput, SourceConfig},
    internals::snapshot::{RankSnapshot, SnapshotLayout},
};

use super::{Entry, Gateway, Surroundings};
use crate::letter::{Letter, Payload, Tag, ToShard};
use crate::net::{Actor, Place};

/// Contents of one rank in a snapshot, with the state of the cache that they equal.
#[derive(Clone)]
pub(crate) struct Recorded {
    pub(crate) snapshot: RankSnapshot,
    pub(crate) tag: Tag,
}

pub(super) struct Reader {
    number: u64,
    entry: Rc<Entry>,
    pub(super) shell: ReaderShell<Payload>,
    config: SourceConfig,
    backoff: Backoff,
    /// Number of the last connection, and whether it is up.
    connection: u64,
    is_up: bool,
    replay: u64,
    /// Messages that wait for room in the source.
    unread: VecDeque<(u64, u64, Payload)>,
    /// Applied messages since the last clear.
    tag: Option<Tag>,
    /// Whether messages from a dead connection were applied behind a replay of the restarted engine. No message shows
    /// this before the next end check, which clears the rank.
    is_mixed: bool,
    tick_at: Option<pointsman::protocol::Timestamp>,
}

/// Limits of a source that end the recovery of every loss within seconds.
fn source_config(has_replay: bool, capacity_blocks: usize) -> SourceConfig {
    SourceConfig {
        has_replay,
        held_messages_max: 4,
        held_bytes_max: 8_192,
        remembered_max: 32,
        silent_after: Duration::from_secs(2),
        cold_heals_after: Duration::from_secs(8),
        replay_timeout: Duration::from_millis(800),
        end_check_after: Duration::from_millis(500),
        end_check_interval: Duration::from_millis(1_500),
        capacity_blocks: Some(capacity_blocks as u32),
        block_size: Some(crate::prompt::BLOCK_SIZE),
        seed: 1,
    }
}

/// The contents of a written snapshot, as a new process reads them.
pub(super) fn restored(disk: &BTreeMap<WorkerRank, Recorded>, config: &RouterConfig) -> BTreeMap<WorkerRank, Recorded> {
    let layout = SnapshotLayout::of(config, config.block_size_or_assumed());
    let ranks = disk.values().map(|recorded| recorded.snapshot.clone()).collect();
    let bytes = Snapshot { layout: layout.clone(), created_ms: 1, ranks }.encode();
    let read = Snapshot::decode(&bytes).expect("a written snapshot is valid");
    read.check_layout(&layout).expect("the layout is the same");
    let tag = |rank| disk[&rank].tag;
    read.ranks.into_iter().map(|snapshot| (snapshot.rank, Recorded { tag: tag(snapshot.rank), snapshot })).collect()
}

impl Gateway {
    pub(super) fn start_reader(&mut self, slot: Slot, around: &mut Surroundings<'_>) {
        let Some(entry) = self.entry(slot).cloned() else { return };
        self.readers_started += 1;
        let config = source_config(self.settings.has_replay, self.settings.capacity_blocks);
        let ranks = self.membership().worker_at(slot).map_or(1, |worker| worker.config.data_parallel_size);
        let wire = WireConfig {
            rank: entry.rank,
            ranks: 0..ranks,
            block_size: self.settings.config.block_size_nonzero(),
            is_eagle: false,
            limits: DecoderLimits::default(),
        };
        let mut reader = Reader {
            number: self.readers_started,
            shell: ReaderShell::new(config, wire, around.net.now),
            config,
            backoff: Backoff::new(config.seed),
            connection: 0,
            is_up: false,
            replay: 0,
            unread: VecDeque::new(),
            tag: None,
            is_mixed: false,
            tick_at: None,
            entry,
        };
        entry_credit(&reader);
        self.clear(&mut reader, around);
        if let Some(Recorded { snapshot, tag }) = self.restores.remove(&reader.entry.rank)
            && reader.shell.restore(&snapshot, around.net.now)
        {
            reader.tag = Some(tag);
            // A snapshot without blocks: the shard ignores a message without events, and its expectation needs the tag.
            let is_empty = snapshot.events.is_empty();
            let events = if is_empty { vec![cleared(reader.entry.rank)] } else { snapshot.events };
            self.apply(&reader, events, around);
        }
        let place = self.place(Actor::Reader(slot.0, reader.number));
        around.net.after(Duration::from_millis(1), place, Letter::Connect);
        self.readers.insert(slot, reader);
    }

    /// Sends events to the shard, on the channel of the supervisor: what starts and stops readers precedes their events.
    fn apply(&self, reader: &Reader, events: Vec<RouterEvent>, around: &mut Surroundings<'_>) {
        let Entry { rank, slot, generation, .. } = *reader.entry;
        let tag = reader.tag.filter(|_| !reader.is_mixed);
        let msg = ShardMsg::Apply { events, only: Some((slot, generation)), permit: () };
        let letter = Letter::Shard(Box::new(ToShard::Step(msg, tag)));
        self.send(Actor::Supervisor, Actor::Shard(self.shard_of(rank)), letter, around);
    }

    /// Removes the blocks of the rank, and the state of the decoder.
    fn clear(&self, reader: &mut Reader, around: &mut Surroundings<'_>) {
        reader.shell.forget();
        reader.is_mixed = false;
        let (engine, rank) = reader.entry.engine();
        reader.tag = Some(Tag { engine, rank, life: 0, next: 0, is_exact: true });
        self.apply(reader, vec![cleared(reader.entry.rank)], around);
    }

    /// Removes the blocks of a rank that is no longer read.
    pub(super) fn clear_unread(&self, slot: Slot, around: &mut Surroundings<'_>) {
        let Some(entry) = self.entry(slot) else { return };
        let only = Some((slot, entry.generation));
        let msg = ShardMsg::Apply { events: vec![cleared(entry.rank)], only, permit: () };
        self.send(Actor::Supervisor, Actor::Shard(self.shard_of(entry.rank)), Letter::shard(msg), around);
    }

    /// The engine of a rank has computed a prompt.
    pub(super) fn served(&self, entry: &Entry, from: Actor, around: &mut Surroundings<'_>) {
        if let Some(reader) = self.readers.get(&entry.slot).filter(|reader| reader.shell.source().awaits_served()) {
            self.send(from, Actor::Reader(entry.slot.0, reader.number), Letter::Served, around);
        }
    }

    pub(super) fn reader_place(&self, slot: Slot) -> Option<Actor> {
        self.readers.get(&slot).map(|reader| Actor::Reader(slot.0, reader.number))
    }

    pub(super) fn on_reader(&mut self, slot: Slot, number: u64, letter: Letter, around: &mut Surroundings<'_>) {
        if self.readers.get(&slot).is_none_or(|reader| reader.number != number) {
            return;
        }
        let Some(mut reader) = self.readers.remove(&slot) else { return };
        let me = self.place(Actor::Reader(slot.0, number));
        let input = match letter {
            Letter::Connect => {
                reader.connection += 1;
                let (engine, rank) = reader.entry.engine();
                let letter = Letter::Subscribe { reader: me, rank, connection: reader.connection };
                around.net.send(me, Place::Engine(engine), letter);
                None
            }
            Letter::Connected(connection) if connection == reader.connection => {
                reader.is_up = true;
                Some(IngestInput::Connected)
            }
            Letter::Closed(connection) if connection == reader.connection => {
                let was_up = std::mem::replace(&mut reader.is_up, false);
                reader.unread.clear();
                around.net.after(reader.backoff.next_delay(), me, Letter::Connect);
                was_up.then_some(IngestInput::Disconnected)
            }
            Letter::Live { connection, sequence, payload } => {
                if connection == reader.connection && reader.is_up {
                    reader.unread.push_back((connection, sequence, payload));
                    // The socket drops what exceeds its queue.
                    reader.unread.truncate(8);
                }
                None
            }
            Letter::Replayed { replay, sequence, payload } if replay == reader.replay => {
                Some(IngestInput::Replayed { sequence, payload })
            }
            Letter::ReplayEnded(replay) if replay == reader.replay => Some(IngestInput::ReplayEnded),
            Letter::ReplayFailed(replay) if replay == reader.replay => Some(IngestInput::ReplayFailed),
            Letter::Tick => {
                reader.tick_at = None;
                Some(IngestInput::Tick)
            }
            Letter::Resync => {
                self.clear(&mut reader, around);
                Some(IngestInput::Resync)
            }
            Letter::Served => Some(IngestInput::Served),
            Letter::TakeSnapshot => {
                self.record_contents(&reader, around);
                None
            }
            _ => None, // of an earlier connection or replay
        };
        if let Some(input) = input {
            self.step_source(&mut reader, input, around);
        }
        while reader.shell.source().wants_live()
            && let Some((_, sequence, payload)) = reader.unread.pop_front()
        {
            reader.backoff.reset();
            self.step_source(&mut reader, IngestInput::Live { sequence, payload }, around);
        }
        if let Some(at) = reader.shell.source().next_tick()
            && reader.tick_at.is_none_or(|armed| at < armed)
        {
            reader.tick_at = Some(at);
            around.net.after(at.since(around.net.now), me, Letter::Tick);
        }
        reader.shell.source().check_invariants();
        assert!(reader.shell.source().held_messages() <= reader.config.held_messages_max, "held messages are bounded");
        self.readers.insert(slot, reader);
    }

    fn step_source(&mut self, reader: &mut Reader, input: IngestInput<Payload>, around: &mut Surroundings<'_>) {
        let me = self.place(Actor::Reader(reader.entry.slot.0, reader.number));
        if matches!(input, IngestInput::Disconnected) {
            reader.replay += 1; // the replay may belong to an earlier life of the publisher
        }
        reader.shell.step(input, around.net.now);
        while let Some(effect) = reader.shell.next_effect(around.net.now) {
            match effect {
                ReaderEffect::Apply { sequence, payload, events, report } => {
                    assert!(report.findings.is_empty(), "a batch of {} is not understood", reader.entry.rank);
                    self.apply_message(reader, sequence, &payload, (events, report.cleared), around);
                }
                ReaderEffect::Clear => self.clear(reader, around),
                ReaderEffect::Replay { from } => {
                    reader.replay += 1;
                    let (engine, rank) = reader.entry.engine();
                    let letter = Letter::ReplayFrom { reader: me, rank, replay: reader.replay, from };
                    around.net.send(me, Place::Engine(engine), letter);
                }
                ReaderEffect::Reconnect => {
                    reader.replay += 1;
                    reader.connection += 1; // messages of the old connection are ignored
                    reader.unread.clear();
                    let was_up = std::mem::replace(&mut reader.is_up, false);
                    around.net.after(reader.backoff.next_delay(), me, Letter::Connect);
                    if was_up {
                        reader.shell.step(IngestInput::Disconnected, around.net.now);
                    }
                }
                ReaderEffect::State(_) | ReaderEffect::Noted(_) => {}
            }
        }
        reader.entry.credit.set(reader.shell.source().state().credit());
    }

    fn apply_message(
        &self,
        reader: &mut Reader,
        sequence: u64,
        payload: &Payload,
        (events, is_cleared): (Vec<RouterEvent>, bool),
        around: &mut Surroundings<'_>,
    ) {
        let before = reader.tag.filter(|tag| tag.next > 0);
        if let Some(tag) = before {
            assert_eq!(sequence, tag.next, "message of {} out of order", reader.entry.rank);
            let is_other = payload.life != tag.life;
            if is_other && around.engines[tag.engine].died_silently(tag.life.min(payload.life)) {
                reader.is_mixed = true;
            }
            assert!(
                !is_other || reader.is_mixed,
                "messages of two lives of {}: {tag:?}, {payload:?}",
                reader.entry.rank
            );
        }
        let was_exact = before.map_or(sequence == 0, |tag| tag.is_exact);
        let (engine, rank) = reader.entry.engine();
        let is_exact = was_exact || is_cleared;
        reader.tag = Some(Tag { engine, rank, life: payload.life, next: sequence + 1, is_exact });
        if !events.is_empty() {
            self.apply(reader, events, around);
        }
    }

    fn record_contents(&self, reader: &Reader, around: &mut Surroundings<'_>) {
        let tag = reader.tag.filter(|_| !reader.is_mixed);
        let Entry { rank, generation, .. } = *reader.entry;
        let recorded = reader.shell.record(rank, format!("engine-{}", rank.worker));
        let Some((recorded, tag)) = recorded.zip(tag) else { return };
        assert!(tag.next == 0 || recorded.position.next == tag.next, "{rank} is recorded at a wrong position");
        let letter = Letter::Shard(Box::new(ToShard::Dump(Box::new(recorded), generation, tag)));
        self.send(Actor::Supervisor, Actor::Shard(self.shard_of(rank)), letter, around);
    }
}

fn entry_credit(reader: &Reader) {
    reader.entry.credit.set(StreamState::Recovering.credit());
}

fn cleared(rank: WorkerRank) -> RouterEvent {
    RouterEvent { rank, tier: StorageTier::default(), data: KvEvent::Cleared }
}
