//! Recorded decisions of simulations are repeated bit for bit: every policy on several workloads.
//!
//! Each simulation records all its decisions. A replay makes each of them again and compares it. `POINTSMAN_DECISIONS`
//! sets the decisions of each workload and policy, 4,762 for 100,000 in all.

use std::cell::RefCell;

use pointsman::policy::Policy;
use pointsman::{RecordCursor, Replay, ReplayedDecision, Router};
use pointsman_bench::fleet::Setup;
use pointsman_bench::simulate;
use pointsman_bench::targets::Embedded;
use pointsman_bench::workload::generate::Generator;
use serde_json::json;

/// Memory of the record of one simulation, larger than any record.
const BYTES_MAX: u64 = 8 << 30;

/// Counts of one simulation.
#[derive(Debug, Default)]
struct Replayed {
    decisions: usize,
    different: usize,
}

/// Simulates the first requests of a workload and replays their decisions.
fn simulated(workload: &str, policy: Policy, seed: u64, decisions_max: usize) -> Replayed {
    let mut workload = workload.parse::<Generator>().expect("a workload").generate(seed);
    workload.requests.truncate(decisions_max);
    let mut setup = Setup::new(8, 1);
    (setup.router.policy, setup.router.seed) = (policy, seed);
    setup.router.settings.push(("recorder.bytes_max".to_owned(), json!(BYTES_MAX)));
    let router = RefCell::new(None);
    let start = async |setup: &Setup| {
        let embedded = Embedded::start(setup).await?;
        *router.borrow_mut() = Some(embedded.router().clone());
        Ok(embedded)
    };
    simulate::run(&setup, &workload, start).expect("a simulation");
    replayed(&router.into_inner().expect("a router"))
}

fn replayed(router: &Router) -> Replayed {
    let (parts, lost) = router.records_after(&mut RecordCursor::default());
    assert_eq!(lost, 0, "segments have left the memory");
    let mut sums = Replayed::default();
    for part in &parts {
        let visit = &mut |decision: ReplayedDecision| {
            sums.decisions += 1;
            sums.different += usize::from(!decision.is_equal);
        };
        let settings = |bytes: &[u8]| serde_json::from_slice(bytes).map_err(|error| error.to_string());
        Replay::verifying(settings).feed(&part.bytes, visit).expect("a valid record");
    }
    sums
}

fn repeats_its_recorded_decisions(workload: &str) {
    #[expect(clippy::disallowed_methods, reason = "the length of the test is a choice of its caller")]
    let decisions = std::env::var("POINTSMAN_DECISIONS").map_or(100, |count| count.parse().expect("a count"));
    for policy in Policy::ALL {
        let mut total = Replayed::default();
        for seed in 1.. {
            let of_seed = simulated(workload, policy, seed, decisions - total.decisions);
            total.decisions += of_seed.decisions;
            total.different += of_seed.different;
            if total.decisions >= decisions {
                break;
            }
        }
        assert_eq!(total.different, 0, "{workload}, {policy:?}: {total:?}");
    }
}

#[test]
fn every_policy_repeats_its_decisions_on_chats() {
    repeats_its_recorded_decisions("chat");
}

#[test]
fn every_policy_repeats_its_decisions_on_agents() {
    repeats_its_recorded_decisions("agents");
}

#[test]
fn every_policy_repeats_its_decisions_on_documents() {
    repeats_its_recorded_decisions("documents");
}
