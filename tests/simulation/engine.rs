//! Engines: ranks that compute, evict and publish, and that crash and start again with new sequence numbers.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use pointsman::Outcome;
use pointsman::protocol::Timestamp;
use pointsman_trial::engine::{CacheEvent, Tier};
use pointsman_trial::kv_events::{Dialect, Encoder, EventFormat};

use crate::letter::{Job, Letter, Names, Payload, Progress, Tag};
use crate::net::{Net, Place};
use crate::prompt::BLOCK_SIZE;
use crate::script::Settings;

const DIALECTS: [Dialect; 4] = [Dialect::VllmArray, Dialect::VllmMap, Dialect::SglangArray, Dialect::SglangMap];

/// Time until the operating system reports a dead connection. A reader with a replay socket finds it by itself.
const KEEPALIVE: Duration = Duration::from_secs(3);

const BLOCK_TIME: Duration = Duration::from_millis(4);

pub(crate) struct Engine {
    number: usize,
    pub(crate) is_up: bool,
    /// Number of restarts.
    pub(crate) life: usize,
    ranks: Vec<EngineRank>,
    jobs: BTreeMap<u64, Job>,
    capacity_blocks: usize,
    replay_messages: usize,
    has_replay: bool,
    pub(crate) fails: Option<(Outcome, Timestamp)>,
    pub(crate) loses_until: Timestamp,
    pub(crate) replay_hangs_until: Timestamp,
    /// Lives that ended without the end of their connections.
    silent_deaths: BTreeSet<usize>,
    /// Whether computation stands still.
    pub(crate) is_paused: bool,
}

struct EngineRank {
    encoder: Encoder,
    /// Held blocks, each with the number of running jobs that use it.
    held: BTreeMap<u64, (u32, [u8; 32])>,
    busy_until: Timestamp,
    lives: Vec<Life>,
    readers: Vec<(Place, u64)>,
}

/// One life of a publisher: its messages, and the cache after each.
#[derive(Default)]
struct Life {
    sent: Vec<Payload>,
    contents: Vec<Rc<Names>>,
}

impl Engine {
    pub(crate) fn new(number: usize, settings: &Settings) -> Self {
        let Settings { ranks_per_engine, capacity_blocks, replay_messages, has_replay, .. } = *settings;
        let rank = |rank: usize| EngineRank {
            encoder: Encoder {
                format: EventFormat::from(DIALECTS[number % DIALECTS.len()]),
                block_size: BLOCK_SIZE,
                rank: rank as u32,
                lora_ids: Arc::default(),
            },
            held: BTreeMap::new(),
            busy_until: Timestamp::default(),
            lives: vec![Life::default()],
            readers: Vec::new(),
        };
        Self {
            number,
            is_up: true,
            life: 0,
            ranks: (0..ranks_per_engine).map(rank).collect(),
            jobs: BTreeMap::new(),
            capacity_blocks,
            replay_messages,
            has_replay,
            fails: None,
            loses_until: Timestamp::default(),
            replay_hangs_until: Timestamp::default(),
            silent_deaths: BTreeSet::new(),
            is_paused: false,
        }
    }

    /// Contents of the cache that a tag names.
    pub(crate) fn contents(&self, tag: &Tag) -> Rc<Names> {
        let life = &self.ranks[tag.rank].lives[tag.life];
        tag.next.checked_sub(1).map_or_else(Rc::default, |last| Rc::clone(&life.contents[last as usize]))
    }

    /// Whether connections outlasted this life.
    pub(crate) fn died_silently(&self, life: usize) -> bool {
        self.silent_deaths.contains(&life)
    }

    /// Present contents of a rank.
    pub(crate) fn present(&self, rank: usize) -> Rc<Names> {
        let life = &self.ranks[rank].lives[self.life];
        life.contents.last().cloned().unwrap_or_default()
    }

    pub(crate) fn handle(&mut self, letter: Letter, net: &mut Net) {
        match letter {
            Letter::Infer(job) => self.on_infer(job, net),
            Letter::Abort(call) => drop(self.end(call)),
            Letter::Prefilled { life, call } if life == self.life => self.on_prefilled(call, net),
            Letter::Decoded { life, call } if life == self.life => self.on_decoded(call, net),
            Letter::Prefilled { .. } | Letter::Decoded { .. } => {}
            Letter::Subscribe { reader, rank, connection } => self.on_subscribe(reader, rank, connection, net),
            Letter::ReplayFrom { reader, rank, replay, from } => self.on_replay(reader, rank, (replay, from), net),
            Letter::Restart { life } if life == self.life => self.is_up = true,
            Letter::Restart { .. } => {}
            _ => unreachable!("no message of an engine"),
        }
    }

