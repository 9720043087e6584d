//! Settings of the waiting queue: classes, their order, shares and limits.

use serde::{Deserialize, Serialize};

use super::Problems;

/// In which order the requests of one class leave the queue. A strict priority and a deadline come before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueueOrder {
    /// First come, first served; a priority jump moves a request that many seconds ahead.
    #[default]
    Fcfs,
    /// Last come, first served.
    Lcfs,
    /// Weighted shortest processing time: fewest uncached tokens first.
    Wspt,
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
    #[serde(default)]
    pub family: Option<String>,
    /// The bucket of uncached tokens (see `queue_uncached_buckets`) that it serves within its family.
    #[serde(default)]
    pub bucket: Option<String>,
    /// In which order its requests leave. Default `fcfs`.
    #[serde(default)]
    pub order: QueueOrder,
    /// Its share: uncached tokens it may send in each round of the classes that wait. At least 1. Default 2,048.
    #[serde(default = "quantum_tokens")]
    pub quantum_tokens: u32,
    /// A rank with more prefill tokens than this to compute is busy for this class.
    #[serde(default)]
    pub busy_prefill_tokens: Option<u64>,
    /// The same as a share of the rank's `max_num_batched_tokens`. Default: the router's `queue_threshold`.
    #[serde(default)]
    pub busy_prefill_frac: Option<f64>,
    /// Requests that may wait, for each rank of the pool; 0 never waits. Default: no limit.
    #[serde(default)]
    pub requests_max_per_rank: Option<u32>,
    /// Prompt tokens that may wait, for each rank of the pool.
    #[serde(default)]
    pub raw_tokens_max_per_rank: Option<u64>,
    /// Cached prompt tokens that may wait, for each rank of the pool.
    #[serde(default)]
    pub cached_tokens_max_per_rank: Option<u64>,
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
        Self {
            name: name.into(),
            family: None,
            bucket: None,
            order: QueueOrder::default(),
            quantum_tokens: quantum_tokens(),
            busy_prefill_tokens: None,
            busy_prefill_frac: None,
            requests_max_per_rank: None,
            raw_tokens_max_per_rank: None,
            cached_tokens_max_per_rank: None,
        }
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

pub(super) fn check_classes(classes: &[QueueClass], buckets: &[UncachedBucket], problems: &mut Problems) {
    for (n, class) in classes.iter().enumerate() {
        let field = |name: &str| format!("queue_classes[{n}].{name}");
        problems.check(field("name"), &class.name, is_name(&class.name), NAME_RULE);
        let again = classes[..n].iter().any(|other| other.name == class.name);
        problems.check(field("name"), &class.name, !again, "named once");
        for (name, value) in [("family", &class.family), ("bucket", &class.bucket)] {
            if let Some(value) = value {
                problems.check(field(name), value, is_name(value), NAME_RULE);
            }
        }
        problems.check(field("quantum_tokens"), class.quantum_tokens, class.quantum_tokens > 0, "at least 1");
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
            problems.check(field("bucket"), bucket, known, "the name of one of queue_uncached_buckets");
        }
    }
    for (n, bucket) in buckets.iter().enumerate() {
        let field = format!("queue_uncached_buckets[{n}].min_tokens");
        let holds = n.checked_sub(1).map_or(bucket.min_tokens == 0, |n| buckets[n].min_tokens < bucket.min_tokens);
        problems.check(field, bucket.min_tokens, holds, "0 for the first, and higher for each next one");
    }
}
