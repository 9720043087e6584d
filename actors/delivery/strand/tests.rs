use std::cell::Cell;
use std::sync::Barrier;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use tokio::time::Instant;

use super::*;

impl DeferredReply for () {
    fn deliver(self) {}
}

struct Idle;

impl ActorState for Idle {
    type Msg = Arc<u32>;
    type Deferred = ();

    fn step(&mut self, _: Arc<u32>) -> Option<()> {
        None
    }
}

thread_local! {
    /// Extra delay before this thread releases the state lock, to widen the window for a missed message or close.
    static LINGER: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

pub(super) fn linger() {
    let (began, time) = (Instant::now(), LINGER.get());
    while began.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// A race of three senders against one close.
#[derive(Clone, Copy)]
struct Race {
    rounds: usize,
    /// Messages queued before the race.
    queued: u32,
    /// Messages of each sender.
    messages: u32,
    linger: Duration,
}

impl Race {
    /// Number of rounds that left a message or the state behind.
    fn stranded(self) -> usize {
        const SENDERS: usize = 3;
        let (start, end) = (Barrier::new(SENDERS + 1), Barrier::new(SENDERS + 1));
        let current: Mutex<Arc<Strand<Idle>>> = Mutex::new(Strand::closed());
        let send = || {
            LINGER.set(self.linger);
            for _ in 0..self.rounds {
                start.wait();
                let strand = Arc::clone(&current.lock().expect("no panic"));
                (0..self.messages).for_each(|n| strand.tell(Arc::new(n)));
                end.wait();
            }
        };
        let close = |_: &usize| {
            let strand = Strand::closed();
            *strand.first.state.lock().expect("no panic") = Some(Idle);
            (0..self.queued).for_each(|n| strand.push(Envelope::Msg(Arc::new(n))));
            *current.lock().expect("no panic") = Arc::clone(&strand);
            start.wait();
            strand.close();
            end.wait();
            let state_is_left = strand.first.state.lock().expect("no panic").is_some();
            strand.waiting.load(Ordering::SeqCst) > 0 || !strand.inbox().is_empty() || state_is_left
        };
        std::thread::scope(|scope| {
            (0..SENDERS).for_each(|_| drop(scope.spawn(send)));
            LINGER.set(self.linger);
            let stranded = (0..self.rounds).filter(close).count();
            LINGER.set(Duration::ZERO);
            stranded
        })
    }
}

/// `POINTSMAN_STRAND_CLOSES` sets the number of closes at full speed. Most have few queued messages, some more than
/// `INLINE_DRAIN_MAX`, which a sender leaves to the actor.
#[test]
#[expect(clippy::disallowed_methods, reason = "test effort is not router configuration")]
fn closing_under_load_loses_no_message_and_frees_the_state() {
    let closes = std::env::var("POINTSMAN_STRAND_CLOSES").ok().and_then(|text| text.parse().ok()).unwrap_or(10_000);
    for (queued, messages) in [(0, 4), (16, 1)] {
        for (rounds, linger) in [(closes / 2, Duration::ZERO), (3_000, Duration::from_micros(20))] {
            let stranded = Race { rounds, queued, messages, linger }.stranded();
            assert_eq!(stranded, 0, "of {rounds} rounds, {queued} queued, {messages} sent by each, {linger:?}");
        }
    }
}

/// Counts its steps. A panic message panics in the middle of a step.
struct Counter {
    steps: Arc<AtomicU32>,
}

enum CounterMsg {
    Count,
    PanicHalfway,
}

impl ActorState for Counter {
    type Msg = CounterMsg;
    type Deferred = ();

    fn step(&mut self, msg: CounterMsg) -> Option<()> {
        self.steps.fetch_add(1, Ordering::Relaxed);
        match msg {
            CounterMsg::Count => None,
            CounterMsg::PanicHalfway => panic!("half way"),
        }
    }
}

/// Sends on drop, as the last reply token of a join does.
struct PanicsAnother(Arc<Strand<Counter>>);

impl Drop for PanicsAnother {
    fn drop(&mut self) {
        self.0.tell(CounterMsg::PanicHalfway);
    }
}

struct Unwinds;

impl ActorState for Unwinds {
    type Msg = PanicsAnother;
    type Deferred = ();

    fn step(&mut self, _another: PanicsAnother) -> Option<()> {
        panic!("the outer actor")
    }
}

#[test]
fn a_panic_during_unwinding_of_another_actor_kills_its_own_actor() {
    let steps = Arc::new(AtomicU32::new(0));
    let (inner, outer) = (Strand::closed(), Strand::closed());
    *inner.first.state.lock().expect("no panic") = Some(Counter { steps: Arc::clone(&steps) });
    *outer.first.state.lock().expect("no panic") = Some(Unwinds);
    inner.tell(CounterMsg::Count);
    outer.tell(PanicsAnother(Arc::clone(&inner)));
    assert_eq!(steps.load(Ordering::Relaxed), 2, "the count, and the step that panicked");
    inner.tell(CounterMsg::Count);
    assert_eq!(steps.load(Ordering::Relaxed), 2, "no further message reaches the inconsistent state");
}

/// Logs its steps and replies. Message 1 sends messages 2 and 3 to its own strand.
struct Logger {
    log: Arc<Mutex<Vec<String>>>,
    myself: Arc<Strand<Logger>>,
}

struct LoggedReply(Arc<Mutex<Vec<String>>>, u32);

impl DeferredReply for LoggedReply {
    fn deliver(self) {
        self.0.lock().expect("no panic").push(format!("reply {}", self.1));
    }
}

impl ActorState for Logger {
    type Msg = u32;
    type Deferred = LoggedReply;

    fn step(&mut self, msg: u32) -> Option<LoggedReply> {
        self.log.lock().expect("no panic").push(format!("step {msg}"));
        if msg == 1 {
            assert!(self.myself.send(2).0.is_empty() && self.myself.send(3).0.is_empty(), "queued");
        }
        Some(LoggedReply(Arc::clone(&self.log), msg))
    }
}

#[test]
fn a_sender_delivers_its_own_reply_before_it_drains_the_inbox() {
    let (log, strand) = (Arc::new(Mutex::default()), Strand::closed());
    *strand.first.state.lock().expect("no panic") = Some(Logger { log: Arc::clone(&log), myself: Arc::clone(&strand) });
    strand.tell(1);
    let log = std::mem::take(&mut *log.lock().expect("no panic"));
    assert_eq!(log, ["step 1", "reply 1", "step 2", "step 3", "reply 2", "reply 3"]);
    strand.close(); // drops the reference of the state to its strand
}
