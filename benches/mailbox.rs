//! What a message costs: to a ractor actor, and to a plain tokio task, with nothing to do on either side.
//!
//! Once on a runtime of one thread, where caller and actor take turns on it, and once on two, where the runtime may run
//! either on the other and wakes it for that. The caller is a task of the runtime, as a gateway's is.
//!
//! Pointsman's own turns are not here, for they are private: `route` shows what a request costs that is made of them.

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
/// Messages sent in one go.
const BURST: usize = 256;
/// Room of the plain task's channel: a burst waits for nobody.
const CHANNEL: usize = 512;

enum Msg {
    /// Adds one, and tells nobody.
    Count,
    /// Adds one, and says so.
    Notify(Arc<Notify>),
    /// Answers the count.
    Ask(oneshot::Sender<u64>),
    /// Answers the count, by ractor's own means.
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
            Self::Ask(answer) => drop(answer.send(*count)),
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

/// The same without an actor system: a task behind a bounded channel.
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

const ALIVE: &str = "it lives as long as the bench";

/// Times `work`, told how often to do it, on a task of the runtime.
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

/// Bursts, each seen through before the next, so that the unbounded mailbox stays short.
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

/// One question to each actor, each with an answer of its own, and all answers awaited.
async fn ask_all(actors: Vec<ActorRef<Msg>>, times: u64) {
    let mut answers = Vec::with_capacity(actors.len());
    for _ in 0..times {
        for actor in &actors {
            let (sender, answer) = oneshot::channel();
            actor.cast(Msg::Ask(sender)).expect(ALIVE);
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
        task.send(Msg::Ask(sender)).await.map_err(drop).expect(ALIVE);
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
        time(&mut group, runtime, "eight asked, all answers", |times| ask_all(actors.clone(), times));
        time(&mut group, runtime, "plain task, sends back to back, each", |times| send_in_bursts(task.clone(), times));
        time(&mut group, runtime, "plain task, question and answer", |times| send_and_wait(task.clone(), times));
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
