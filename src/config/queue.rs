//! `[queue]`: waiting requests, their classes, order, shares and limits.

use std::time::Duration;

use serde::de::value::{Error as ValueError, MapDeserializer};
use serde::{Deserialize, Serialize};

use super::table::settings;
use crate::names::named;
use crate::validation::Problems;

settings! {
    /// Settings of the queue.
    ///
    /// ```
    /// use pointsman::internals::config::QueueConfig;
    ///
    /// let queue = QueueConfig { threshold: Some(2.0), ..QueueConfig::default() };
    /// let classes = queue.classes_or_default();
    /// assert_eq!((classes[0].name.as_str(), classes[0].busy_prefill_frac), ("default", Some(2.0)));
    /// ```
    pub struct QueueConfig {
        /// Requests without a response at the same time; one more is refused. Default 65,536, at least 1.
        requests_max: u32 = 65_536;
        /// Share of a rank's `max_num_batched_tokens` in pending prefill tokens beyond which it is busy, so that
        /// requests wait. Default none: no request waits. Not negative.
        threshold: Option<f64>;
        /// `max_num_batched_tokens` of ranks whose worker does not state it. Default none:
        /// [`Self::UNSTATED_BATCHED_TOKENS`]. At least 1.
        unstated_batched_tokens: Option<u32>;
        /// Order of the queue without classes. Default `fcfs`.
        order: QueueOrder;
        /// Classes of waiting requests. Default none: one class, `default`. No request waits while neither a class nor
        /// `threshold` defines when a rank is busy.
        classes: Vec<QueueClass>;
        /// Family of requests that name no class. Default none: the first class.
        default_family: Option<String>;
        /// Buckets of uncached tokens, by which a family chooses among its classes.
        uncached_buckets: Vec<UncachedBucket>;
        /// Age at which the index is queried again for a waiting request, in milliseconds; 0 never. Default 10,000.
        overlap_refresh_after_ms: u64 = 10_000;
    }
}

impl QueueConfig {
    /// `max_num_batched_tokens` of a rank whose worker does not state it, if nothing is configured: the default of
    /// `vllm serve` on GPUs with 70 GiB or more (2,048 on smaller ones), and of SGLang's `chunked_prefill_size` on many.
    pub const UNSTATED_BATCHED_TOKENS: u32 = 8_192;

    /// `max_num_batched_tokens` of a rank whose worker does not state it.
    #[must_use]
    pub fn unstated_batched_tokens(&self) -> u32 {
        self.unstated_batched_tokens.unwrap_or(Self::UNSTATED_BATCHED_TOKENS)
    }

    /// The classes in use: those configured, or the class `default`.
    #[must_use]
    pub fn classes_or_default(&self) -> Vec<QueueClass> {
        let mut classes = self.classes.clone();
        if classes.is_empty() {
            classes.push(QueueClass { order: self.order, ..QueueClass::named("default") });
        }
        for class in classes.iter_mut().filter(|class| !class.has_threshold()) {
            class.busy_prefill_frac = self.threshold;
        }
        classes
    }

    /// Whether this is the name of a class or family.
    #[must_use]
    pub fn knows_class(&self, name: &str) -> bool {
        let named = |class: &QueueClass| class.name == name || class.family.as_deref() == Some(name);
        self.classes_or_default().iter().any(named)
    }

    /// Whether any request may have to wait for a rank.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.has_threshold() || self.holds_programs()
    }

    /// Whether a rank can be busy for any request.
    #[must_use]
    pub fn has_threshold(&self) -> bool {
        self.threshold.is_some() || self.classes.iter().any(QueueClass::has_threshold)
    }

    /// Whether any class holds calls of programs.
    #[must_use]
    pub fn holds_programs(&self) -> bool {
        self.classes.iter().any(|class| class.program_hold_ms.is_some())
    }

    /// Longest hold of a call that names this class or family.
    #[must_use]
    pub fn hold_of(&self, name: Option<&str>) -> Duration {
        let first = self.classes.first().map(|class| class.name.as_str());
        let name = name.or(self.default_family.as_deref()).or(first);
        let named = self.classes.iter().filter(|class| name == Some(&class.name) || name == class.family.as_deref());
        Duration::from_millis(named.filter_map(|class| class.program_hold_ms).max().unwrap_or(0))
    }

    /// Adds broken rules. `uses_batched_tokens`: whether a limit is a share of `max_num_batched_tokens`.
    pub(super) fn check(&self, uses_batched_tokens: bool, problems: &mut Problems) {
        let default = Self::default();
        problems.positive("queue.requests_max", self.requests_max);
        problems.threshold("queue.threshold", self.threshold);
        let applies = self.classes.is_empty() || !self.classes.iter().all(QueueClass::has_threshold);
        let rule = "absent where every class has a threshold of its own";
        problems.check_given("queue.threshold", self.threshold, |_| applies, rule);
        let unstated = self.unstated_batched_tokens;
        problems.check_given("queue.unstated_batched_tokens", unstated, |tokens| *tokens > 0, "at least 1");
        let rule = "absent unless a limit is a share of max_num_batched_tokens";
        problems.check_given("queue.unstated_batched_tokens", unstated, |_| uses_batched_tokens, rule);
        let holds = self.classes.is_empty() || self.order == default.order;
        problems.check(
            "queue.order",
            self.order.name(),
            holds,
            "fcfs where there are queue.classes with orders of their own",
        );
        check_classes(&self.classes, &self.uncached_buckets, problems);
        if let Some(family) = &self.default_family {
            let known = self.classes.iter().any(|class| class.family.as_ref() == Some(family));
            problems.check("queue.default_family", family, known, "the family of one of queue.classes");
        }
        let (refresh_ms, default_ms) = (self.overlap_refresh_after_ms, default.overlap_refresh_after_ms);
        let rule = "10000 unless a threshold makes requests wait";
        problems.unused("queue.overlap_refresh_after_ms", refresh_ms, default_ms, self.is_enabled(), rule);
    }
}