    fn me(&self) -> Place {
        Place::Engine(self.number)
    }

    fn on_infer(&mut self, job: Job, net: &mut Net) {
        let failure = self.fails.filter(|(_, until)| net.now < *until).map(|(outcome, _)| outcome);
        let failure = if self.is_up { failure } else { Some(Outcome::ConnectFailed) };
        let failure = failure.or((job.rank >= self.ranks.len()).then_some(Outcome::Misconfigured));
        if let Some(outcome) = failure {
            return net.send(self.me(), job.caller, Letter::Progress(job.attempt, Progress::Ended(outcome)));
        }
        let rank = &mut self.ranks[job.rank];
        let cached = job.prompt.names().take_while(|name| rank.held.contains_key(name)).count();
        for name in job.prompt.names() {
            if let Some((users, _)) = rank.held.get_mut(&name) {
                *users += 1;
            }
        }
        let blocks = (job.prompt.blocks.len() - cached) as u32 + 1;
        rank.busy_until = rank.busy_until.max(net.now) + BLOCK_TIME * blocks;
        let (delay, life, call) = (rank.busy_until.since(net.now), self.life, job.call);
        self.jobs.insert(call, job);
        net.after(delay, self.me(), Letter::Prefilled { life, call });
    }

    fn on_prefilled(&mut self, call: u64, net: &mut Net) {
        if self.is_paused {
            return net.after(Duration::from_millis(200), self.me(), Letter::Prefilled { life: self.life, call });
        }
        let Some(job) = self.jobs.get(&call) else { return };
        let (rank, prompt, me) = (job.rank, Rc::clone(&job.prompt), self.me());
        net.send(me, job.caller, Letter::Progress(job.attempt, Progress::FirstToken));
        let (mut events, mut stored) = (Vec::new(), Vec::new());
        for block in &prompt.blocks {
            let name = block.hash.as_u64();
            if self.ranks[rank].held.contains_key(&name) {
                flush(&mut stored, &mut events);
                continue;
            }
            if self.ranks[rank].held.len() >= self.capacity_blocks {
                flush(&mut stored, &mut events);
                let Some(evicted) = self.evict(rank, &prompt, net) else { break };
                events.push(evicted);
            }
            self.ranks[rank].held.insert(name, (1, block.hash.0));
            stored.push(Arc::clone(block));
        }
        flush(&mut stored, &mut events);
        if !events.is_empty() {
            self.publish(rank, &events, net);
        }
        self.decode(call, net);
    }

    /// Removes a block that no job uses and that is not part of `prompt`.
    fn evict(&mut self, rank: usize, prompt: &crate::prompt::Prompt, net: &mut Net) -> Option<CacheEvent> {
        let held = &mut self.ranks[rank].held;
        let is_free =
            |(name, (users, _)): &(&u64, &(u32, [u8; 32]))| *users == 0 && !prompt.names().any(|own| own == **name);
        let free: Vec<u64> = held.iter().filter(is_free).map(|(name, _)| *name).collect();
        let name = *free.get(net.draw(free.len() as u64) as usize)?;
        let (_, bytes) = held.remove(&name)?;
        Some(CacheEvent::Removed { tier: Tier::Device, hash: pointsman_trial::engine::EngineHash(bytes) })
    }

    fn decode(&mut self, call: u64, net: &mut Net) {
        let delay = Duration::from_millis(5 + net.draw(40));
        net.after(delay, self.me(), Letter::Decoded { life: self.life, call });
    }

    fn on_decoded(&mut self, call: u64, net: &mut Net) {
        if self.is_paused {
            return net.after(Duration::from_millis(200), self.me(), Letter::Decoded { life: self.life, call });
        }
        let Some(job) = self.jobs.get_mut(&call) else { return };
        let (caller, attempt) = (job.caller, job.attempt);
        if job.output_blocks > 0 {
            job.output_blocks -= 1;
            net.send(self.me(), caller, Letter::Progress(attempt, Progress::OutputBlock));
            return self.decode(call, net);
        }
        self.end(call);
        net.send(self.me(), caller, Letter::Progress(attempt, Progress::Ended(Outcome::Ok)));
    }

