//! Watch of one kind of Kubernetes objects, with reconnection.

use std::pin::Pin;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use k8s_openapi::jiff::Timestamp;
use kube::runtime::watcher::{self, Error, Event, watcher};
use kube::{Api, Resource as _};
use tokio::time::{Instant, sleep_until};

use super::objects::WatchedObject;
use crate::discovery::{DiscoveryError, ReflectedEvent, ReflectedSet};

/// First and longest delay before a reconnection.
const DELAYS: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(30)];

/// Status of an expired resource version. A new list follows, and no state is lost.
const EXPIRED: u16 = 410;

type Events = Pin<Box<dyn Stream<Item = Result<Event<WatchedObject>, Error>> + Send>>;

/// A watch and the objects that it has received, converted to `T`. A failed watch begins again with a list; until the
/// list is complete, the last objects stay.
pub(super) struct ObjectWatch<T> {
    api: Api<WatchedObject>,
    config: watcher::Config,
    /// Resource and namespace, for errors.
    pub(super) resource: String,
    convert: fn(WatchedObject) -> T,
    events: Option<Events>,
    pub(super) set: ReflectedSet<T>,
    /// Whether the set has been listed under this configuration.
    pub(super) is_current: bool,
    delay: Duration,
    retry_at: Instant,
    /// Error since the last success.
    pub(super) error: Option<DiscoveryError>,
}

impl<T: PartialEq> ObjectWatch<T> {
    pub(super) fn new(
        api: Api<WatchedObject>,
        config: watcher::Config,
        resource: String,
        convert: fn(WatchedObject) -> T,
    ) -> Self {
        let (set, delay, retry_at) = (ReflectedSet::default(), DELAYS[0], Instant::now());
        Self { api, config, resource, convert, events: None, set, is_current: false, delay, retry_at, error: None }
    }

    /// Begins again with a list under another configuration.
    pub(super) fn restart(&mut self, config: watcher::Config) {
        (self.config, self.events, self.retry_at) = (config, None, Instant::now());
        self.is_current = false;
    }

    /// Waits for the next event or failure and applies it. Cancel-safe.
    pub(super) async fn advance(&mut self) {
        let events = match &mut self.events {
            Some(events) => events,
            None => {
                sleep_until(self.retry_at).await;
                self.events.insert(Box::pin(watcher(self.api.clone(), self.config.clone())))
            }
        };
        match events.next().await {
            Some(Ok(event)) => {
                let event = self.converted(event);
                // Events of a list in progress do not prove that the watch works.
                if !matches!(event, ReflectedEvent::ListStarted | ReflectedEvent::Listed(..)) {
                    if self.error.take().is_some() {
                        tracing::info!(resource = self.resource, "Kubernetes watch resumed");
                    }
                    self.delay = DELAYS[0];
                }
                self.is_current |= event == ReflectedEvent::ListDone;
                self.set.apply(event);
            }
            Some(Err(Error::WatchError(status))) if status.code == EXPIRED => self.list_again(),
            Some(Err(error)) => self.failed(&error),
            None => self.list_again(),
        }
    }

    fn converted(&self, event: Event<WatchedObject>) -> ReflectedEvent<T> {
        let name = |object: &WatchedObject| object.meta().name.clone().unwrap_or_default();
        match event {
            Event::Init => ReflectedEvent::ListStarted,
            Event::InitApply(object) => ReflectedEvent::Listed(name(&object), (self.convert)(object)),
            Event::InitDone => ReflectedEvent::ListDone,
            Event::Apply(object) => ReflectedEvent::Applied(name(&object), (self.convert)(object)),
            Event::Delete(object) => ReflectedEvent::Deleted(name(&object)),
        }
    }

    fn list_again(&mut self) {
        (self.events, self.retry_at) = (None, Instant::now() + DELAYS[0]);
    }

    fn failed(&mut self, error: &Error) {
        self.events = None;
        self.retry_at = Instant::now() + self.delay;
        self.delay = (self.delay * 2).min(DELAYS[1]);
        let since = match &self.error {
            Some(DiscoveryError::Watch { since, .. }) => since.clone(),
            Some(_) | None => format!("{:.0}", Timestamp::now()),
        };
        self.error = Some(DiscoveryError::Watch { resource: self.resource.clone(), since, reason: reason_of(error) });
    }
}

/// The reason with its remedy, for the statuses that users can repair.
fn reason_of(error: &Error) -> String {
    let status = match error {
        Error::InitialListFailed(kube::Error::Api(status))
        | Error::WatchStartFailed(kube::Error::Api(status))
        | Error::WatchFailed(kube::Error::Api(status))
        | Error::WatchError(status) => status,
        Error::InitialListFailed(error) | Error::WatchStartFailed(error) | Error::WatchFailed(error) => {
            return causes(error);
        }
        Error::NoResourceVersion => return causes(error),
    };
    let message = &status.message;
    match status.code {
        403 => format!("forbidden (status 403), the role needs the verbs get, list and watch: {message}"),
        404 => format!("not known to the API server (status 404), is its CRD installed? {message}"),
        code => format!("status {code}: {message}"),
    }
}

/// An error with its sources, without repetitions.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = error.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
        source = error.source();
    }
    text
}
