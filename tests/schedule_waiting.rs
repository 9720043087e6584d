//! Holds the scheduler to what it promises to those who wait, through anything that may happen, and by examples.
//!
//! `PROPTEST_CASES` sets the number of histories; a failure prints its seed.

#[path = "common/fleet.rs"]
mod fleet;
#[path = "common/world.rs"]
mod world;

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use world::World;

#[expect(clippy::disallowed_methods, reason = "a test's effort is no configuration of the router")]
fn effort() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(24);
    let seeds = FileFailurePersistence::Direct("tests/schedule_waiting.proptest-regressions");
    ProptestConfig { cases, failure_persistence: Some(Box::new(seeds)), ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(effort())]

    #[test]
    fn whatever_happens_every_request_leaves_once_and_rightly(
        seed: u64, steps in prop::collection::vec(any::<u64>(), 1..2_000),
    ) {
        let mut world = World::new(seed);
        steps.into_iter().for_each(|noise| world.step(noise));
        world.finish();
    }
}

#[test]
fn a_hundred_thousand_steps_leave_nothing_behind() {
    let (mut waited, mut refreshed) = (0, 0);
    for history in 0..20 {
        let mut world = World::new(history);
        (0..5_000).for_each(|n| world.step(history << 32 | n));
        world.finish();
        waited += world.waited;
        refreshed += world.refreshed;
    }
    assert!(waited > 1_000 && refreshed > 100, "{waited} waited, {refreshed} were refreshed");
}