    fn end(&mut self, call: u64) -> Option<Job> {
        let job = self.jobs.remove(&call)?;
        for name in job.prompt.names() {
            if let Some((users, _)) = self.ranks[job.rank].held.get_mut(&name) {
                *users = users.saturating_sub(1);
            }
        }
        Some(job)
    }

    fn publish(&mut self, rank: usize, events: &[CacheEvent], net: &mut Net) {
        let (me, is_lossy) = (self.me(), net.now < self.loses_until);
        let rank = &mut self.ranks[rank];
        let bytes = rank.encoder.batch(net.now.0 as f64 * 1e-9, events);
        let payload = Payload { bytes: bytes.into(), life: self.life };
        let life = &mut rank.lives[self.life];
        let sequence = life.sent.len() as u64;
        life.sent.push(payload.clone());
        life.contents.push(Rc::new(rank.held.keys().copied().collect()));
        for (reader, connection) in &rank.readers {
            if !is_lossy || net.one_in(2) {
                let payload = payload.clone();
                net.send(me, *reader, Letter::Live { connection: *connection, sequence, payload });
            }
        }
    }

    fn on_subscribe(&mut self, reader: Place, rank: usize, connection: u64, net: &mut Net) {
        let answer = if self.is_up && rank < self.ranks.len() {
            let readers = &mut self.ranks[rank].readers;
            readers.retain(|(known, _)| *known != reader);
            readers.push((reader, connection));
            Letter::Connected(connection)
        } else {
            Letter::Closed(connection)
        };
        net.send(self.me(), reader, answer);
    }

    fn on_replay(&mut self, reader: Place, rank: usize, (replay, from): (u64, u64), net: &mut Net) {
        let me = Place::Replay(self.number);
        if net.now < self.replay_hangs_until {
            return;
        }
        if !self.is_up || rank >= self.ranks.len() {
            return net.send(me, reader, Letter::ReplayFailed(replay));
        }
        let sent = &self.ranks[rank].lives[self.life].sent;
        let oldest = sent.len().saturating_sub(self.replay_messages).max(from as usize);
        for (sequence, payload) in sent.iter().enumerate().skip(oldest) {
            let (sequence, payload) = (sequence as u64, payload.clone());
            net.send(me, reader, Letter::Replayed { replay, sequence, payload });
        }
        net.send(me, reader, Letter::ReplayEnded(replay));
    }

    /// Drops the cache without a restart.
    pub(crate) fn clear(&mut self, net: &mut Net) {
        for rank in 0..self.ranks.len() {
            let uses: Vec<u64> = self.ranks[rank].held.keys().copied().collect();
            for name in uses {
                self.ranks[rank].held.remove(&name);
            }
            self.publish(rank, &[CacheEvent::Cleared], net);
        }
    }

    /// Breaks the event stream of one gateway.
    pub(crate) fn break_stream(&mut self, gateway: usize, net: &mut Net) {
        let me = self.me();
        for rank in &mut self.ranks {
            rank.readers.retain(|(reader, connection)| {
                let is_of = matches!(reader, Place::Gateway(n, ..) if *n == gateway);
                if is_of {
                    net.send(me, *reader, Letter::Closed(*connection));
                }
                !is_of
            });
        }
    }

    pub(crate) fn crash(&mut self, is_silent: bool, down: Duration, net: &mut Net) {
        let me = self.me();
        if is_silent {
            self.silent_deaths.insert(self.life);
        }
        (self.is_up, self.life) = (false, self.life + 1);
        for job in std::mem::take(&mut self.jobs).into_values() {
            let outcome = if is_silent { Outcome::Timeout } else { Outcome::Reset };
            net.send(me, job.caller, Letter::Progress(job.attempt, Progress::Ended(outcome)));
        }
        for rank in &mut self.ranks {
            for (reader, connection) in std::mem::take(&mut rank.readers) {
                if !is_silent {
                    net.send(me, reader, Letter::Closed(connection));
                } else if !self.has_replay {
                    net.after(KEEPALIVE, reader, Letter::Closed(connection));
                }
            }
            rank.held.clear();
            rank.busy_until = Timestamp::default();
            rank.lives.push(Life::default());
        }
        net.after(down, me, Letter::Restart { life: self.life });
    }
}

fn flush(stored: &mut Vec<Arc<pointsman_trial::engine::Block>>, events: &mut Vec<CacheEvent>) {
    if !stored.is_empty() {
        events.push(CacheEvent::Stored { tier: Tier::Device, blocks: std::mem::take(stored) });
    }
}
