//! Task that reads the KV events of one rank.
//!
//! Owns both connections and a [`ReaderShell`], which decides. Tokens arrive here, are hashed, and never leave the task. Each batch reaches the rank's shard in order and under a permit, so a slow shard applies backpressure to this
//! publisher only. No input of an engine ends the task. Losses are recorded by `ingest::Source`. The surrounding actor
//! controls start and stop.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc;

use super::auditor::Auditor;
use super::dependencies::IngestDependencies;
use super::snapshot_reply::SnapshotReply;
use crate::actors::io::engine_socket::{ReplayRequest, SocketError, Subscription};
use crate::actors::views::rank::RankEntry;
use crate::ingest::{Backoff, DegradationReason, IngestInput, SourceConfig, StreamState, pieces};
use crate::protocol::{KvEvent, KvEventsConfig, RouterEvent, StorageTier, Timestamp};
use crate::shell::reader::{ReaderEffect, ReaderShell};
use crate::wire::WireConfig;
use crate::zmtp::{Caps, Replayed};

/// Number of blocks in one message to a shard: about 50 µs of work, at 80 to 120 ns per block.
const PIECE_BLOCKS_MAX: usize = 512;

/// Inputs of a reader.
pub(crate) struct Arguments {
    pub(crate) dependencies: IngestDependencies,
    pub(crate) entry: Arc<RankEntry>,
    pub(crate) endpoints: KvEventsConfig,
    pub(crate) source: SourceConfig,
    pub(crate) wire: WireConfig,
    pub(crate) audit_interval_ms: u32,
}

/// Commands to a reader.
pub(crate) enum ReaderCommand {
    /// The index has lost the blocks of the rank: replay them.
    Resync,
    /// Send the position, and query the shard for the contents there.
    Snapshot(SnapshotReply),
    /// Load pending contents of a snapshot, if they are newer.
    Restore,
    /// Injected fault: panic, or hang until released.
    #[cfg(feature = "faults")]
    Fault(crate::actors::delivery::fault::InjectedFault),
}

/// Reads until it is dropped.
pub(super) async fn read(arguments: Arguments, mut commands: mpsc::Receiver<ReaderCommand>) {
    let Arguments { dependencies, entry, endpoints, source, wire, audit_interval_ms } = arguments;
    let caps = Caps::default();
    let cell = Arc::clone(&entry);
    let _reading = cell.source.read().await;
    let mut link = SubscriptionLink::new(&endpoints, caps, source.seed);
    let (mut replay, mut audit_reply) = (PendingReplay::Idle, PendingReplay::Idle);
    let mut reader = Reader {
        auditor: Auditor::new(audit_interval_ms, dependencies.clock.now(), &endpoints, wire.clone()),
        block_size: wire.block_size.get(),
        shell: ReaderShell::new(source, wire, dependencies.clock.now()),
        endpoint: endpoints.endpoint.clone(),
        dependencies,
        entry,
        reported_size: None,
        shown_degradation: None,
        is_emptied: false,
        unwell_since: None,
    };
    if !reader.restore().await {
        // A source begins with an empty state, and an earlier reader may have left blocks in the index.
        reader.apply(vec![reader.event(KvEvent::Cleared)]).await;
    }
    loop {
        let now = reader.dependencies.clock.now();
        let tick = reader.shell.source().next_tick().map(|at| at.since(now));
        let audit = reader.auditor.audit.due().map(|at| at.since(now));
        let input = tokio::select! {
            biased;
            Some(command) = commands.recv() => match reader.obey(command).await {
                Some(input) => input,
                None => {
                    // The source continues from a snapshot, with a new connection.
                    link = SubscriptionLink::new(&endpoints, caps, source.seed);
                    replay = PendingReplay::Idle;
                    IngestInput::Tick
                }
            },
            answer = replay.next(), if !replay.is_idle() => reader.on_replayed(answer),
            news = link.next(), if reader.shell.source().wants_live() || !link.is_up() => reader.on_news(news),
            reply = audit_reply.next(), if !audit_reply.is_idle() => {
                reader.auditor.on_reply(reply, reader.dependencies.clock.now());
                IngestInput::Tick
            }
            () = cell.source.served() => IngestInput::Served,
            () = cell.source.once_emptied() => {
                reader.is_emptied = true;
                reader.drop_blocks().await;
                IngestInput::Tick
            }
            () = sleep(tick.into_iter().chain(audit).min()) => IngestInput::Tick,
        };
        if input == IngestInput::Disconnected {
            replay = PendingReplay::Idle; // the replay may belong to an earlier life of the publisher
            reader.auditor.abort();
        }
        reader.step(input);
        // Deadlines are checked even if the publisher sends without pause.
        if tick == Some(Duration::ZERO) {
            reader.step(IngestInput::Tick);
        }
        reader.perform(&mut replay, &mut link).await;
        if let Some(input) = reader.audit().await {
            reader.drop_blocks().await;
            reader.step(input);
            reader.perform(&mut replay, &mut link).await;
        }
        audit_reply.follow(&mut reader.auditor, &endpoints, caps);
        if !reader.shell.source().is_replaying() {
            replay = PendingReplay::Idle; // the rest of the replay is not needed
        }
    }
}

