//! Compares the waiting queue with a slow model after every step of arbitrary calls.
//!
//! `PROPTEST_CASES` sets the number of cases; a failure prints its seed.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pointsman::RouterConfig;
use pointsman::config::{QueueClass, QueueOrder};
use pointsman::internals::config::QueueConfig;
use pointsman::internals::queue::{ClassId, Depth, LaneKey, Queue, QueueEntry, TenantKey};
use pointsman::protocol::Timestamp;
use proptest::prelude::*;

use crate::effort::effort;

fn secs(secs: u64) -> Timestamp {
    Timestamp::default() + Duration::from_secs(secs)
}

fn class(n: usize, order: QueueOrder, quantum_tokens: u32) -> QueueClass {
    QueueClass { order, quantum_tokens, ..QueueClass::named(format!("class-{n}")) }
}

fn config_of(queue_classes: Vec<QueueClass>) -> RouterConfig {
    let config = RouterConfig {
        queue: QueueConfig { classes: queue_classes, ..QueueConfig::default() },
        ..RouterConfig::default()
    };
    config.validate().expect("valid configuration");
    config
}

/// Literal model of the queue: a list that is searched completely, and rounds that are executed one by one.
struct Model {
    classes: Vec<QueueClass>,
    rows: Vec<Row>,
    deficits: Vec<u64>,
    last: usize,
    pushed: u64,
    /// By class: the latest finish of a sent request.
    clocks: Vec<u64>,
    /// The class's clock when a tenant last sent or began to wait; kept while it waits.
    starts: BTreeMap<(usize, TenantKey), u64>,
}

/// Strict priority, finish, sequence: the tenant with the lowest value sends next.
type Place = (Reverse<u32>, u64, u64);

#[derive(Clone, Debug)]
struct Row {
    id: u64,
    class: usize,
    lane: LaneKey,
    entry: QueueEntry,
    sequence: u64,
}

impl Row {
    fn cost(&self) -> u64 {
        u64::from((self.entry.prompt_tokens - self.entry.cached_tokens).max(1))
    }

    fn score(&self, order: QueueOrder) -> f64 {
        let arrival_secs = self.entry.arrival.since(Timestamp::default()).as_secs_f64();
        let jump = self.entry.priority_jump.max(0.0);
        match order {
            QueueOrder::Fcfs => jump - arrival_secs,
            QueueOrder::Lcfs => jump + arrival_secs,
            QueueOrder::Wspt => (1.0 + jump) / self.cost() as f64,
        }
    }

    fn goes_before(&self, other: &Self, order: QueueOrder) -> bool {
        if self.entry.strict_priority != other.entry.strict_priority {
            return self.entry.strict_priority > other.entry.strict_priority;
        }
        if self.entry.due != other.entry.due {
            let due = |row: &Self| row.entry.due.map_or(u64::MAX, |due| due.0);
            return due(self) < due(other);
        }
        let (mine, others) = (self.score(order), other.score(order));
        if mine != others { mine > others } else { self.sequence < other.sequence }
    }
}

impl Model {
    fn new(config: &RouterConfig) -> Self {
        let classes = config.queue.classes_or_default();
        let (deficits, last) = (vec![0; classes.len()], classes.len() - 1);
        let (clocks, starts) = (vec![0; classes.len()], BTreeMap::new());
        Self { classes, rows: Vec::new(), deficits, last, pushed: 0, clocks, starts }
    }

    fn push(&mut self, row: Row) {
        self.starts.entry((row.class, row.entry.tenant)).or_insert(self.clocks[row.class]);
        self.rows.push(row);
        self.pushed += 1;
    }

    fn finish(&self, row: &Row) -> u64 {
        self.starts[&(row.class, row.entry.tenant)] + row.cost()
    }

    fn place(&self, row: &Row) -> Place {
        (Reverse(row.entry.strict_priority), self.finish(row), row.sequence)
    }

