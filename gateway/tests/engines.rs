//! A router with four engines of two ranks each that use four event dialects: its index must match their caches.

use pointsman::protocol::StorageTier;
use pointsman_trial::mock::{Dialect, EventFormat, Faults};

use crate::common::fleet::Fleet;
use crate::common::holdings::Holdings;
use crate::common::workload::{BLOCK_SIZE, LORAS, SALTS};

const FORMATS: [EventFormat; 4] = [
    EventFormat { dialect: Dialect::VllmArray, binary_hashes: false },
    EventFormat { dialect: Dialect::VllmMap, binary_hashes: true },
    EventFormat { dialect: Dialect::SglangArray, binary_hashes: false },
    EventFormat { dialect: Dialect::SglangMap, binary_hashes: false },
];

/// Formats of the engines after the restart in another dialect.
const OTHER_FORMATS: [EventFormat; 4] = [
    EventFormat { dialect: Dialect::SglangMap, binary_hashes: false },
    EventFormat { dialect: Dialect::SglangArray, binary_hashes: false },
    EventFormat { dialect: Dialect::VllmArray, binary_hashes: true },
    EventFormat { dialect: Dialect::VllmMap, binary_hashes: false },
];

/// Consecutive requests at each quiet point.
const PROBES: u64 = 40;

