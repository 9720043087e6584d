//! A count of steps that are not bounded by the size of an event, for tests that hold them to it.
//!
//! Owns a counter for each thread of the crate's own tests; elsewhere there is none and counting is nothing. Leaves to
//! callers what a step is.

#[cfg(test)]
thread_local! {
    static STEPS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Counts so many steps.
#[cfg(test)]
pub(super) fn add(steps: usize) {
    STEPS.with(|count| count.set(count.get() + steps));
}

/// Counts nothing.
#[cfg(not(test))]
pub(super) fn add(_steps: usize) {}

/// Steps counted on this thread so far.
#[cfg(test)]
pub(super) fn count() -> usize {
    STEPS.with(std::cell::Cell::get)
}
