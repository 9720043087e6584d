//! Worker section of the metrics page in Prometheus' text format.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Durations, TABLES, WorkerMeters, WorkerTable};
use crate::observe::metric::Metric;
use crate::observe::page::{SECONDS, WorkerSeries};
use crate::observe::requests::{RetryReason, WORKER_FIRST_TOKEN, WORKER_REQUESTS, WORKER_RETRIES, WORKER_SECONDS};

/// The series of the workers of all models in this process. Two gateways in one process with the same model share
/// them, as in the recorder.
pub(crate) fn series(workers_max: usize) -> WorkerSeries {
    let render = |workers_max| {
        let tables: Vec<_> = TABLES.lock().iter().filter_map(std::sync::Weak::upgrade).collect();
        render(&tables, workers_max)
    };
    WorkerSeries { workers_max, render }
}

fn render(tables: &[Arc<WorkerTable>], workers_max: usize) -> (String, Option<BTreeSet<String>>) {
    let current =
        tables.iter().flat_map(|table| table.current().into_iter().map(move |(id, meters)| (table, id, meters)));
    let mut current: Vec<_> = current.collect();
    let ids = (current.len() > workers_max).then(|| {
        current.sort_by_cached_key(|(_, id, meters)| (Reverse(meters.attempts()), *id));
        current.truncate(workers_max);
        current.iter().map(|(_, id, _)| id.to_string()).collect()
    });
    let mut workers = Workers::new();
    for (table, id, meters) in current {
        let (model, endpoint) = (escaped(&table.model), escaped(&without_credentials(&meters.endpoint)));
        let labels = format!("model=\"{model}\",worker=\"{id}\",worker_endpoint=\"{endpoint}\"");
        workers.entry(labels).or_default().push(meters);
    }
    let mut page = String::new();
    if !workers.is_empty() {
        requests(&mut page, &workers);
        retries(&mut page, &workers);
        durations(&mut page, &WORKER_FIRST_TOKEN, &workers, |meters| &meters.first_token);
        durations(&mut page, &WORKER_SECONDS, &workers, |meters| &meters.request);
    }
    (page, ids)
}

type Workers = BTreeMap<String, Vec<Arc<WorkerMeters>>>;

fn head(page: &mut String, metric: &Metric) {
    let Metric { name, help, .. } = metric;
    let kind = metric.kind.name();
    *page += &format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
}

fn requests(page: &mut String, workers: &Workers) {
    head(page, &WORKER_REQUESTS);
    for (labels, meters) in workers {
        let mut counts = BTreeMap::<(Option<u16>, &str), u64>::new();
        for meters in meters {
            for (key, count) in &*meters.requests.lock() {
                *counts.entry(*key).or_default() += count;
            }
        }
        for ((status, outcome), count) in counts {
            let (name, status) = (WORKER_REQUESTS.name, status.map_or("none".to_owned(), |status| status.to_string()));
            *page += &format!("{name}{{{labels},status=\"{status}\",outcome=\"{outcome}\"}} {count}\n");
        }
    }
    page.push('\n');
}

fn retries(page: &mut String, workers: &Workers) {
    head(page, &WORKER_RETRIES);
    for (labels, meters) in workers {
        for reason in RetryReason::ALL {
            let retries = meters.iter().map(|meters| meters.retries[reason as usize].load(Ordering::Relaxed));
            let (name, retries, reason) = (WORKER_RETRIES.name, retries.sum::<u64>(), reason.name());
            if retries > 0 {
                *page += &format!("{name}{{{labels},reason=\"{reason}\"}} {retries}\n");
            }
        }
    }
    page.push('\n');
}

#[expect(clippy::cast_precision_loss, reason = "microseconds fit f64 exactly for centuries")]
fn durations(page: &mut String, metric: &Metric, workers: &Workers, of: impl Fn(&WorkerMeters) -> &Durations) {
    head(page, metric);
    for (labels, meters) in workers {
        let sum = |read: &dyn Fn(&Durations) -> u64| meters.iter().map(|meters| read(of(meters))).sum::<u64>();
        let (name, mut so_far) = (metric.name, 0);
        for n in 0..=SECONDS.len() {
            so_far += sum(&|durations| durations.buckets[n].load(Ordering::Relaxed));
            let bound = SECONDS.get(n).map_or("+Inf".to_owned(), ToString::to_string);
            *page += &format!("{name}_bucket{{{labels},le=\"{bound}\"}} {so_far}\n");
        }
        let seconds = sum(&|durations| durations.micros.load(Ordering::Relaxed)) as f64 / 1e6;
        *page += &format!("{name}_sum{{{labels}}} {seconds}\n{name}_count{{{labels}}} {so_far}\n");
    }
    page.push('\n');
}

/// An endpoint without user and password.
fn without_credentials(endpoint: &str) -> String {
    match endpoint.split_once("://") {
        Some((scheme, rest)) => {
            let authority = rest.find('/').unwrap_or(rest.len());
            let host = rest[..authority].rfind('@').map_or(0, |at| at + 1);
            format!("{scheme}://{}", &rest[host..])
        }
        None => endpoint.to_owned(),
    }
}

/// A label value escaped for the text format.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use pointsman::protocol::{WorkerConfig, WorkerId};
    use pointsman::{Router, RouterConfig};

    use super::*;

    #[tokio::test]
    async fn the_workers_with_failures_then_the_busiest_have_series() {
        let mut router = Router::builder(RouterConfig::default());
        for id in 1..=200 {
            router = router.worker(WorkerId(id), WorkerConfig::at(format!("http://e{id}")));
        }
        let table = WorkerTable::new("m", router.start().await.expect("the router starts"));
        let workers = table.current();
        let count = |id: u64, outcome: &'static str, attempts: u64| {
            let (_, meters) = workers.iter().find(|(worker, _)| *worker == WorkerId(id)).expect("a worker");
            meters.requests.lock().insert((Some(200), outcome), attempts);
        };
        count(7, "reset", 1);
        count(90, "ok", 1000);
        let ids_of = |workers_max| render(&[Arc::clone(&table)], workers_max);
        let (page, ids) = ids_of(3);
        assert_eq!(ids, Some(["1", "7", "90"].map(str::to_owned).into()));
        let of = |id: u64| page.lines().filter(|line| line.contains(&format!(",worker=\"{id}\","))).count();
        assert!(of(7) > 40 && of(90) > 40 && of(2) == 0, "{page}");
        assert_eq!(ids_of(200).1, None, "all have series");
    }

    #[test]
    fn labels_hold_no_credentials_and_are_escaped() {
        assert_eq!(without_credentials("http://user:p@ss@host:80/a@b"), "http://host:80/a@b");
        assert_eq!(without_credentials("http://host:80"), "http://host:80");
        assert_eq!(without_credentials("odd"), "odd");
        assert_eq!(escaped("a\"\\\n"), "a\\\"\\\\\\n");
    }
}