named! {
    /// Order in which the requests of one class leave the queue, after strict priority and deadline.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum QueueOrder {
        /// First come, first served; a priority jump moves a request that many seconds ahead.
        #[default]
        Fcfs = "fcfs",
        /// Last come, first served.
        Lcfs = "lcfs",
        /// Weighted shortest processing time: fewest uncached tokens first.
        Wspt = "wspt",
    }
}

/// One class of waiting requests: its share of the fleet, its order, and how much of it may wait.
///
/// ```
/// use pointsman::config::QueueClass;
///
/// let class: QueueClass = serde_json::from_str(r#"{ "name": "batch", "quantum_tokens": 128 }"#)?;
/// assert_eq!(class.requests_max_per_rank, None); // as many as fit
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueueClass {
    /// Its name: letters, digits, `_`, `.`, `-`. Requests may ask for it.
    pub name: String,
    /// The family it belongs to. A request that asks for a family gets that family's class for its bucket.
    pub family: Option<String>,
    /// The bucket of uncached tokens (see `queue.uncached_buckets`) that it serves within its family.
    pub bucket: Option<String>,
    /// In which order its requests leave. Default `fcfs`.
    #[serde(default)]
    pub order: QueueOrder,
    /// Its share: uncached tokens it may send in each round of the classes that wait. At least 1. Default 2,048.
    #[serde(default = "quantum_tokens")]
    pub quantum_tokens: u32,
    /// A rank with more prefill tokens than this to compute is busy for this class.
    pub busy_prefill_tokens: Option<u64>,
    /// The same as a share of the rank's `max_num_batched_tokens`. Default: `queue.threshold`.
    pub busy_prefill_frac: Option<f64>,
    /// Requests that may wait, for each rank of the pool; 0 never waits. Default: no limit.
    pub requests_max_per_rank: Option<u32>,
    /// Prompt tokens that may wait, for each rank of the pool.
    pub raw_tokens_max_per_rank: Option<u64>,
    /// Cached prompt tokens that may wait, for each rank of the pool.
    pub cached_tokens_max_per_rank: Option<u64>,
    /// Longest time in milliseconds for which a call of a program waits while other programs fill the caches, if no
    /// rank holds most of its prompt. Then it is placed. Default: no call waits for that.
    pub program_hold_ms: Option<u64>,
    /// Whether the first call of a program is rejected where later ones wait. Default false; needs `program_hold_ms`, and
    /// sessions with affinity.
    #[serde(default)]
    pub refuse_program_starts: bool,
}

fn quantum_tokens() -> u32 {
    2048
}

/// From how many uncached tokens on a request belongs to a bucket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UncachedBucket {
    /// Fewest uncached tokens. The first bucket starts at 0, each next one higher.
    pub min_tokens: u32,
    /// The bucket's name, as classes refer to it.
    pub bucket: String,
}

impl QueueClass {
    /// A class with nothing but a name.
    #[must_use]
    pub fn named(name: impl Into<String>) -> Self {
        let only = MapDeserializer::new(std::iter::once(("name", name.into())));
        let class: Result<_, ValueError> = Self::deserialize(only);
        class.expect("all other fields have defaults")
    }

    /// Whether a rank can be busy for it, so that its requests may have to wait.
    #[must_use]
    pub fn has_threshold(&self) -> bool {
        self.busy_prefill_tokens.is_some() || self.busy_prefill_frac.is_some()
    }
}

/// A name that can stand in a label, a header and a key.
pub(super) fn is_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte))
}

pub(super) const NAME_RULE: &str = "one or more letters, digits, _, . or -";

fn check_classes(classes: &[QueueClass], buckets: &[UncachedBucket], problems: &mut Problems) {
    for (n, class) in classes.iter().enumerate() {
        let field = |name: &str| format!("queue.classes[{n}].{name}");
        problems.check(field("name"), &class.name, is_name(&class.name), NAME_RULE);
        let again = classes[..n].iter().any(|other| other.name == class.name);
        problems.check(field("name"), &class.name, !again, "named once");
        for (name, value) in [("family", &class.family), ("bucket", &class.bucket)] {
            if let Some(value) = value {
                problems.check(field(name), value, is_name(value), NAME_RULE);
            }
        }
        problems.check(field("quantum_tokens"), class.quantum_tokens, class.quantum_tokens > 0, "at least 1");
        let hold_ms = class.program_hold_ms.unwrap_or(1);
        problems.check(field("program_hold_ms"), hold_ms, hold_ms > 0, "at least 1");
        let refuses = class.refuse_program_starts;
        let has_effect = !refuses || class.program_hold_ms.is_some();
        problems.check(field("refuse_program_starts"), refuses, has_effect, "true only with program_hold_ms");
        if let Some(frac) = class.busy_prefill_frac {
            problems.check(
                field("busy_prefill_frac"),
                frac,
                frac.is_finite() && frac >= 0.0,
                "finite and not negative",
            );
        }
        if let Some(bucket) = &class.bucket {
            let known = buckets.iter().any(|known| known.bucket == *bucket);
            problems.check(field("bucket"), bucket, known, "the name of one of queue.uncached_buckets");
        }
    }
    for (n, bucket) in buckets.iter().enumerate() {
        let field = format!("queue.uncached_buckets[{n}].min_tokens");
        let holds = n.checked_sub(1).map_or(bucket.min_tokens == 0, |n| buckets[n].min_tokens < bucket.min_tokens);
        problems.check(field, bucket.min_tokens, holds, "0 for the first, and higher for each next one");
    }
}
