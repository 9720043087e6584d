//! A router with four engines of two ranks each that use four event dialects: its index must match their caches.
#![allow(clippy::print_stdout, reason = "the recovery times are the output")]

use std::time::Duration;

use pointsman::protocol::StorageTier;
use pointsman_trial::mock::{Dialect, EventFormat, Faults};
use tokio::time::Instant;

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
const PROBES: u64 = 100;

/// Results of the test.
#[derive(Default)]
pub(crate) struct Account {
    healed: Vec<(&'static str, Duration)>,
    /// Time until the ranks sent events and were live again, during traffic.
    trusted: Vec<(&'static str, Duration)>,
    pub(crate) blocks_compared: usize,
    overlaps_compared: usize,
    pub(crate) salted_overlaps: usize,
    pub(crate) probes: u64,
    pub(crate) as_predicted: u64,
    /// Probes with cached tokens.
    pub(crate) hits: u64,
    /// Probes of fully cached prompts. The engine recomputes their last block.
    pub(crate) whole_prompts: u64,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_index_equals_the_caches_of_the_engines() {
    let begun = Instant::now();
    let mut fleet = Fleet::start(&FORMATS).await;
    let mut account = Account::default();
    let since = Instant::now();
    account.record("first connection", fleet.healed("first connection", since).await);

    for point in 1..=4 {
        fleet.traffic(2_000).end().await;
        account.quiet_point(&mut fleet, &format!("quiet point {point}")).await;
    }
    messages_fail(&mut fleet, &mut account).await;
    engines_die(&mut fleet, &mut account).await;
    engines_restart(&mut fleet, &mut account).await;
    dialects_change(&mut fleet, &mut account).await;
    caches_are_reset(&mut fleet, &mut account).await;

    account.print(&fleet, begun);
    assert!(account.as_predicted + account.whole_prompts >= account.probes * 999 / 1000, "cached tokens as predicted");
    assert!(account.salted_overlaps > 0, "no salted prompt had a hit");
    assert_eq!(fleet.router.health().leases, 0);
    assert_eq!(fleet.router.health().restarts, 0);
}

async fn messages_fail(fleet: &mut Fleet, account: &mut Account) {
    let faults = Faults { drop_share: 0.05, duplicate_share: 0.05, reorder_share: 0.05, ..Faults::default() };
    fleet.engines().for_each(|(_, engine)| engine.set_faults(faults.clone()).expect("valid"));
    fleet.traffic(3_000).end().await;
    fleet.engines().for_each(|(_, engine)| engine.set_faults(Faults::default()).expect("valid"));
    let since = Instant::now();
    account.record("5 % dropped, doubled, reordered", fleet.healed("faulty messages", since).await);
    account.quiet_point(fleet, "after faulty messages").await;

    // No later message follows the lost ones, so no gap reveals the loss.
    let all_is_lost = Faults { drop_share: 1.0, ..Faults::default() };
    fleet.engines().for_each(|(_, engine)| engine.set_faults(all_is_lost.clone()).expect("valid"));
    fleet.nudge_all().await;
    fleet.engines().for_each(|(_, engine)| engine.set_faults(Faults::default()).expect("valid"));
    let since = Instant::now();
    account.record("each rank's last message dropped", fleet.healed("lost ends", since).await);
}

async fn engines_die(fleet: &mut Fleet, account: &mut Account) {
    for n in [0, 1] {
        let mut traffic = fleet.traffic(1_500);
        traffic.until(500).await;
        let config = fleet.kill(n).await;
        traffic.until(1_000).await;
        fleet.revive(n, config).await;
        let since = Instant::now();
        // The traffic may end before the router sends requests to the engine again. In that case the direct prompts
        // make the engine publish.
        let end = async {
            traffic.end().await;
            fleet.nudge_all().await;
        };
        let trusted = tokio::join!(fleet.trusted_again(n, since), end).0;
        account.trusted.push(("killed under traffic", trusted));
        // During traffic, recovery can be verified only after the traffic ends.
        account.record("killed under traffic, to its end", fleet.healed("killed", since).await);
        account.quiet_point(fleet, "after an engine was gone").await;
    }
    let configs = [fleet.kill(2).await, fleet.kill(3).await];
    for (n, config) in (2..).zip(configs) {
        fleet.revive(n, config).await;
    }
    let since = Instant::now();
    fleet.nudge_all().await;
    account.record("two killed while idle", fleet.healed("killed while idle", since).await);
}

async fn engines_restart(fleet: &mut Fleet, account: &mut Account) {
    let mut traffic = fleet.traffic(2_000);
    traffic.until(1_000).await;
    fleet.engine(3).restart(fleet.format(3)).await.expect("engine restarts");
    let since = Instant::now();
    let trusted = tokio::join!(fleet.trusted_again(3, since), traffic.end()).0;
    account.trusted.push(("restarted under traffic", trusted));
    account.record("restarted under traffic, to its end", fleet.healed("restarted", since).await);
    account.quiet_point(fleet, "after a restart").await;

    for n in [0, 1, 2, 3] {
        let before = fleet.engine(n).sequence_next(0);
        fleet.engine(n).restart(fleet.format(n)).await.expect("engine restarts");
        assert!(fleet.engine(n).sequence_next(0) < before, "sequences begin at 0");
    }
    let since = Instant::now();
    account.record("all publishers from 0, idle", fleet.healed("publishers from 0", since).await);
    fleet.traffic(1_500).end().await;
    // Two restarts in a row, the first life as short as possible.
    for _ in 0..2 {
        fleet.engine(1).restart(fleet.format(1)).await.expect("engine restarts");
        fleet.nudge_all().await;
    }
    let since = Instant::now();
    account.record("publisher from 0 twice in a row", fleet.healed("twice", since).await);
    account.quiet_point(fleet, "after two restarts").await;
}

async fn dialects_change(fleet: &mut Fleet, account: &mut Account) {
    for (n, format) in OTHER_FORMATS.into_iter().enumerate() {
        fleet.redialect(n, format).await;
    }
    let since = Instant::now();
    fleet.nudge_all().await;
    account.record("all restarted in another dialect", fleet.healed("another dialect", since).await);
    for _ in 0..2 {
        fleet.traffic(1_500).end().await;
        account.quiet_point(fleet, "in another dialect").await;
    }
}

async fn caches_are_reset(fleet: &mut Fleet, account: &mut Account) {
    fleet.reset_caches().await;
    let since = Instant::now();
    account.record("caches reset", fleet.healed("caches reset", since).await);
    assert_eq!(fleet.truth().len(), 0, "the index is empty");
    fleet.traffic(1_500).end().await;
    account.quiet_point(fleet, "after a reset").await;
}

impl Account {
    fn record(&mut self, what: &'static str, after: Duration) {
        self.healed.push((what, after));
    }

    /// Compares all state while nothing changes, then sends single requests.
    pub(crate) async fn quiet_point(&mut self, fleet: &mut Fleet, when: &str) {
        let truth = fleet.assert_exact(when).await;
        self.blocks_compared += truth.len();
        assert!(truth.tier_len(StorageTier::HostPinned) > 0 || !fleet.has_host(), "{when}: the host holds nothing");
        self.compare_overlaps(fleet, &truth, when).await;
        for n in fleet.numbers(PROBES) {
            let (request, predicted, delivered) = fleet.probe(n).await;
            let delivered = delivered - delivered % BLOCK_SIZE; // pages are smaller
            self.probes += 1;
            self.hits += u64::from(delivered > 0);
            if predicted == delivered {
                self.as_predicted += 1;
            } else if predicted > request.reusable_tokens() && delivered == request.reusable_tokens() {
                self.whole_prompts += 1;
            } else {
                println!("{when}: request {n} has {delivered} cached tokens, predicted were {predicted}");
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
                    self.overlaps_compared += 1;
                    self.salted_overlaps += usize::from(request.cache_salt.is_some() && is.0 > 0);
                }
            }
        }
    }

    fn print(&self, fleet: &Fleet, begun: Instant) {
        let Self { blocks_compared, overlaps_compared, salted_overlaps, probes, as_predicted, whole_prompts, .. } =
            self;
        let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
        println!("{:<40} {:>10}", "fault", "trusted ms");
        for (what, after) in &self.trusted {
            println!("{what:<40} {:>10.1}", ms(*after));
        }
        println!("{:<40} {:>10}", "fault", "exact ms");
        for (what, after) in &self.healed {
            println!("{what:<40} {:>10.1}", ms(*after));
        }
        println!(
            "{blocks_compared} blocks compared, {overlaps_compared} overlaps, of which {salted_overlaps} salted and not 0"
        );
        println!(
            "{as_predicted} of {probes} probes with cached tokens as predicted, {whole_prompts} more but for the last block"
        );
        let failures = fleet.failures.load(std::sync::atomic::Ordering::Relaxed);
        println!("{} requests, {failures} attempts not answered, {:.1} s", fleet.sent(), begun.elapsed().as_secs_f64());
    }
}
