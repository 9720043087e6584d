//! Spans and events of a router: a span per request, and the record of a sampled decision.
//!
//! The subscriber is a minimal one that keeps all fields.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use pointsman::test_support::rank;
use pointsman::{Prompt, RouteRequest};
use serde_json::Value;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::common::{config, config_with, router, stored, tokens};

/// Fields of one span or event, including its target.
#[derive(Clone, Debug, Default)]
struct Seen(BTreeMap<&'static str, String>);

impl Visit for Seen {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }
}

/// A subscriber with a maximum level that keeps spans and events.
struct Keeper {
    level: Level,
    spans: Arc<Mutex<Vec<Seen>>>,
    events: Arc<Mutex<Vec<Seen>>>,
}

impl Subscriber for Keeper {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("pointsman") && *metadata.level() <= self.level
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut seen = Seen(BTreeMap::from([("target", span.metadata().target().to_owned())]));
        span.record(&mut seen);
        let mut spans = self.spans.lock().expect("no panic");
        spans.push(seen);
        Id::from_u64(spans.len() as u64)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        let mut spans = self.spans.lock().expect("no panic");
        let position = usize::try_from(span.into_u64()).expect("a position") - 1;
        values.record(&mut spans[position]);
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut seen = Seen(BTreeMap::from([("target", event.metadata().target().to_owned())]));
        event.record(&mut seen);
        self.events.lock().expect("no panic").push(seen);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Runs a scenario on this thread. Returns its spans and its events about requests, without lifecycle events of
/// workers.
fn traced(level: Level, scenario: impl AsyncFnOnce()) -> (Vec<Seen>, Vec<Seen>) {
    let (spans, events) = (Arc::default(), Arc::default());
    let keeper = Keeper { level, spans: Arc::clone(&spans), events: Arc::clone(&events) };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    tracing::subscriber::with_default(keeper, || runtime.expect("a runtime").block_on(scenario()));
    let seen = |kept: Arc<Mutex<Vec<Seen>>>| std::mem::take(&mut *kept.lock().expect("no panic"));
    let (spans, mut events) = (seen(spans), seen(events));
    events.retain(|event| ["pointsman::route", "pointsman::decision"].contains(&event.0["target"].as_str()));
    (spans, events)
}

#[test]
fn every_request_has_a_span_and_shows_hashes_never_tokens() {
    alone!();
    let prompt = tokens(7, 20);
    let (spans, events) = traced(Level::DEBUG, async || {
        let router = router(config_with(|c| c.pool = "chat".to_owned()), 2).await;
        router.apply_events(vec![stored(rank(1), &prompt)]).await.expect("up");
        let placed = router.route(RouteRequest::new("req-1", Prompt::Tokens(&prompt))).await.expect("placed");
        router.route(RouteRequest::new("req-1", Prompt::Tokens(&prompt))).await.expect_err("the id is taken");
        drop(placed);
    });
    let [placed, refused] = &spans[..] else { panic!("two requests: {spans:?}") };
    let of = |seen: &Seen, field: &str| seen.0.get(field).cloned().unwrap_or_default();
    for span in [placed, refused] {
        assert_eq!(["target", "pool", "request_id"].map(|f| of(span, f)), ["pointsman::route", "chat", "req-1"]);
    }
    assert_eq!(["outcome", "reason", "rank"].map(|f| of(placed, f)), ["placed", "chosen", &rank(1).to_string()]);
    assert_eq!(["outcome", "reason", "rank"].map(|f| of(refused, f)), ["error", "duplicate_request", ""]);
    for phase in ["hash_seconds", "overlap_seconds", "decide_seconds", "book_seconds", "total_seconds"] {
        assert_eq!([of(placed, phase), of(refused, phase)], ["0.0", ""], "{phase}, while time is paused");
    }

    let hashed: Vec<_> = events.iter().filter(|event| of(event, "target") == "pointsman::route").collect();
    assert_eq!(hashed.len(), 2, "{events:?}");
    for event in hashed {
        assert_eq!(of(event, "blocks"), "20");
        for hashes in [of(event, "block_hashes"), of(event, "sequence_hashes")] {
            assert_eq!(hashes.split(' ').count(), 8, "{hashes}");
            assert!(
                hashes.split(' ').all(|hash| hash.len() == 16 && u64::from_str_radix(hash, 16).is_ok()),
                "{hashes}"
            );
        }
    }
    for seen in spans.iter().chain(&events) {
        let shown: Vec<&str> = seen.0.values().flat_map(|value| value.split(|c: char| !c.is_alphanumeric())).collect();
        assert!(!prompt.iter().any(|token| shown.contains(&token.to_string().as_str())), "a token in {seen:?}");
    }
}

#[test]
fn disabled_spans_are_not_created() {
    alone!();
    let (spans, events) = traced(Level::INFO, async || {
        let router = router(config(), 1).await;
        drop(router.route(RouteRequest::new("a", Prompt::Tokens(&tokens(1, 20)))).await.expect("placed"));
    });
    assert!(spans.is_empty() && events.is_empty(), "{spans:?} {events:?}");
}

#[test]
fn a_sampled_decision_is_one_event_with_its_record_as_json() {
    alone!();
    let prompt = tokens(1, 20);
    let (_, events) = traced(Level::INFO, async || {
        let router = router(config_with(|c| c.decision_trace = 1.0), 3).await;
        router.apply_events(vec![stored(rank(2), &prompt[..40])]).await.expect("up");
        drop(router.route(RouteRequest::new("a", Prompt::Tokens(&prompt))).await.expect("placed"));
    });
    let [event] = &events[..] else { panic!("one event: {events:?}") };
    assert_eq!((event.0["target"].as_str(), event.0["schema"].as_str()), ("pointsman::decision", "2"));
    let record: Value = serde_json::from_str(&event.0["record"]).expect("JSON");
    assert_eq!(
        (&record["schema"], &record["prompt_tokens"], &record["block_size"]),
        (&2.into(), &80.into(), &4.into())
    );
    assert_eq!(record["chosen"], serde_json::to_value(rank(2)).expect("plain data"));
    let cached: Vec<_> =
        record["ranks"].as_array().expect("a row a rank").iter().map(|r| &r["cached_tokens"]).collect();
    assert_eq!(cached, [0, 0, 40]);
}
