//! Driver of requests in real time: concurrent clients with one request each, whatever they send it to.
//!
//! [`drive`] is the loop of all runs over real time: closed loops over a router in this process, load for an endpoint, the
//! traffic of a drill, and the demo. [`HttpClient`] sends requests to endpoints, [`Answer`] reads streamed responses,
//! [`TimerLag`] measures whether this machine keeps up. The callers have the workloads and the reports.

mod client;
mod failure;
mod lag;
mod stream;

pub use client::{ClientError, ClientOptions, Exchange, HttpClient};
pub use failure::Failure;
pub use lag::TimerLag;
pub use stream::Answer;

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

/// A client with at most one request in flight.
pub trait Client: Send + Sized + 'static {
    /// Reason to end the run. Failed requests are usually records instead.
    type Error: Send + 'static;

    /// Sends the next request and waits for its end. Returns false if there is none.
    fn send_next(&mut self) -> impl Future<Output = Result<bool, Self::Error>> + Send;
}

/// Runs all clients until each has sent its last request, and returns them in order of their ends.
///
/// # Errors
/// The first error of a client. The other clients end at their next wait.
///
/// # Panics
/// A client panics.
pub async fn drive<C: Client>(clients: impl IntoIterator<Item = C>) -> Result<Vec<C>, C::Error> {
    let mut running = JoinSet::new();
    for mut client in clients {
        running.spawn(async move {
            while client.send_next().await? {}
            Ok(client)
        });
    }
    let mut done = Vec::with_capacity(running.len());
    while let Some(ended) = running.join_next().await {
        done.push(ended.expect("clients do not panic")?);
    }
    Ok(done)
}

/// Time of a run, in µs since its start.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// Starts a clock.
    #[must_use]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Current time.
    ///
    /// # Panics
    /// The run lasts longer than 500,000 years.
    #[must_use]
    pub fn now_us(self) -> u64 {
        u64::try_from(self.0.elapsed().as_micros()).expect("run durations fit 64 bits")
    }

    /// Waits until a time of the run.
    pub async fn reach(self, us: u64) {
        tokio::time::sleep_until(self.0 + Duration::from_micros(us)).await;
    }
}
