//! Models of the strand: no message, reply or state is left behind, whatever the order of senders, panics, closes and
//! replacements.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use loom::thread;

use crate::actors::delivery::strand::{ActorState, DeferredReply, Strand, StrandTask};

/// Payload of the injected panic.
pub(crate) const INJECTED: &str = "injected by a model";

/// Outcome of every message. Counts are not part of the model: they add no interleavings.
#[derive(Default)]
struct Outcomes {
    handled: AtomicU32,
    dropped: AtomicU32,
    replied: AtomicU32,
    states: AtomicU32,
    wakes: AtomicU32,
    stops: AtomicU32,
}

impl Outcomes {
    fn add(counter: &AtomicU32) {
        counter.fetch_add(1, Ordering::SeqCst);
    }

    /// Handled, dropped, replied, live states.
    fn read(&self) -> [u32; 4] {
        [&self.handled, &self.dropped, &self.replied, &self.states].map(|counter| counter.load(Ordering::SeqCst))
    }
}

/// A message, which is handled or dropped.
struct Message {
    outcomes: Arc<Outcomes>,
    is_handled: bool,
    panics: bool,
}

impl Drop for Message {
    fn drop(&mut self) {
        if !self.is_handled {
            Outcomes::add(&self.outcomes.dropped);
        }
    }
}

struct Reply(Arc<Outcomes>);

impl DeferredReply for Reply {
    fn deliver(self) {
        Outcomes::add(&self.0.replied);
    }
}

/// Counts its messages.
struct Counter(Arc<Outcomes>);

impl Counter {
    fn new(outcomes: &Arc<Outcomes>) -> Self {
        Outcomes::add(&outcomes.states);
        Self(Arc::clone(outcomes))
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        self.0.states.fetch_sub(1, Ordering::SeqCst);
    }
}

impl ActorState for Counter {
    type Msg = Message;
    type Deferred = Reply;

    fn step(&mut self, mut msg: Message) -> Option<Reply> {
        msg.is_handled = true;
        Outcomes::add(&self.0.handled);
        if msg.panics {
            std::panic::panic_any(INJECTED);
        }
        Some(Reply(Arc::clone(&self.0)))
    }
}

/// The actor's task. It runs at the end of a model, as a task that was woken last.
struct Task(Arc<Outcomes>);

impl StrandTask for Task {
    fn wake(&self) {
        Outcomes::add(&self.0.wakes);
    }

    fn stop(&self, _: Option<String>) {
        Outcomes::add(&self.0.stops);
    }
}

/// A strand with its outcomes.
#[derive(Clone)]
struct World {
    strand: Arc<Strand<Counter>>,
    outcomes: Arc<Outcomes>,
}

impl World {
    fn open() -> Self {
        let world = Self { strand: Strand::replaceable(), outcomes: Arc::default() };
        world.reopen();
        world
    }

    fn reopen(&self) {
        self.strand.open(Task(Arc::clone(&self.outcomes)), || Counter::new(&self.outcomes));
        self.run_task(); // no later message depends on the wake-up of the start
    }

    fn send(&self, panics: bool) {
        self.strand.tell(Message { outcomes: Arc::clone(&self.outcomes), is_handled: false, panics });
    }

    fn spawn(&self, body: impl FnOnce(&Self) + Send + 'static) -> thread::JoinHandle<()> {
        let world = self.clone();
        thread::spawn(move || body(&world))
    }

    /// Drains as often as the task was woken.
    fn run_task(&self) {
        while self.outcomes.wakes.swap(0, Ordering::SeqCst) > 0 {
            self.strand.drain();
        }
    }

    /// Every message is handled or dropped, without a further call of any sender.
    fn assert_settled(&self, sent: u32) {
        self.run_task();
        let [handled, dropped, replied, _] = self.outcomes.read();
        assert_eq!(handled + dropped, sent, "handled {handled}, dropped {dropped}");
        assert!(replied <= handled);
        assert!(!self.strand.sample().has_work, "no step runs");
    }
}

/// Senders on threads of their own, and one on this thread.
fn senders(world: &World, senders: usize, panics: bool) {
    let threads: Vec<_> = (1..senders).map(|_| world.spawn(|world| world.send(false))).collect();
    world.send(panics);
    threads.into_iter().for_each(|thread| thread.join().expect("no panic reaches a sender"));
}

pub(crate) fn three_senders() {
    let world = World::open();
    senders(&world, 3, false);
    world.assert_settled(3);
    assert_eq!(world.outcomes.read(), [3, 0, 3, 1], "handled, dropped, replied, states");
}

fn senders_and_a_close(count: usize) {
    let world = World::open();
    let close = world.spawn(|world| world.strand.close());
    senders(&world, count, false);
    close.join().expect("no panic");
    world.assert_settled(u32::try_from(count).expect("few"));
    let [handled, _, replied, states] = world.outcomes.read();
    assert_eq!((replied, states), (handled, 0), "every handled message is answered, and the state is dropped");
}

pub(crate) fn sender_and_a_close() {
    senders_and_a_close(1);
}

pub(crate) fn two_senders_and_a_close() {
    senders_and_a_close(2);
}

pub(crate) fn three_senders_and_a_close() {
    senders_and_a_close(3);
}

fn senders_and_a_panic(count: usize) {
    let world = World::open();
    senders(&world, count, true);
    world.assert_settled(u32::try_from(count).expect("few"));
    let [handled, _, replied, states] = world.outcomes.read();
    let stops = world.outcomes.stops.load(Ordering::SeqCst);
    assert_eq!((replied, states, stops), (handled - 1, 0, 1), "the message that panics has no reply");
    world.reopen(); // the supervisor
    world.send(false);
    assert_eq!(world.outcomes.read()[0], handled + 1, "the successor serves");
}

pub(crate) fn two_senders_and_a_panic() {
    senders_and_a_panic(2);
}

pub(crate) fn three_senders_and_a_panic() {
    senders_and_a_panic(3);
}

/// The strand is abandoned and opened again at any time of the steps, which may be the time of a hang.
fn replacement(count: usize) {
    let world = World::open();
    let replaced = world.spawn(|world| {
        assert!(world.strand.abandon(), "a cell is free");
        world.reopen();
    });
    senders(&world, count, false);
    replaced.join().expect("no panic");
    world.assert_settled(u32::try_from(count).expect("few"));
    let [handled, _, replied, states] = world.outcomes.read();
    assert!(replied <= handled, "a late reply is dropped");
    assert_eq!(states, 1, "the old state is dropped, and the new one remains");
    world.send(false);
    assert_eq!(world.outcomes.read()[0], handled + 1, "the successor serves");
    assert!(world.strand.abandon(), "the first cell is free again");
}

pub(crate) fn sender_and_a_replacement() {
    replacement(1);
}

pub(crate) fn senders_and_a_replacement() {
    replacement(2);
}
