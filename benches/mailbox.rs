//! Cost of a message without further work: to a ractor actor, and to a plain tokio task.
//!
//! Measured on a runtime with one thread, shared by caller and actor, and on one with two threads. There the runtime
//! may run and wake them on different threads. The caller is a task of the runtime, as in a gateway.
//!
//! Pointsman's own message delivery is private and therefore not included; `route` measures whole requests that use it.

#![expect(clippy::disallowed_types, reason = "a benchmark reads the clock")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, criterion_group, criterion_main};
use ractor::{Actor, ActorProcessingErr, ActorRef, RpcReplyPort, call};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Notify, mpsc, oneshot};

const FANOUT: usize = 8;
/// Number of messages sent without waiting.
const BURST: usize = 256;
/// Capacity of the plain task's channel, so that sending a burst does not block.
const CHANNEL: usize = 512;

enum Msg {
    /// Increments the counter without a notification.
    Count,
    /// Increments the counter and notifies the sender.
    Notify(Arc<Notify>),
    /// Returns the counter.
    Query(oneshot::Sender<u64>),
    /// Returns the counter, by ractor's reply port.
    Call(RpcReplyPort<u64>),
}

impl Msg {
    fn handle(self, count: &mut u64) {
        match self {
            Self::Count => *count += 1,
            Self::Notify(done) => {
                *count += 1;
                done.notify_one();
            }
            Self::Query(answer) => drop(answer.send(*count)),
            Self::Call(answer) => drop(answer.send(*count)),
        }
    }
}

struct Counter;

impl Actor for Counter {
    type Msg = Msg;
    type State = u64;
    type Arguments = ();

    async fn pre_start(&self, _: ActorRef<Msg>, (): ()) -> Result<u64, ActorProcessingErr> {
        Ok(0)
    }

    async fn handle(&self, _: ActorRef<Msg>, msg: Msg, count: &mut u64) -> Result<(), ActorProcessingErr> {
        msg.handle(count);
        Ok(())
    }
}

async fn actor() -> ActorRef<Msg> {
    Actor::spawn(None, Counter, ()).await.expect("nothing in its start can fail").0
}

/// The counter as a plain task with a bounded channel.
fn task() -> mpsc::Sender<Msg> {
    let (sender, mut inbox) = mpsc::channel(CHANNEL);
    tokio::spawn(async move {
        let mut count = 0;
        while let Some(msg) = inbox.recv().await {
            Msg::handle(msg, &mut count);
        }
    });
    sender
}

const ALIVE: &str = "the actor runs until the end of the bench";

/// Measures `work`, whose argument is the number of repetitions, on a task of the runtime.
fn time<F: Future<Output = ()> + Send + 'static>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    runtime: &Runtime,
    name: &str,
    work: impl Fn(u64) -> F,
) {
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|times| {
            let work = work(times);
            let timed = runtime.spawn(async {
                let started = Instant::now();
                work.await;
                started.elapsed()
            });
            runtime.block_on(timed).expect("nothing in it panics")
        });
    });
}

async fn cast_and_see(actor: ActorRef<Msg>, times: u64) {
    let done = Arc::new(Notify::new());
    for _ in 0..times {
        actor.cast(Msg::Notify(Arc::clone(&done))).expect(ALIVE);
        done.notified().await;
    }
}

/// Sends bursts and waits for the end of each, so that the unbounded mailbox stays short.
async fn cast_in_bursts(actor: ActorRef<Msg>, times: u64) {
    for done in (0..times).step_by(BURST) {
        for _ in done..times.min(done + BURST as u64) {
            actor.cast(Msg::Count).expect(ALIVE);
        }
        call!(actor, Msg::Call).expect(ALIVE);
    }
}

async fn call_and_wait(actor: ActorRef<Msg>, times: u64) {
    for _ in 0..times {
        black_box(call!(actor, Msg::Call).expect(ALIVE));
    }
}

/// Sends one query to each actor, each with its own reply channel, and awaits all replies.
async fn query_all(actors: Vec<ActorRef<Msg>>, times: u64) {
    let mut answers = Vec::with_capacity(actors.len());
    for _ in 0..times {
        for actor in &actors {
            let (sender, answer) = oneshot::channel();
            actor.cast(Msg::Query(sender)).expect(ALIVE);
            answers.push(answer);
        }
        for answer in answers.drain(..) {
            black_box(answer.await.expect(ALIVE));
        }
    }
}

async fn send_in_bursts(task: mpsc::Sender<Msg>, times: u64) {
    for done in (0..times).step_by(BURST) {
        for _ in done..times.min(done + BURST as u64) {
            task.send(Msg::Count).await.map_err(drop).expect(ALIVE);
        }
        send_and_wait(task.clone(), 1).await;
    }
}

async fn send_and_wait(task: mpsc::Sender<Msg>, times: u64) {
    for _ in 0..times {
        let (sender, answer) = oneshot::channel();
        task.send(Msg::Query(sender)).await.map_err(drop).expect(ALIVE);
        black_box(answer.await.expect(ALIVE));
    }
}

fn mailbox(criterion: &mut Criterion) {
    let one = Builder::new_current_thread().build().expect("a runtime");
    let two = Builder::new_multi_thread().worker_threads(2).build().expect("a runtime");
    for (name, runtime) in [("one thread", &one), ("two threads", &two)] {
        let mut group = criterion.benchmark_group(format!("mailbox/{name}"));
        let (actors, task) = runtime.block_on(async {
            let mut actors = Vec::new();
            for _ in 0..FANOUT {
                actors.push(actor().await);
            }
            (actors, task())
        });
        let actor = &actors[0];
        time(&mut group, runtime, "cast, and its effect", |times| cast_and_see(actor.clone(), times));
        time(&mut group, runtime, "casts back to back, each", |times| cast_in_bursts(actor.clone(), times));
        time(&mut group, runtime, "call", |times| call_and_wait(actor.clone(), times));
        time(&mut group, runtime, "eight queried, all replies", |times| query_all(actors.clone(), times));
        time(&mut group, runtime, "plain task, sends back to back, each", |times| send_in_bursts(task.clone(), times));
        time(&mut group, runtime, "plain task, query and reply", |times| send_and_wait(task.clone(), times));
        group.finish();
        actors.iter().for_each(|actor| actor.stop(None));
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = mailbox
}
criterion_main!(benches);
