//! Model of the wake flag: a scheduler that waits for falling load sees every fall or is woken.

use std::sync::Arc;

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

use crate::actors::views::wake_flag::WakeFlag;

#[derive(Default)]
struct Shared {
    flag: WakeFlag,
    /// Wake-ups of the scheduler.
    wakes: std::sync::atomic::AtomicU32,
}

/// Two ranks publish a lower load and check the flag, while the scheduler sets it and reads the boards.
pub(crate) fn scheduler_and_two_ranks() {
    let shared = Arc::new(Shared::default());
    let boards: [Arc<AtomicU32>; 2] = std::array::from_fn(|_| Arc::new(AtomicU32::new(1)));
    let ranks: Vec<_> = boards
        .iter()
        .map(|board| {
            let (shared, board) = (Arc::clone(&shared), Arc::clone(board));
            thread::spawn(move || {
                board.store(0, Ordering::Relaxed);
                if shared.flag.take() {
                    shared.wakes.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                }
            })
        })
        .collect();
    assert!(shared.flag.raise(), "clear before");
    let seen = boards.each_ref().map(|board| board.load(Ordering::Relaxed));
    ranks.into_iter().for_each(|rank| rank.join().expect("no panic"));
    let wakes = shared.wakes.load(std::sync::atomic::Ordering::SeqCst);
    assert!(wakes <= 1, "one wake-up per flag");
    assert!(seen == [0, 0] || wakes == 1, "a fall is seen or causes a wake-up: seen {seen:?}, {wakes} wake-ups");
}