    /// The next row that a class sends, considering free lanes only. A tenant ranks by its first row, or by its first
    /// free row if that ranks later.
    fn next(&self, class: usize, free: impl Fn(&Row) -> bool) -> Option<&Row> {
        let tenants = self.starts.keys().filter(|(of, _)| *of == class).map(|(_, tenant)| *tenant);
        let of = tenants.filter_map(|tenant| {
            let first = self.first(class, |row| row.entry.tenant == tenant)?;
            let first_free = self.first(class, |row| row.entry.tenant == tenant && free(row))?;
            Some((self.place(first).max(self.place(first_free)), first_free))
        });
        of.min_by_key(|(place, _)| *place).map(|(_, row)| row)
    }

    /// The first row of a class that satisfies `pass`.
    fn first(&self, class: usize, pass: impl Fn(&Row) -> bool) -> Option<&Row> {
        let order = self.classes[class].order;
        let rows = self.rows.iter().filter(|row| row.class == class && pass(row));
        rows.reduce(|first, row| if row.goes_before(first, order) { row } else { first })
    }

    fn lane(&self, class: usize, lane: LaneKey) -> Vec<u64> {
        let mut left: Vec<&Row> = self.rows.iter().filter(|row| row.class == class && row.lane == lane).collect();
        let order = self.classes[class].order;
        left.sort_by(
            |a, b| if a.goes_before(b, order) { std::cmp::Ordering::Less } else { std::cmp::Ordering::Greater },
        );
        left.iter().map(|row| row.id).collect()
    }

    fn remove(&mut self, id: u64) -> Option<Row> {
        let at = self.rows.iter().position(|row| row.id == id)?;
        let row = self.rows.remove(at);
        if self.rows.iter().all(|other| other.class != row.class) {
            self.deficits[row.class] = 0;
        }
        let of_tenant = |other: &Row| (other.class, other.entry.tenant) == (row.class, row.entry.tenant);
        if !self.rows.iter().any(of_tenant) {
            self.starts.remove(&(row.class, row.entry.tenant));
        }
        Some(row)
    }

    fn pop(&mut self, free: impl Fn(usize, LaneKey) -> bool) -> Option<u64> {
        let heads: Vec<Option<Row>> =
            (0..self.classes.len()).map(|class| self.next(class, |row| free(class, row.lane)).cloned()).collect();
        if heads.iter().all(Option::is_none) {
            return None;
        }
        let pays =
            |model: &Self, class: usize| heads[class].as_ref().is_some_and(|row| row.cost() <= model.deficits[class]);
        let mut class = self.last;
        while !pays(self, class) {
            class = (class + 1) % self.classes.len();
            if heads[class].is_some() && !pays(self, class) {
                self.deficits[class] += u64::from(self.classes[class].quantum_tokens);
            }
        }
        let row = heads[class].as_ref().expect("the class has enough deficit");
        self.deficits[class] -= row.cost();
        self.last = class;
        self.clocks[class] = self.clocks[class].max(self.finish(row));
        self.starts.insert((class, row.entry.tenant), self.clocks[class]);
        self.remove(row.id).map(|row| row.id)
    }

    fn depth(&self, class: usize) -> Depth {
        let of = || self.rows.iter().filter(|row| row.class == class);
        Depth {
            requests: of().count() as u64,
            raw_tokens: of().map(|row| u64::from(row.entry.prompt_tokens)).sum(),
            cached_tokens: of().map(|row| u64::from(row.entry.cached_tokens)).sum(),
            oldest: of().map(|row| row.entry.arrival).min(),
        }
    }