async fn sleep(duration: Option<Duration>) {
    match duration {
        Some(duration) => tokio::time::sleep(duration).await,
        None => std::future::pending().await,
    }
}

pub(super) struct Reader {
    pub(super) auditor: Auditor,
    pub(super) dependencies: IngestDependencies,
    pub(super) entry: Arc<RankEntry>,
    pub(super) shell: ReaderShell<Bytes>,
    /// Block size of the pool.
    pub(super) block_size: u32,
    /// Address of the publisher.
    pub(super) endpoint: String,
    /// Block size of the events, as the supervisor knows it.
    reported_size: Option<u32>,
    shown_degradation: Option<DegradationReason>,
    /// Whether the engine has discarded its cache and has published nothing since.
    pub(super) is_emptied: bool,
    /// Time of the last degradation of the source, until it is trusted again.
    unwell_since: Option<Timestamp>,
}

impl Reader {
    fn step(&mut self, input: IngestInput<Bytes>) {
        self.shell.step(input, self.dependencies.clock.now());
    }

    /// `None` if the source has started again.
    async fn obey(&mut self, command: ReaderCommand) -> Option<IngestInput<Bytes>> {
        Some(match command {
            ReaderCommand::Resync => {
                self.drop_blocks().await;
                IngestInput::Resync
            }
            ReaderCommand::Snapshot(reply) => {
                self.snapshot(reply);
                IngestInput::Tick
            }
            ReaderCommand::Restore if self.restore().await => return None,
            ReaderCommand::Restore => IngestInput::Tick,
            #[cfg(feature = "faults")]
            ReaderCommand::Fault(injected) => {
                injected.apply_off_runtime().await;
                IngestInput::Tick
            }
        })
    }

    fn on_news(&mut self, news: LinkEvent) -> IngestInput<Bytes> {
        match news {
            LinkEvent::Up => {
                self.entry.source.set_connected(true);
                IngestInput::Connected
            }
            LinkEvent::Message(sequence, payload) => {
                self.entry.source.count_message(self.dependencies.clock.now());
                IngestInput::Live { sequence, payload }
            }
            LinkEvent::Down { error, was_up } => {
                self.count_error(&error);
                if !was_up {
                    return IngestInput::Tick; // the subscription reconnects
                }
                self.entry.source.set_connected(false);
                let (worker, rank) = (&*self.entry.endpoint, self.entry.rank.rank);
                tracing::info!(worker, rank, reason = %error, "KV event connection lost, reconnecting");
                IngestInput::Disconnected
            }
            LinkEvent::Refused(error) => {
                self.count_error(&error); // the next message reveals the gap
                IngestInput::Tick
            }
        }
    }

    fn on_replayed(&mut self, answer: Result<Replayed<Bytes>, SocketError>) -> IngestInput<Bytes> {
        match answer {
            Ok(Replayed::Message { sequence, payload }) => {
                self.entry.source.count_message(self.dependencies.clock.now());
                IngestInput::Replayed { sequence, payload }
            }
            Ok(Replayed::End) => IngestInput::ReplayEnded,
            Err(error) => {
                self.count_error(&error);
                IngestInput::ReplayFailed
            }
        }
    }

