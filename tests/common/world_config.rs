//! Random configurations of a [`World`](crate::world::World).

use pointsman::RouterConfig;
use pointsman::config::{QueueClass, QueueOrder, SessionAffinity};
use pointsman::internals::config::{LoadConfig, OverloadConfig, QueueConfig, SessionConfig, SlowStartConfig};
use pointsman::policy::{KvConfig, Policy, PolicyConfig};

use crate::fleet::config;
use crate::world::{CLASSES, Dice};

/// A configuration, and whether the load of every rank is queried.
pub(crate) fn some_config(dice: &mut Dice) -> (RouterConfig, bool) {
    let affinities = [SessionAffinity::Off, SessionAffinity::Soft, SessionAffinity::Hard];
    let classes = vec![
        QueueClass {
            busy_prefill_tokens: Some(dice.below(200)),
            requests_max_per_rank: (!dice.one_in(3)).then_some(dice.below(4) as u32),
            ..QueueClass::named(CLASSES[0])
        },
        QueueClass {
            busy_prefill_frac: Some(0.5),
            raw_tokens_max_per_rank: dice.one_in(2).then_some(dice.below(300)),
            order: QueueOrder::Wspt,
            ..QueueClass::named(CLASSES[1])
        },
        QueueClass {
            busy_prefill_tokens: Some(64),
            quantum_tokens: 32,
            order: QueueOrder::Lcfs,
            cached_tokens_max_per_rank: dice.one_in(2).then_some(40),
            ..QueueClass::named(CLASSES[2])
        },
    ];
    let classes = if dice.one_in(5) { Vec::new() } else { classes };
    let policy = Policy::ALL[dice.below(7) as usize];
    let affinity = affinities[dice.below(3) as usize];
    let queries_every_rank = dice.one_in(4);
    let assume_kv_reuse = !dice.one_in(4);
    let overlap_score_credit_decay = if dice.one_in(4) { 0.5 } else { 0.0 };
    let overlap_refresh_after_ms = [0, 50, 1_000][dice.below(3) as usize];
    let overload = OverloadConfig {
        prefill_tokens: dice.one_in(3).then_some(400),
        blocks_frac: dice.one_in(3).then_some(0.8),
        ..OverloadConfig::default()
    };
    let fill = if dice.one_in(3) { 0.3 } else { 0.0 };
    let queue = match classes.is_empty() {
        true => QueueConfig::default(), // no request waits
        false => QueueConfig { classes, overlap_refresh_after_ms, ..QueueConfig::default() },
    };
    let kv = KvConfig { overlap_score_credit_decay, ..KvConfig::default() };
    let config = RouterConfig {
        queue,
        session: SessionConfig { affinity, ..SessionConfig::default() },
        load: LoadConfig { assume_kv_reuse, ..LoadConfig::default() },
        overload,
        slow_start: SlowStartConfig { fill, ..SlowStartConfig::default() },
        decision_trace: 0.1,
        policy: if policy == Policy::Kv { PolicyConfig::Kv(kv) } else { policy.into() },
        ..config()
    };
    (config, queries_every_rank)
}
