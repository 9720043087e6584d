//! Starting a router.

use std::sync::Arc;

use ractor::Actor;
use tokio::sync::{oneshot, watch};

use super::{Inner, Router};
use crate::actors::clock::Clock;
use crate::actors::shared::Shared;
use crate::actors::supervisor::{Supervisor, SupervisorMsg};
use crate::config::RouterConfig;
use crate::error::StartError;
use crate::protocol::{WorkerConfig, WorkerId, WorkerMap};

/// A router to be started.
#[must_use = "nothing runs until `start`"]
#[derive(Debug)]
pub struct RouterBuilder {
    config: RouterConfig,
    workers: WorkerMap,
    discovery: Option<watch::Receiver<WorkerMap>>,
}

impl RouterBuilder {
    pub(super) fn new(config: RouterConfig) -> Self {
        Self { config, workers: WorkerMap::new(), discovery: None }
    }

    /// Adds a worker that is there from the start and stays until it is removed by name.
    pub fn worker(mut self, worker: WorkerId, config: WorkerConfig) -> Self {
        self.workers.insert(worker, config);
        self
    }

    /// Follows a discovery source: each value it shows is the whole set of workers that should be there, beside those
    /// added by hand. A notification that is missed is made up for by the next.
    pub fn discovery(mut self, source: watch::Receiver<WorkerMap>) -> Self {
        self.discovery = Some(source);
        self
    }

    /// Starts the actors, registers the workers given, and waits for `min_initial_workers`.
    ///
    /// # Errors
    /// See [`StartError`]. Nothing runs on after an error.
    pub async fn start(self) -> Result<Router, StartError> {
        self.config.validate()?;
        let wanted = self.config.min_initial_workers;
        let shared = Arc::new(Shared::new(self.config, Clock::start()));
        let (supervisor, _) = Actor::spawn(None, Supervisor, Arc::clone(&shared))
            .await
            .map_err(|error| StartError::Spawn(error.to_string()))?;
        let router = Router { inner: Arc::new(Inner { shared, supervisor }) };
        for (worker, config) in self.workers {
            router.upsert_worker(worker, config).await?;
        }
        match self.discovery {
            Some(source) => {
                let closed = follow(source, &router);
                wait_for_workers(&router, wanted, closed).await?;
            }
            None => {
                let registered = router.workers().len();
                if registered < wanted as usize {
                    return Err(StartError::NoSource { registered, wanted });
                }
            }
        }
        Ok(router)
    }
}

/// Passes each value of the source on to the supervisor. The answer is dropped when the source has closed and its last
/// value has been taken in.
fn follow(mut source: watch::Receiver<WorkerMap>, router: &Router) -> oneshot::Receiver<()> {
    let (open, closed) = oneshot::channel();
    let (supervisor, shared) = (router.supervisor().clone(), Arc::clone(router.shared()));
    tokio::spawn(async move {
        loop {
            let desired = source.borrow_and_update().clone();
            let (done, taken_in) = oneshot::channel();
            if supervisor.send_message(SupervisorMsg::Reconcile { desired, done: Some(done) }).is_err() {
                break; // the router is down
            }
            drop(taken_in.await);
            tokio::select! {
                biased;
                _ = shared.down() => break,
                changed = source.changed() => match changed {
                    Ok(()) => {}
                    Err(_) => break, // the source has closed: the workers stay as they are
                },
            }
        }
        drop(open);
    });
    closed
}

async fn wait_for_workers(router: &Router, wanted: u32, closed: oneshot::Receiver<()>) -> Result<(), StartError> {
    let mut workers = router.shared().workers.subscribe();
    let enough = workers.wait_for(|workers| workers.len() >= wanted as usize);
    tokio::select! {
        biased;
        _ = enough => Ok(()),
        down = router.shared().down() => Err(down.into()),
        _ = closed => {
            let registered = router.workers().len();
            if registered >= wanted as usize { Ok(()) } else { Err(StartError::SourceClosed { registered, wanted }) }
        }
    }
}