/// Results of the test.
#[derive(Default)]
pub(crate) struct Account {
    pub(crate) salted_overlaps: usize,
    pub(crate) probes: u64,
    pub(crate) as_predicted: u64,
    /// Probes with cached tokens.
    pub(crate) hits: u64,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_index_equals_the_caches_of_the_engines() {
    let mut fleet = Fleet::start(&FORMATS).await;
    let mut account = Account::default();
    fleet.healed("first connection").await;
    for point in 1..=2 {
        fleet.traffic(1_000).end().await;
        account.quiet_point(&mut fleet, &format!("quiet point {point}")).await;
    }
    messages_fail(&mut fleet, &mut account).await;
    engines_die(&mut fleet, &mut account).await;
    engines_restart(&mut fleet, &mut account).await;
    dialects_change(&mut fleet, &mut account).await;
    caches_are_reset(&mut fleet, &mut account).await;

    assert!(account.as_predicted >= account.probes * 999 / 1000, "cached tokens as predicted");
    assert!(account.salted_overlaps > 0, "no salted prompt had a hit");
    assert_eq!(fleet.router.health().leases, 0);
    assert_eq!(fleet.router.health().restarts, 0);
}

async fn messages_fail(fleet: &mut Fleet, account: &mut Account) {
    let faults = Faults { drop_share: 0.05, duplicate_share: 0.05, reorder_share: 0.05, ..Faults::default() };
    fleet.engines().for_each(|(_, engine)| engine.set_faults(faults.clone()).expect("valid"));
    fleet.traffic(1_500).end().await;
    fleet.engines().for_each(|(_, engine)| engine.set_faults(Faults::default()).expect("valid"));
    fleet.healed("faulty messages").await;
    account.quiet_point(fleet, "after faulty messages").await;

    // No later message follows the lost ones, so no gap reveals the loss.
    let all_is_lost = Faults { drop_share: 1.0, ..Faults::default() };
    fleet.engines().for_each(|(_, engine)| engine.set_faults(all_is_lost.clone()).expect("valid"));
    fleet.nudge_all().await;
    fleet.engines().for_each(|(_, engine)| engine.set_faults(Faults::default()).expect("valid"));
    fleet.healed("lost ends").await;
}

async fn engines_die(fleet: &mut Fleet, account: &mut Account) {
    for n in [0, 1] {
        let mut traffic = fleet.traffic(900);
        traffic.until(300).await;
        let config = fleet.kill(n).await;
        traffic.until(600).await;
        fleet.revive(n, config).await;
        // The traffic may end before the router sends requests to the engine again. In that case the direct prompts
        // make the engine publish.
        let end = async {
            traffic.end().await;
            fleet.nudge_all().await;
        };
        tokio::join!(fleet.trusted_again(n), end);
        // During traffic, recovery can be verified only after the traffic ends.
        fleet.healed("killed").await;
        account.quiet_point(fleet, "after an engine was gone").await;
    }
    let configs = [fleet.kill(2).await, fleet.kill(3).await];
    for (n, config) in (2..).zip(configs) {
        fleet.revive(n, config).await;
    }
    fleet.nudge_all().await;
    fleet.healed("killed while idle").await;
}

async fn engines_restart(fleet: &mut Fleet, account: &mut Account) {
    let mut traffic = fleet.traffic(1_000);
    traffic.until(500).await;
    fleet.engine(3).restart(fleet.format(3)).await.expect("engine restarts");
    tokio::join!(fleet.trusted_again(3), traffic.end());
    fleet.healed("restarted").await;
    account.quiet_point(fleet, "after a restart").await;

    for n in [0, 1, 2, 3] {
        let before = fleet.engine(n).sequence_next(0);
        fleet.engine(n).restart(fleet.format(n)).await.expect("engine restarts");
        assert!(fleet.engine(n).sequence_next(0) < before, "sequences begin at 0");
    }
    fleet.healed("publishers from 0").await;
    fleet.traffic(1_000).end().await; // the host has blocks again
    // Two restarts in a row, the first life as short as possible.
    for _ in 0..2 {
        fleet.engine(1).restart(fleet.format(1)).await.expect("engine restarts");
        fleet.nudge_all().await;
    }
    fleet.healed("twice").await;
    account.quiet_point(fleet, "after two restarts").await;
}

async fn dialects_change(fleet: &mut Fleet, account: &mut Account) {
    for (n, format) in OTHER_FORMATS.into_iter().enumerate() {
        fleet.redialect(n, format).await;
    }
    fleet.nudge_all().await;
    fleet.healed("another dialect").await;
    for _ in 0..2 {
        fleet.traffic(700).end().await;
        account.quiet_point(fleet, "in another dialect").await;
    }
}

async fn caches_are_reset(fleet: &mut Fleet, account: &mut Account) {
    fleet.reset_caches().await;
    fleet.healed("caches reset").await;
    assert_eq!(fleet.truth().len(), 0, "the index is empty");
    fleet.traffic(1_000).end().await; // the host has blocks again
    account.quiet_point(fleet, "after a reset").await;
}

impl Account {
    /// Compares all state while nothing changes, then sends single requests.
    pub(crate) async fn quiet_point(&mut self, fleet: &mut Fleet, when: &str) {
        let mut truth = fleet.assert_exact(when).await;
        // Restarts empty the hosts. The requests until a device evicts blocks again depend on the ranks chosen.
        let mut rounds = 0;
        while truth.tier_len(StorageTier::HostPinned) == 0 && fleet.has_host() {
            rounds += 1;
            assert!(rounds <= 20, "{when}: the host holds nothing");
            fleet.traffic(500).end().await;
            truth = fleet.assert_exact(when).await;
        }
        self.compare_overlaps(fleet, &truth, when).await;
        for n in fleet.numbers(PROBES) {
            let (predicted, delivered) = fleet.probe(n).await;
            let delivered = delivered - delivered % BLOCK_SIZE; // pages are smaller
            self.probes += 1;
            self.hits += u64::from(delivered > 0);
            if predicted == delivered {
                self.as_predicted += 1;
            } else {
                eprintln!("{when}: request {n} has {delivered} cached tokens, predicted were {predicted}");
            }
        }
        fleet.assert_exact(when).await;
    }

    /// Sends prompts under all adapters and salts: each rank's overlap must match its cache under exactly this adapter
    /// and salt.
    async fn compare_overlaps(&mut self, fleet: &mut Fleet, truth: &Holdings, when: &str) {
        let chains = truth.chains();
        for n in fleet.numbers(30) {
            let request = Fleet::request(n);
            let salts = SALTS.map(|salt| request.with_namespace(None, Some(salt)));
            let both = SALTS.map(|salt| request.with_namespace(Some(LORAS[0]), Some(salt)));
            let others = [request.with_namespace(None, None), request.with_namespace(Some(LORAS[1]), None), request];
            for request in salts.iter().chain(&both).chain(&others) {
                let scores =
                    fleet.router.overlap_scores(request.route_request("query"), false).await.expect("the router is up");
                assert_eq!(scores.ranks.len(), 2 * fleet.engines().count());
                for found in scores.ranks {
                    let is = (found.device_blocks, found.host_pinned_extension_blocks);
                    assert_eq!(is, chains.overlap(found.rank, request), "{when}: {} of {request:?}", found.rank);
                    self.salted_overlaps += usize::from(request.cache_salt.is_some() && is.0 > 0);
                }
            }
        }
    }
}
