//! Acknowledgement by drop: a value that travels with a message and takes effect however the message ends.

/// Drops the value inside it at the end of a step, with a dropped message, or with a dying actor.
pub(crate) struct Acknowledgement(#[expect(dead_code, reason = "the drop is the acknowledgement")] Box<dyn Send>);

impl Acknowledgement {
    /// Wraps a value whose drop reports to its sender.
    pub(crate) fn new(on_drop: impl Send + 'static) -> Self {
        Self(Box::new(on_drop))
    }
}
