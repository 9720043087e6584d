use std::sync::atomic::AtomicU32;

use super::*;

impl DeferredReply for () {
    fn deliver(self) {}
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
fn each_reply_is_delivered_after_its_step() {
    let (log, strand) = (Arc::new(Mutex::default()), Strand::closed());
    *strand.first.state.lock().expect("no panic") = Some(Logger { log: Arc::clone(&log), myself: Arc::clone(&strand) });
    strand.tell(1);
    let log = std::mem::take(&mut *log.lock().expect("no panic"));
    assert_eq!(log, ["step 1", "reply 1", "step 2", "reply 2", "step 3", "reply 3"]);
    strand.close(); // drops the reference of the state to its strand
}