    fn count_error(&self, error: &SocketError) {
        self.dependencies.meters.ingest.error(error.name());
        self.entry.source.facts().last_error = Some(error.to_string());
    }

    /// Performs the effects of the state machine, including those that follow from their results.
    async fn perform(&mut self, replay: &mut PendingReplay, link: &mut SubscriptionLink) {
        while let Some(effect) = self.shell.next_effect(self.dependencies.clock.now()) {
            match effect {
                ReaderEffect::Apply { sequence, events, report, .. } => {
                    self.dependencies.meters.ingest.findings(&report.findings);
                    if report.findings.iter().any(|(finding, _)| finding.costs_hits()) {
                        self.entry.source.facts().unused = self.shell.unused();
                    }
                    self.apply_message(sequence, events).await;
                    self.entry.source.facts().applied = Some(sequence);
                }
                ReaderEffect::Clear => {
                    self.entry.source.facts().unused = None;
                    self.drop_blocks().await;
                }
                ReaderEffect::Replay { from } => *replay = PendingReplay::ask(&link.endpoints, from, link.caps),
                ReaderEffect::Reconnect => {
                    *replay = PendingReplay::Idle;
                    let down = link.go_down(SocketError::Deaf, link.is_up());
                    let input = self.on_news(down);
                    self.step(input);
                }
                ReaderEffect::State(state) => self.on_state(state),
                ReaderEffect::Noted(note) => {
                    self.auditor.audit.noted(note);
                    self.on_note(note);
                }
            }
        }
        {
            let (source, mut facts) = (self.shell.source(), self.entry.source.facts());
            (facts.restore, facts.caught_up) = (source.restore(), source.is_caught_up());
        }
        self.entry.source.await_served(self.shell.source().awaits_served());
        if let Some(size) = self.shell.source().block_size().filter(|size| Some(*size) != self.reported_size) {
            self.reported_size = Some(size);
            (self.dependencies.on_block_size)(self.entry.slot, self.entry.generation, size);
        }
        let degradation = self.shell.source().degradation();
        if degradation.map(|degradation| degradation.name())
            != self.shown_degradation.map(|degradation| degradation.name())
        {
            self.show(degradation);
        }
    }

    pub(super) fn show(&mut self, degradation: Option<DegradationReason>) {
        self.shown_degradation = degradation;
        self.entry.source.set_state(self.shell.source().state(), degradation);
    }

    fn on_state(&mut self, state: StreamState) {
        let (now, degradation) = (self.dependencies.clock.now(), self.shell.source().degradation());
        let (worker, rank, state_name) = (&*self.entry.endpoint, self.entry.rank.rank, state.name());
        match &degradation {
            Some(degradation) => {
                tracing::warn!(worker, rank, state = state_name, reason = %degradation, "KV event stream degraded")
            }
            None => tracing::debug!(worker, rank, state = state_name, "KV event stream live"),
        }
        self.show(degradation);
        match state {
            StreamState::Live => {
                if let Some(since) = self.unwell_since.take() {
                    self.dependencies.meters.ingest.healed(now.since(since));
                }
            }
            StreamState::Recovering | StreamState::Cold | StreamState::Mismatched | StreamState::Silent => {
                self.unwell_since.get_or_insert(now);
            }
        }
    }

    async fn apply_message(&mut self, sequence: u64, events: Vec<RouterEvent>) {
        let audited = if self.auditor.audit.is_running() { events.clone() } else { Vec::new() };
        self.is_emptied = false;
        if !events.is_empty() {
            self.apply(events).await;
        }
        self.audit_applied(sequence, &audited).await;
    }

    pub(super) fn event(&self, data: KvEvent) -> RouterEvent {
        RouterEvent { rank: self.entry.rank, tier: StorageTier::default(), data }
    }

    /// Waits while the shard is behind. Long batches are split, so that overlap queries need not wait for all of one.
    pub(super) async fn apply(&self, events: Vec<RouterEvent>) {
        for piece in pieces(events, PIECE_BLOCKS_MAX) {
            self.dependencies.shards.apply_of(&self.entry, piece, &self.dependencies.status).await;
        }
    }
}

