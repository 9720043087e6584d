//! Metrics recorder that keeps only the notes counted by the event readers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

/// Counts by note name.
#[derive(Clone, Default)]
pub(super) struct Notes(Arc<Mutex<BTreeMap<String, Arc<AtomicU64>>>>);

/// Installs the recorder for the rest of the process.
pub(super) fn install() -> Notes {
    let notes = Notes::default();
    metrics::set_global_recorder(notes.clone()).expect("no other recorder is installed");
    notes
}

impl Notes {
    pub(super) fn all(&self) -> BTreeMap<String, u64> {
        let counters = self.0.lock().expect("lock not poisoned");
        counters.iter().map(|(note, count)| (note.clone(), count.load(Ordering::Relaxed))).collect()
    }
}

/// Notes counted between two snapshots.
pub(super) fn since(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>) -> String {
    let more = after.iter().map(|(note, count)| (note, count - before.get(note).copied().unwrap_or(0)));
    let progress: Vec<String> =
        more.filter(|(_, count)| *count > 0).map(|(note, count)| format!("{note} {count}")).collect();
    if progress.is_empty() { "none".to_owned() } else { progress.join(", ") }
}

impl Recorder for Notes {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        if key.name() != "pointsman_kv_source_notes_total" {
            return Counter::noop();
        }
        let note = key.labels().find(|label| label.key() == "note").map(|label| label.value().to_owned());
        let mut counters = self.0.lock().expect("lock not poisoned");
        Counter::from_arc(Arc::clone(counters.entry(note.unwrap_or_default()).or_default()))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}
