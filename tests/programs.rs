//! Placement of programs: the first call goes to the cache with the most room, later calls return to their context.

use std::time::Duration;

use pointsman::config::QueueClass;
use pointsman::internals::load::{PromptBlocks, PromptFingerprint};
use pointsman::internals::schedule::ResolvedOptions;
use pointsman::internals::session::Call;
use pointsman::policy::Policy;
use pointsman::test_support::{SampleRequest, SimulatedFleet, mix, rank};
use pointsman::{RankTraits, SessionId};
use proptest::prelude::*;

use crate::effort::effort;
use crate::fleet::config_with;

fn fleet(policy: Policy, ranks: u64, total_kv_blocks: Option<u32>, hold_ms: Option<u64>) -> SimulatedFleet {
    let class = QueueClass { program_hold_ms: hold_ms, ..QueueClass::named("only") };
    let config = config_with(|config| (config.policy, config.queue.classes) = (policy.into(), vec![class]));
    let mut fleet = SimulatedFleet::new(config, 0);
    for worker in 0..ranks {
        fleet.admit(rank(worker), RankTraits { total_kv_blocks, ..RankTraits::default() });
    }
    fleet
}

fn agent(name: &str) -> ResolvedOptions {
    ResolvedOptions { session_id: Some(SessionId::new(name).expect("short")), program: 7, ..ResolvedOptions::default() }
}

/// A program on `worker` whose context is `tokens` long.
fn resident(fleet: &mut SimulatedFleet, worker: u64, tokens: u32) {
    let (prompt, fingerprint) = (PromptBlocks::Counted(1), PromptFingerprint::unshared());
    let call = Call {
        program: 1 + worker,
        prompt: &prompt,
        fingerprint,
        prompt_tokens: tokens,
        held_blocks: 0,
        held_tokens: 0,
    };
    let (id, now) = (SessionId::new(&format!("on-{worker}")).expect("short"), fleet.now);
    fleet.schedule.sessions_mut().call(&id, rank(worker), &call, now);
}

/// The worker of a request of `blocks` blocks with these blocks cached.
fn placed(fleet: &mut SimulatedFleet, id: u64, options: ResolvedOptions, cached: Vec<(usize, u32)>) -> u64 {
    let sample = SampleRequest { blocks: 40, prompt: 100 + id, cached, options, ..SampleRequest::default() };
    fleet.request(id, &sample);
    let worker = fleet.worker(id);
    fleet.free(id);
    fleet.now = fleet.now + Duration::from_secs(60);
    worker
}

#[test]
fn a_program_begins_on_the_rank_with_the_most_room() {
    for policy in [Policy::Latency, Policy::Kv] {
        let mut fleet = fleet(policy, 4, Some(1_000), None);
        for (worker, tokens) in [(0, 7_000), (1, 3_000), (3, 9_000)] {
            resident(&mut fleet, worker, tokens);
        }
        assert_eq!(placed(&mut fleet, 0, agent("a"), vec![]), 2, "{policy:?}: nothing is there");
        assert_eq!(placed(&mut fleet, 1, agent("b"), vec![]), 2, "{policy:?}: 640 tokens are there");
        resident(&mut fleet, 2, 4_000);
        assert_eq!(placed(&mut fleet, 2, agent("c"), vec![]), 1);
        assert_eq!(placed(&mut fleet, 3, agent("a"), vec![(2, 39)]), 2, "it returns");
        assert_eq!(placed(&mut fleet, 4, agent("a"), vec![]), 1, "its context is evicted");
        fleet.now = fleet.now + Duration::from_secs(300);
        resident(&mut fleet, 2, 100);
        resident(&mut fleet, 3, 50);
        resident(&mut fleet, 0, 200);
        assert_eq!(placed(&mut fleet, 5, agent("d"), vec![]), 1, "idle programs do not count");
    }
}

#[test]
fn without_a_known_capacity_recent_work_decides() {
    let mut fleet = fleet(Policy::Latency, 3, None, None);
    resident(&mut fleet, 1, 9_000);
    let workers: Vec<u64> = (0..3).map(|n| placed(&mut fleet, n, agent(&format!("p{n}")), vec![])).collect();
    let unnamed: Vec<u64> = (3..6).map(|n| placed(&mut fleet, n, ResolvedOptions::default(), vec![])).collect();
    for mut workers in [workers, unnamed] {
        workers.sort_unstable();
        assert_eq!(workers, [0, 1, 2], "each rank once");
    }
}

/// Outcomes of requests without programs, on ranks with or without contexts of programs.
fn outcomes(policy: Policy, workers: u64, seeds: &[u64], has_programs: bool, hold_ms: Option<u64>) -> SimulatedFleet {
    let mut fleet = fleet(policy, workers, Some(60), hold_ms);
    for (id, &seed) in (0..).zip(seeds) {
        if has_programs {
            resident(&mut fleet, mix(seed ^ 1) % workers, (mix(seed) % 5_000) as u32);
        }
        let cached = (0..workers as usize).map(|node| (node, (mix(seed + node as u64) % 9) as u32));
        let (blocks, prompt) = (1 + (seed >> 12) as u32 % 12, (seed >> 16) % 4);
        let cached = cached.filter(|(_, blocks)| *blocks > 0).collect();
        fleet.request(id, &SampleRequest { blocks, prompt, cached, ..SampleRequest::default() });
        if id > 8 {
            fleet.free(id - 8);
        }
        fleet.now = fleet.now + Duration::from_millis(seed % 50);
    }
    fleet.settle();
    fleet
}

proptest! {
    #![proptest_config(effort(64, "tests/programs.proptest-regressions"))]

    #[test]
    fn programs_do_not_change_the_ranks_of_other_requests(
        workers in 1u64..9, seeds in prop::collection::vec(any::<u64>(), 1..80),
        policy in prop::sample::select(Policy::ALL.to_vec()),
    ) {
        let seeds: Vec<u64> = seeds.into_iter().map(|seed| seed >> 1).collect();
        let [none, programs, holds] = [(false, None), (true, None), (true, Some(9_000))]
            .map(|(has_programs, hold_ms)| outcomes(policy, workers, &seeds, has_programs, hold_ms));
        prop_assert_eq!(none.placed(), programs.placed());
        prop_assert_eq!(format!("{:?}", programs.outcomes), format!("{:?}", holds.outcomes));
        prop_assert_eq!(programs.queried_ranks, holds.queried_ranks);
    }
}
