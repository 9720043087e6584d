//! Runs of scripts that catch failures, and their reduction to fewer elements.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use pointsman::protocol::Timestamp;

use crate::script::Script;
use crate::world::{POSITION, Summary, World};

/// A violated invariant.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) message: String,
    pub(crate) step: u64,
    pub(crate) at: Timestamp,
}

impl Failure {
    /// Line of the violated assertion.
    fn place(&self) -> &str {
        self.message.lines().next().unwrap_or_default()
    }
}

thread_local! {
    static MESSAGE: RefCell<Option<String>> = const { RefCell::new(None) };
    static IS_CAUGHT: RefCell<bool> = const { RefCell::new(false) };
}

/// Keeps the messages of panics in worlds, instead of printing each.
fn keep_messages() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if IS_CAUGHT.with_borrow(|caught| *caught) {
                MESSAGE.with_borrow_mut(|message| *message = Some(panic.to_string()));
            } else {
                report(panic);
            }
        }));
    });
}

pub(crate) fn run(script: &Script) -> Result<Summary, Failure> {
    keep_messages();
    IS_CAUGHT.set(true);
    let result = catch_unwind(AssertUnwindSafe(|| World::run(script)));
    IS_CAUGHT.set(false);
    result.map_err(|_| {
        let (step, at) = POSITION.get();
        Failure { message: MESSAGE.take().unwrap_or_default(), step, at }
    })
}

/// Removes elements of a failing script while it still fails: halves, then quarters, down to single ones until
/// none can be spared.
pub(crate) fn shrunk(script: &Script, failure: Failure) -> (Script, Failure) {
    let (mut script, mut failure) = (script.clone(), failure);
    let mut size = script.acts.len().div_ceil(2);
    loop {
        let (mut at, length) = (0, script.acts.len());
        while at < script.acts.len() {
            let mut shorter = script.clone();
            shorter.acts.drain(at..(at + size).min(script.acts.len()));
            match run(&shorter) {
                Err(found) if found.place() == failure.place() => (script, failure) = (shorter, found),
                Err(_) | Ok(_) => at += size,
            }
        }
        if size > 1 {
            size = size.div_ceil(2);
        } else if script.acts.len() == length {
            return (script, failure);
        }
    }
}