    fn next_due(&self) -> Option<Timestamp> {
        self.rows.iter().filter_map(|row| row.entry.due).min()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Push {
        class: usize,
        lane: LaneKey,
        entry: QueueEntry,
        /// Time until the deadline, in milliseconds.
        due_ms: Option<u64>,
        /// Age of the request, in milliseconds.
        age_ms: u64,
    },
    /// Removes one of the most recent requests, queued or not.
    Remove {
        back: u64,
    },
    Refresh {
        back: u64,
        cached_tokens: u32,
    },
    /// Sends with these lanes of each class free, one bit each.
    Pop {
        free: u16,
        times: usize,
    },
    Expire,
    TakeLane {
        class: usize,
        lane: LaneKey,
    },
    Time {
        millis: u64,
    },
}

const CLASSES_MAX: usize = 4;
const LANES: u64 = 4;

fn entry() -> impl Strategy<Value = QueueEntry> {
    // Few values per field, so that most comparisons differ in one field only.
    let jump = prop_oneof![5 => Just(0.0), 1 => -1.0..0.0f64, 2 => 0.0..9.0f64, 1 => Just(1e300)];
    let tokens = prop_oneof![3 => 0u32..400, 1 => 0u32..20_000, 2 => Just(128)];
    let tenant = prop_oneof![3 => Just(0u64), 3 => 1u64..4, 1 => Just(u64::MAX)];
    (prop_oneof![4 => Just(0u32), 1 => 0..3u32, 1 => Just(u32::MAX)], jump, tokens, 0u32..=4, tenant).prop_map(
        |(strict_priority, priority_jump, prompt_tokens, quarters, tenant)| QueueEntry {
            tenant: TenantKey(tenant),
            strict_priority,
            priority_jump,
            prompt_tokens,
            cached_tokens: prompt_tokens / 4 * quarters,
            ..QueueEntry::default()
        },
    )
}

fn lane() -> impl Strategy<Value = LaneKey> {
    // Includes the largest key, at the end of key ranges.
    (0..LANES).prop_map(|lane| LaneKey(if lane == LANES - 1 { u64::MAX } else { lane }))
}

fn lane_bit(class: usize, lane: LaneKey) -> u16 {
    1 << (class as u64 * LANES + lane.0.min(LANES - 1))
}

fn step() -> impl Strategy<Value = Step> {
    let due = prop_oneof![3 => Just(None), 1 => (0u64..4_000).prop_map(|ms| Some(ms / 500 * 500))];
    prop_oneof![
        8 => (0..CLASSES_MAX, lane(), entry(), due, 0u64..5).prop_map(|(class, lane, entry, due_ms, age)| {
            Step::Push { class, lane, entry, due_ms, age_ms: age * 100 }
        }),
        2 => (0u64..30).prop_map(|back| Step::Remove { back }),
        2 => (0u64..30, 0u32..500).prop_map(|(back, cached_tokens)| Step::Refresh { back, cached_tokens }),
        5 => (any::<u16>(), 1usize..6).prop_map(|(free, times)| Step::Pop { free, times }),
        2 => (1usize..20).prop_map(|times| Step::Pop { free: u16::MAX, times }),
        1 => Just(Step::Expire),
        1 => (0..CLASSES_MAX, lane()).prop_map(|(class, lane)| Step::TakeLane { class, lane }),
        2 => (0u64..1_000).prop_map(|millis| Step::Time { millis }),
    ]
}

fn classes() -> impl Strategy<Value = Vec<QueueClass>> {
    let order = prop::sample::select(vec![QueueOrder::Fcfs, QueueOrder::Lcfs, QueueOrder::Wspt]);
    let quantum = prop_oneof![1u32..40, 100u32..3_000];
    prop::collection::vec((order, quantum), 1..=CLASSES_MAX).prop_map(|classes| {
        classes.into_iter().enumerate().map(|(n, (order, quantum))| class(n, order, quantum)).collect()
    })
}

/// The queue and its model with equal inputs.
struct Pair {
    queue: Queue<u64>,
    model: Model,
    now: Timestamp,
}

impl Pair {
    fn take(&mut self, step: &Step) {
        let classes = self.model.classes.len();
        let recent = |pushed: u64, back: u64| pushed.saturating_sub(back);
        match *step {
            Step::Push { class, lane, entry, due_ms, age_ms } => {
                let due = due_ms.map(|ms| self.now + Duration::from_millis(ms));
                let arrival = Timestamp(self.now.0 - age_ms * 1_000_000);
                let (class, entry) = (class % classes, QueueEntry { due, arrival, ..entry });
                let id = self.model.pushed;
                self.queue.push(id, ClassId(class as u32), lane, entry, id * 10);
                self.model.push(Row { id, class, lane, entry, sequence: id });
            }
            Step::Remove { back } => {
                let id = recent(self.model.pushed, back);
                assert_eq!(self.queue.remove(id), self.model.remove(id).map(|row| row.id * 10));
            }
            Step::Refresh { back, cached_tokens } => {
                let id = recent(self.model.pushed, back);
                self.queue.set_cached_tokens(id, cached_tokens);
                if let Some(row) = self.model.rows.iter_mut().find(|row| row.id == id) {
                    row.entry.cached_tokens = cached_tokens.min(row.entry.prompt_tokens);
                }
            }
            Step::Pop { free, times } => {
                for _ in 0..times {
                    self.pop(free);
                }
            }
            Step::Expire => {
                while let Some((id, _)) = self.queue.pop_expired(self.now) {
                    let rows = self.model.rows.iter().filter(|row| row.entry.due.is_some());
                    let first =
                        rows.min_by_key(|row| (row.entry.due, row.sequence)).expect("expired requests have a deadline");
                    assert_eq!((first.id, first.entry.due <= Some(self.now)), (id, true));
                    self.model.remove(id);
                }
                assert!(self.model.next_due().is_none_or(|due| due > self.now));
            }
            Step::TakeLane { class, lane } => {
                let class = class % classes;
                let ids = self.model.lane(class, lane);
                let taken = self.queue.take_lane(ClassId(class as u32), lane);
                assert_eq!(taken, ids.iter().map(|id| (*id, id * 10)).collect::<Vec<_>>());
                for id in ids {
                    self.model.remove(id);
                }
            }
            Step::Time { millis } => self.now = self.now + Duration::from_millis(millis),
        }
    }

