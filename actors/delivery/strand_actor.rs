//! The ractor actor of a strand: its node in the supervision tree, and its task for the rest of the inbox.

use std::marker::PhantomData;
use std::sync::Arc;

use ractor::{Actor, ActorRef};

use super::ActorResult;
use super::strand::{ActorState, Strand, StrandTask};

/// Wakes an actor's task to drain its inbox.
pub(crate) struct Wake<S>(PhantomData<fn() -> S>);

impl<S: ActorState> StrandTask for ActorRef<Wake<S>> {
    fn wake(&self) {
        drop(self.send_message(Wake(PhantomData))); // a dead actor's inbox is dropped when its death is reported
    }

    fn stop(&self, reason: Option<String>) {
        self.get_cell().stop(reason);
    }
}

/// The actor of a strand.
pub(crate) struct StrandActor<S>(PhantomData<fn() -> S>);

impl<S> StrandActor<S> {
    pub(crate) fn new() -> Self {
        Self(PhantomData)
    }
}

impl<S: ActorState> Actor for StrandActor<S> {
    type Msg = Wake<S>;
    type State = Arc<Strand<S>>;
    type Arguments = Arc<Strand<S>>;

    async fn pre_start(&self, _: ActorRef<Wake<S>>, strand: Arc<Strand<S>>) -> ActorResult<Arc<Strand<S>>> {
        Ok(strand)
    }

    async fn handle(&self, _: ActorRef<Wake<S>>, _: Wake<S>, strand: &mut Arc<Strand<S>>) -> ActorResult {
        strand.drain();
        Ok(())
    }
}