/// The subscription, or its connection attempt.
struct SubscriptionLink {
    endpoints: KvEventsConfig,
    caps: Caps,
    backoff: Backoff,
    state: ConnectionState,
}

enum ConnectionState {
    Down(Connecting),
    Up(Subscription),
}

/// Result of the subscription.
enum LinkEvent {
    Up,
    Message(u64, Bytes),
    /// A malformed message.
    Refused(SocketError),
    Down {
        error: SocketError,
        was_up: bool,
    },
}

impl SubscriptionLink {
    fn new(endpoints: &KvEventsConfig, caps: Caps, seed: u64) -> Self {
        let state = ConnectionState::Down(connect(endpoints, caps, Duration::ZERO));
        Self { endpoints: endpoints.clone(), caps, backoff: Backoff::new(seed), state }
    }

    fn is_up(&self) -> bool {
        matches!(self.state, ConnectionState::Up(_))
    }

    /// The next event of the subscription. Cancel-safe.
    async fn next(&mut self) -> LinkEvent {
        match &mut self.state {
            ConnectionState::Down(connecting) => match connecting.await {
                Ok(subscription) => {
                    self.state = ConnectionState::Up(subscription);
                    LinkEvent::Up
                }
                Err(error) => self.go_down(error, false),
            },
            ConnectionState::Up(subscription) => match subscription.receive().await {
                Ok((sequence, payload)) => {
                    self.backoff.reset(); // only after a message: a greeting alone keeps the backoff
                    LinkEvent::Message(sequence, payload)
                }
                Err(error @ SocketError::Parts(_)) => LinkEvent::Refused(error),
                Err(error) => self.go_down(error, true),
            },
        }
    }

    fn go_down(&mut self, error: SocketError, was_up: bool) -> LinkEvent {
        self.state = ConnectionState::Down(connect(&self.endpoints, self.caps, self.backoff.next_delay()));
        LinkEvent::Down { error, was_up }
    }
}

type Connecting = Pin<Box<dyn Future<Output = Result<Subscription, SocketError>> + Send>>;

fn connect(endpoints: &KvEventsConfig, caps: Caps, wait: Duration) -> Connecting {
    let KvEventsConfig { endpoint, topic, .. } = endpoints.clone();
    Box::pin(async move {
        tokio::time::sleep(wait).await;
        Subscription::connect(&endpoint, &topic, caps).await
    })
}

/// State of the replay request.
pub(super) enum PendingReplay {
    Idle,
    Asking(Pin<Box<dyn Future<Output = Result<ReplayRequest, SocketError>> + Send>>),
    Requested(ReplayRequest),
}

impl PendingReplay {
    pub(super) fn ask(endpoints: &KvEventsConfig, from: u64, caps: Caps) -> Self {
        let endpoint = endpoints.replay_endpoint.clone();
        Self::Asking(Box::pin(async move {
            let endpoint = endpoint.ok_or(SocketError::Closed)?; // never requested without an endpoint
            ReplayRequest::ask(&endpoint, from, caps).await
        }))
    }

    /// Sends a new request of an audit, and ends that of a completed one.
    fn follow(&mut self, auditor: &mut Auditor, endpoints: &KvEventsConfig, caps: Caps) {
        if let Some(number) = auditor.take_request() {
            *self = Self::ask(endpoints, number, caps);
        } else if !auditor.audit.is_running() {
            *self = Self::Idle;
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        matches!(self, Self::Idle)
    }

    /// The next response. Cancel-safe. Idle after the last response.
    pub(super) async fn next(&mut self) -> Result<Replayed<Bytes>, SocketError> {
        loop {
            match self {
                Self::Idle => return std::future::pending().await,
                Self::Asking(asking) => match asking.await {
                    Ok(request) => *self = Self::Requested(request),
                    Err(error) => {
                        *self = Self::Idle;
                        return Err(error);
                    }
                },
                Self::Requested(request) => {
                    let answer = request.receive().await;
                    if !matches!(answer, Ok(Replayed::Message { .. })) {
                        *self = Self::Idle;
                    }
                    return answer;
                }
            }
        }
    }
}
