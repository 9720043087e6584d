//! Models of the strand and the wake flag: loom explores the interleavings of their threads.
//!
//! The modules under test are the production sources, included by path. Only `actors::delivery::sync` differs: its types
//! are those of loom. Interleavings are exhaustive up to the stated number of preemptions; `all` stands for no limit.
//! Each model prints the number of its interleavings. Run with a name to select models.

#![expect(dead_code, reason = "a model uses a part of the included modules")]
#![allow(clippy::print_stdout, reason = "the counts are the output")]

mod lock;
mod strand;
mod wake_flag;

/// Names of the crate in the included modules.
mod membership {
    pub(crate) use pointsman::internals::membership::ActorSample;
}

/// The included modules, at their paths in the crate.
#[path = "../../actors"]
mod actors {
    pub(crate) mod delivery {
        #[cfg(feature = "faults")]
        pub(crate) mod fault;
        pub(crate) mod strand;

        /// The primitives of `actors/delivery/sync.rs`, checked by loom.
        pub(crate) mod sync {
            pub(crate) use crate::lock::{StateGuard, StateMutex};
            pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
            pub(crate) use loom::sync::{Mutex, MutexGuard};

            pub(crate) const INLINE_DRAIN_MAX: usize = 1;
        }
    }
    pub(crate) mod views {
        pub(crate) mod wake_flag;
    }
}

/// One model.
struct Model {
    name: &'static str,
    /// Preemptions per interleaving; `None` for all.
    preemptions_max: Option<usize>,
    run: fn(),
}

const MODELS: [Model; 9] = [
    Model { name: "one sender and a close", preemptions_max: None, run: strand::sender_and_a_close },
    Model { name: "two senders and a close", preemptions_max: Some(3), run: strand::two_senders_and_a_close },
    Model { name: "three senders and a close", preemptions_max: Some(2), run: strand::three_senders_and_a_close },
    Model { name: "two senders and a panic", preemptions_max: None, run: strand::two_senders_and_a_panic },
    Model { name: "three senders and a panic", preemptions_max: Some(3), run: strand::three_senders_and_a_panic },
    Model { name: "three senders", preemptions_max: Some(4), run: strand::three_senders },
    Model { name: "one sender and a replacement", preemptions_max: Some(4), run: strand::sender_and_a_replacement },
    Model { name: "two senders and a replacement", preemptions_max: Some(3), run: strand::senders_and_a_replacement },
    Model { name: "wake flag with two ranks", preemptions_max: None, run: wake_flag::scheduler_and_two_ranks },
];

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    std::panic::set_hook(Box::new(|panic| {
        if panic.payload().downcast_ref::<&str>() != Some(&strand::INJECTED) {
            eprintln!("{panic}");
        }
    }));
    println!("| model | preemptions | interleavings |\n|---|---|---|");
    for Model { name, preemptions_max, run } in &MODELS {
        if !wanted.is_empty() && !wanted.iter().any(|part| name.contains(part.as_str())) {
            continue;
        }
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = *preemptions_max;
        builder.max_branches = 10_000;
        let (interleavings, run) = (std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0)), *run);
        let count = std::sync::Arc::clone(&interleavings);
        builder.check(move || {
            count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            run();
        });
        let preemptions = preemptions_max.map_or_else(|| "all".to_owned(), |max| max.to_string());
        println!("| {name} | {preemptions} | {} |", interleavings.load(std::sync::atomic::Ordering::Relaxed));
    }
}
