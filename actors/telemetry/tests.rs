use std::collections::BTreeSet;
use std::path::Path;

use super::Pool;
use super::decisions::BookingResult;
use super::instruments::{INSTRUMENTS, Instrument, InstrumentKind};
use super::predictions::{NEVER_MATCHED_AFTER, PredictionMeters, PromptKind};
use crate::wire::Finding;
use metrics_util::debugging::{DebugValue, DebuggingRecorder};

const PAGE: &str = "docs/metrics.md";

fn row(instrument: &Instrument) -> String {
    let Instrument { name, kind, labels, help, .. } = instrument;
    let kind = match kind {
        InstrumentKind::Counter => "counter",
        InstrumentKind::Gauge => "gauge",
        InstrumentKind::Histogram => "histogram",
    };
    let labels: String = labels.iter().map(|label| format!(", `{label}`")).collect();
    format!("- `{name}` ({kind}{labels}): {help}")
}

#[test]
fn the_page_lists_exactly_all_metrics() {
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE)).expect("readable page");
    // The gateway's own tests compare its rows with its code.
    let is_ours = |line: &&str| line.starts_with("- `pointsman_") && !line.starts_with("- `pointsman_gateway_");
    let listed: Vec<&str> = page.lines().filter(is_ours).collect();
    let expected: Vec<String> = INSTRUMENTS.iter().map(row).collect();
    assert!(listed == expected, "{PAGE} must list\n{}\n", expected.join("\n"));
    for result in BookingResult::ALL {
        let begins = page.find(&format!("\n- `{}`: ", result.outcome())).expect("an item for each outcome");
        let item = &page[begins + 1..];
        let reasons = &item[..item.find("\n- ").or(item.find("\n\n")).unwrap_or(item.len())];
        assert!(reasons.contains(&format!("`{}`", result.name())), "{PAGE} does not explain {result:?}");
    }
    for finding in Finding::ALL {
        let row = format!("- `{}`: ", finding.name());
        assert_eq!(
            page.lines().filter(|line| line.starts_with(&row)).count(),
            1,
            "{PAGE} does not explain {finding:?}"
        );
    }
}

#[test]
fn metric_names_have_prefix_and_kind() {
    let names: BTreeSet<&str> = INSTRUMENTS.iter().map(|instrument| instrument.name).collect();
    assert_eq!(names.len(), INSTRUMENTS.len(), "each once");
    for Instrument { name, kind, .. } in INSTRUMENTS {
        assert!(name.starts_with("pointsman_"), "{name}");
        assert_eq!(name.ends_with("_total"), *kind == InstrumentKind::Counter, "{name}");
    }
}

#[test]
fn every_result_has_a_label_and_a_reason() {
    let reasons: BTreeSet<&str> = BookingResult::ALL.into_iter().map(BookingResult::name).collect();
    assert_eq!(reasons.len(), BookingResult::ALL.len());
}

#[test]
fn only_consecutive_contradictions_raise_the_alarm() {
    let alarms = |reports: &[(PromptKind, u32, u32)]| {
        let recorder = DebuggingRecorder::new();
        metrics::with_local_recorder(&recorder, || {
            let predictions = PredictionMeters::new(&Pool::new("p"));
            reports
                .iter()
                .for_each(|&(kind, predicted, delivered)| predictions.count(kind, true, predicted, delivered));
        });
        let counted = recorder.snapshotter().snapshot().into_vec();
        let alarms = counted.into_iter().filter(|(key, ..)| key.key().name() == "pointsman_never_matched_total");
        let alarms = alarms.map(|(key, _, _, value)| match value {
            DebugValue::Counter(count) => (key.key().labels().nth(1).map(|l| l.value().to_owned()), count),
            DebugValue::Gauge(_) | DebugValue::Histogram(_) => panic!("alarms are counted"),
        });
        alarms.filter(|(_, count)| *count > 0).collect::<Vec<_>>()
    };
    let one_short = NEVER_MATCHED_AFTER as usize - 1;
    let (over, under) = ((PromptKind::Lora, 64, 0), (PromptKind::Lora, 0, 64));
    assert_eq!(alarms(&vec![over; one_short]), []);
    let silent = [vec![over; one_short], vec![(PromptKind::Lora, 0, 0); 9], vec![(PromptKind::Plain, 64, 0)]].concat();
    assert_eq!(alarms(&silent), [], "empty reports and other kinds do not count");
    let lora = |count| vec![(Some("lora".to_owned()), count)];
    assert_eq!(alarms(&[silent.clone(), vec![under]].concat()), lora(1), "contradictions in both directions count");
    let agreed = [vec![over; one_short], vec![(PromptKind::Lora, 64, 16)], vec![over; one_short]].concat();
    assert_eq!(alarms(&agreed), [], "one agreement resets the streak");
    assert_eq!(alarms(&vec![over; 2 * NEVER_MATCHED_AFTER as usize]), lora(2));
}

#[test]
fn an_incomplete_index_that_predicts_nothing_raises_no_alarm() {
    let doubted = |is_index_complete, predicted, delivered| {
        let recorder = DebuggingRecorder::new();
        metrics::with_local_recorder(&recorder, || {
            let predictions = PredictionMeters::new(&Pool::new("p"));
            for _ in 0..NEVER_MATCHED_AFTER {
                predictions.count(PromptKind::Plain, is_index_complete, predicted, delivered);
            }
            predictions.never_matching().count()
        })
    };
    assert_eq!(doubted(false, 0, 64), 0, "the engine's cache is warm before its events are replayed");
    assert_eq!((doubted(true, 0, 64), doubted(false, 64, 0)), (1, 1));
}
