//! Step counter for tests of algorithmic cost.
//!
//! Counts steps whose number is not bounded by the size of an event. Each thread of the crate's own tests has a
//! counter; other builds compile the counting away. Callers define a step.

#[cfg(test)]
thread_local! {
    static STEPS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Adds to the step count.
#[cfg(test)]
pub(super) fn add(steps: usize) {
    STEPS.with(|count| count.set(count.get() + steps));
}

/// No operation outside tests.
#[cfg(not(test))]
pub(super) fn add(_steps: usize) {}

/// Steps counted on this thread so far.
#[cfg(test)]
pub(super) fn count() -> usize {
    STEPS.with(std::cell::Cell::get)
}
