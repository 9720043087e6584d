//! Counters that a router has recorded on the thread of a test.

use std::collections::BTreeMap;
use std::sync::Mutex;

use metrics_util::debugging::{DebugValue, DebuggingRecorder};

#[derive(Debug, Default)]
pub(crate) struct Counters {
    recorder: DebuggingRecorder,
    /// By name and label values. A snapshot resets the counters of the recorder.
    totals: Mutex<BTreeMap<(String, Vec<String>), u64>>,
}

impl Counters {
    /// Records on this thread until the guard is dropped.
    pub(crate) fn record(&self) -> metrics::LocalRecorderGuard<'_> {
        metrics::set_default_local_recorder(&self.recorder)
    }

    /// Sum of the counters with this name and all of these label values.
    pub(crate) fn get(&self, name: &str, labels: &[&str]) -> u64 {
        let mut totals = self.totals.lock().expect("no panic");
        for (key, .., value) in self.recorder.snapshotter().snapshot().into_vec() {
            if let DebugValue::Counter(count) = value {
                let values = key.key().labels().map(|label| label.value().to_owned()).collect();
                *totals.entry((key.key().name().to_owned(), values)).or_default() += count;
            }
        }
        let has_all = |values: &[String]| labels.iter().all(|label| values.iter().any(|value| value == label));
        totals.iter().filter(|((of, values), _)| of == name && has_all(values)).map(|(_, count)| count).sum()
    }
}
