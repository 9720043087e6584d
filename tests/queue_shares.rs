//! Checks the documented shares of classes and tenants in the waiting queue, and the documented limits of their waiting
//! times.
//!
//! `PROPTEST_CASES` sets the number of cases; a failure prints its seed.

use pointsman::RouterConfig;
use pointsman::config::QueueClass;
use pointsman::internals::config::QueueConfig;
use pointsman::internals::queue::{ClassId, LaneKey, Queue, QueueEntry, TenantKey};
use pointsman::protocol::Timestamp;
use proptest::prelude::*;

use crate::effort::effort;

fn config_of(quanta: &[u32]) -> RouterConfig {
    let class = |(n, quantum): (usize, &u32)| QueueClass {
        quantum_tokens: *quantum,
        ..QueueClass::named(format!("class-{n}"))
    };
    RouterConfig {
        queue: QueueConfig { classes: quanta.iter().enumerate().map(class).collect(), ..QueueConfig::default() },
        ..RouterConfig::default()
    }
}

/// Minimum and maximum cost of one class's requests.
fn costs() -> impl Strategy<Value = (u32, u32)> {
    (1u32..1_500, 1u32..1_500).prop_map(|(a, b)| (a.min(b), a.max(b)))
}

/// The `n`-th value of a fixed pseudo-random sequence.
fn scattered(n: u64, between: (u32, u32)) -> u32 {
    let mixed = (n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let spread = u64::from(between.1 - between.0) + 1;
    between.0 + u32::try_from((mixed ^ (mixed >> 31)) % spread).expect("less than the spread")
}

/// Tenants of one class with a constant number of queued requests, each in a separate lane.
struct Tenants {
    queue: Queue<(usize, u64)>,
    costs: Vec<(u32, u32)>,
    pushed: u64,
}

impl Tenants {
    fn new(costs: Vec<(u32, u32)>, waiting: &[usize]) -> Self {
        let mut tenants = Self { queue: Queue::new(&config_of(&[100])), costs, pushed: 0 };
        for (tenant, waiting) in waiting.iter().enumerate() {
            (0..*waiting).for_each(|_| tenants.push(tenant));
        }
        tenants
    }

    fn push(&mut self, tenant: usize) {
        let cost = scattered(self.pushed, self.costs[tenant]);
        let (tenant_key, lane) = (TenantKey(tenant as u64), LaneKey(tenant as u64));
        // Priority among a tenant's own requests gives no precedence over other tenants.
        let due = self.pushed.is_multiple_of(3).then_some(Timestamp(self.pushed));
        let priority_jump = self.pushed as f64;
        let entry = QueueEntry { tenant: tenant_key, prompt_tokens: cost, due, priority_jump, ..QueueEntry::default() };
        self.queue.push(self.pushed, ClassId(0), lane, entry, (tenant, u64::from(cost)));
        self.pushed += 1;
    }

    /// Sends a request of an allowed tenant and queues another one. Returns the tenant and the cost.
    fn send(&mut self, may: impl Fn(usize) -> bool) -> Option<(usize, u64)> {
        let (_, sent) = self.queue.pop(Timestamp::default(), |_, lane, _| may(lane.0 as usize))?;
        self.push(sent.0);
        Some(sent)
    }
}

/// Costs of the tenants, and their numbers of queued requests.
fn tenants() -> impl Strategy<Value = (Vec<(u32, u32)>, Vec<usize>)> {
    prop::collection::vec((costs(), 1usize..40), 2..6).prop_map(|tenants| tenants.into_iter().unzip())
}

/// Classes that are never empty: each sent request is replaced.
struct Backlog {
    queue: Queue<u32>,
    costs: Vec<(u32, u32)>,
    pushed: u64,
}

impl Backlog {
    fn new(quanta: &[u32], costs: Vec<(u32, u32)>) -> Self {
        let mut backlog = Self { queue: Queue::new(&config_of(quanta)), costs, pushed: 0 };
        for class in 0..quanta.len() {
            (0..3).for_each(|_| backlog.push(class));
        }
        backlog
    }

    fn push(&mut self, class: usize) {
        let entry = QueueEntry { prompt_tokens: scattered(self.pushed, self.costs[class]), ..QueueEntry::default() };
        self.queue.push(self.pushed, ClassId(class as u32), LaneKey(0), entry, class as u32);
        self.pushed += 1;
    }

    /// Sends a request of an allowed class. Returns the class and the cost.
    fn send(&mut self, may: impl Fn(usize) -> bool) -> Option<(usize, u64)> {
        let before: Vec<u64> = (0..self.costs.len()).map(|n| self.queue.depth(ClassId(n as u32)).raw_tokens).collect();
        let (_, class) = self.queue.pop(Timestamp::default(), |class, _, _| may(class.0 as usize))?;
        let cost = before[class as usize] - self.queue.depth(ClassId(class)).raw_tokens;
        self.push(class as usize);
        Some((class as usize, cost))
    }
}

proptest! {
    #![proptest_config(effort(150, "tests/queue_shares.proptest-regressions"))]

    /// The documented limit holds whatever deficit the other classes accumulate while some of them cannot send.
    #[test]
    fn waits_stay_within_the_documented_bound(
        classes in prop::collection::vec((1u32..600, costs()), 2..5),
        blocked in prop::collection::vec(any::<u8>(), 1..100),
    ) {
        let (quanta, costs): (Vec<u32>, Vec<_>) = classes.into_iter().unzip();
        let promised = |class: usize| -> u64 {
            let quanta_needed = u64::from(costs[class].1.div_ceil(quanta[class]));
            let others = (0..quanta.len()).filter(|other| *other != class);
            let least = |other: usize| u64::from(quanta[other].max(costs[other].1) - 1);
            others.map(|other| least(other) + quanta_needed * u64::from(quanta[other])).sum()
        };
        let mut backlog = Backlog::new(&quanta, costs.clone());
        let mut passed = vec![0; quanta.len()];
        for mask in blocked.iter().cycle().take(400) {
            let free = |class: usize| mask & (1 << class) == 0;
            // A class that cannot send is not waiting in the sense of the limit.
            (0..quanta.len()).filter(|class| !free(*class)).for_each(|class| passed[class] = 0);
            let Some((sent, cost)) = backlog.send(free) else { continue };
            for class in (0..quanta.len()).filter(|class| free(*class)) {
                passed[class] = if class == sent { 0 } else { passed[class] + cost };
                prop_assert!(passed[class] <= promised(class), "{} before class {class}: {}", passed[class], promised(class));
            }
        }
    }
}

proptest! {
    #![proptest_config(effort(40, "tests/queue_shares.proptest-regressions"))]

    #[test]
    fn backlogged_classes_share_by_quantum(classes in prop::collection::vec((50u32..200, costs()), 2..4)) {
        let (quanta, costs): (Vec<u32>, Vec<_>) = classes.into_iter().unzip();
        let (mut backlog, mut sent) = (Backlog::new(&quanta, costs), vec![0; quanta.len()]);
        let due = |class: usize| f64::from(quanta[class]) / f64::from(quanta.iter().sum::<u32>());
        while sent.iter().sum::<u64>() < 100 * 1_500 * quanta.len() as u64 {
            let (class, cost) = backlog.send(|_| true).expect("some wait");
            sent[class] += cost;
        }
        for (class, tokens) in sent.iter().enumerate() {
            let share = *tokens as f64 / sent.iter().sum::<u64>() as f64;
            prop_assert!((share - due(class)).abs() < 0.02, "{share} of the tokens sent, {} of the quanta", due(class));
        }
    }

    /// Independent of the numbers of queued requests and their deadlines.
    #[test]
    fn backlogged_tenants_share_a_class_equally((costs, waiting) in tenants()) {
        let count = costs.len();
        let mut tenants = Tenants::new(costs, &waiting);
        let mut sent = vec![0; count];
        for _ in 0..1_500 {
            let (tenant, cost) = tenants.send(|_| true).unwrap();
            sent[tenant] += cost;
            let (least, most) = (sent.iter().min().unwrap(), sent.iter().max().unwrap());
            prop_assert!(most - least <= 2 * 1_500, "{sent:?}: no two differ by more than a request of each");
        }
        tenants.queue.check_invariants();
    }

    /// Independent of the credit that other tenants accumulate while they cannot send.
    #[test]
    fn tenant_waits_stay_within_the_documented_bound(
        (costs, waiting) in tenants(),
        blocked in prop::collection::vec(any::<u8>(), 1..100),
    ) {
        let count = costs.len();
        let mut tenants = Tenants::new(costs.clone(), &waiting);
        let promised = |tenant: usize| -> u64 {
            let others = (0..count).filter(|other| *other != tenant);
            others.map(|other| u64::from(costs[other].1 + costs[tenant].1)).sum()
        };
        let mut passed = vec![0; count];
        for mask in blocked.iter().cycle().take(400) {
            let free = |tenant: usize| mask & (1 << tenant) == 0;
            (0..count).filter(|tenant| !free(*tenant)).for_each(|tenant| passed[tenant] = 0);
            let Some((sent, cost)) = tenants.send(free) else { continue };
            for tenant in (0..count).filter(|tenant| free(*tenant)) {
                passed[tenant] = if tenant == sent { 0 } else { passed[tenant] + cost };
                let most = promised(tenant);
                prop_assert!(passed[tenant] <= most, "{} before tenant {tenant}, the bound is {most}", passed[tenant]);
            }
        }
    }
}

#[test]
fn class_shares_match_the_worked_example() {
    let mut backlog = Backlog::new(&[512, 128], vec![(128, 128); 2]);
    let first = (0..320).filter(|_| backlog.send(|_| true).is_some_and(|(class, _)| class == 0)).count();
    assert!((254..=257).contains(&first), "{first} of 320");
}