    fn pop(&mut self, free: u16) {
        let mut asked = BTreeSet::new();
        let popped = self.queue.pop(self.now, |class, lane, _| {
            assert!(asked.insert((class, lane)), "repeated query for {class:?} {lane:?}");
            free & lane_bit(class.0 as usize, lane) != 0
        });
        let expected = self.model.pop(|class, lane| free & lane_bit(class, lane) != 0);
        assert_eq!(popped, expected.map(|id| (id, id * 10)));
    }

    fn compare(&self) {
        self.queue.check_invariants();
        assert_eq!(self.queue.len(), self.model.rows.len());
        assert_eq!(self.queue.is_empty(), self.model.rows.is_empty());
        assert_eq!(self.queue.next_due(), self.model.next_due());
        for class in 0..self.model.classes.len() {
            assert_eq!(self.queue.depth(ClassId(class as u32)), self.model.depth(class));
        }
        let mut lanes: Vec<_> = self.queue.lanes().map(|(class, lane, head)| (class.0 as usize, lane, *head)).collect();
        lanes.sort_unstable();
        let mut expected: Vec<_> = self.model.rows.iter().map(|row| (row.class, row.lane)).collect();
        expected.sort_unstable();
        expected.dedup();
        let head = |class, lane| self.model.first(class, |row| row.lane == lane).expect("the lane has rows").id * 10;
        let expected: Vec<_> = expected.into_iter().map(|(class, lane)| (class, lane, head(class, lane))).collect();
        assert_eq!(lanes, expected);
        for row in &self.model.rows {
            assert_eq!((self.queue.get(row.id), self.queue.entry(row.id)), (Some(&(row.id * 10)), Some(&row.entry)));
        }
    }
}

proptest! {
    #![proptest_config(effort(200, "tests/queue_properties.proptest-regressions"))]

    #[test]
    fn the_queue_matches_its_model_after_any_calls(classes in classes(), steps in prop::collection::vec(step(), 1..80)) {
        let config = config_of(classes);
        let mut pair = Pair { queue: Queue::new(&config), model: Model::new(&config), now: secs(10) };
        for step in &steps {
            pair.take(step);
            pair.compare();
        }
        while !pair.queue.is_empty() {
            pair.pop(u16::MAX);
        }
        pair.compare();
    }
}
