//! Maximum of the live bytes of the process, sampled on a separate thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::ALLOCATOR;

pub(crate) fn live_bytes() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated.saturating_sub(stats.bytes_deallocated)
}

pub(crate) struct Peak {
    is_over: Arc<AtomicBool>,
    most: Arc<AtomicUsize>,
    before: AtomicUsize,
    thread: Option<JoinHandle<()>>,
}

impl Peak {
    pub(crate) fn watch() -> Self {
        let (is_over, most) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let thread = std::thread::spawn({
            let (is_over, most) = (Arc::clone(&is_over), Arc::clone(&most));
            move || {
                while !is_over.load(Ordering::Relaxed) {
                    most.fetch_max(live_bytes(), Ordering::Relaxed);
                    std::thread::park_timeout(Duration::from_micros(200));
                }
            }
        });
        Self { is_over, most, before: AtomicUsize::new(live_bytes()), thread: Some(thread) }
    }

    pub(crate) fn reset(&self) {
        self.before.store(live_bytes(), Ordering::Relaxed);
        self.most.store(0, Ordering::Relaxed);
    }

    /// The maximum since the last reset, beyond the bytes that were live then.
    pub(crate) fn most(&self) -> usize {
        self.most.load(Ordering::Relaxed).max(live_bytes()).saturating_sub(self.before.load(Ordering::Relaxed))
    }
}

impl Drop for Peak {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the watcher does not panic");
        }
    }
}
