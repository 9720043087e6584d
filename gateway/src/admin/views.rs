//! JSON views of ranks and workers.
//!
//! Worker ids are strings, because they exceed the numbers of JavaScript. Durations are numbers of seconds in fields
//! with the suffix `_seconds`. Unknown values are `null`.

use std::collections::{BTreeMap, BTreeSet};

use pointsman::protocol::{Timestamp, WorkerRank};
use pointsman::{
    DiscoveryStatus, EngineLoadFact, HealthState, KvSourceStatus, PotentialLoad, Prompt, RankHealth, RouteRequest,
    Router, WorkerEntry,
};
use serde_json::{Value, json};

/// All facts about the ranks of a pool.
pub(super) struct Facts {
    health: BTreeMap<WorkerRank, RankHealth>,
    engine_loads: BTreeMap<WorkerRank, EngineLoadFact>,
    kv_events: BTreeMap<WorkerRank, KvSourceStatus>,
    loads: BTreeMap<WorkerRank, PotentialLoad>,
    now: Timestamp,
}

impl Facts {
    /// The current facts, without those that a failed router cannot provide.
    pub(super) async fn of(router: &Router) -> Self {
        let health = router.rank_health().await.unwrap_or_default();
        let loads = router.potential_loads(nothing()).await.unwrap_or_default();
        let engine_loads = router.engine_loads().into_iter();
        Self {
            health: health.into_iter().map(|health| (health.rank, health)).collect(),
            engine_loads: engine_loads.filter_map(|(rank, load)| Some((rank, load?))).collect(),
            kv_events: router.kv_sources().into_iter().map(|source| (source.rank, source)).collect(),
            loads: loads.into_iter().map(|load| (load.rank, load)).collect(),
            now: router.now(),
        }
    }

    /// One worker with its ranks.
    pub(super) fn worker(&self, entry: &WorkerEntry) -> Value {
        let ranks: Vec<Value> = entry.ranks.iter().map(|rank| self.rank(*rank)).collect();
        json!({
            "id": entry.worker.to_string(),
            "config": entry.config,
            "draining": entry.draining,
            "cordoned": entry.cordoned,
            "ranks": ranks,
        })
    }

    fn rank(&self, rank: WorkerRank) -> Value {
        let mut shown = json!({
            "rank": rank.rank,
            "health": self.health.get(&rank).map(|known| health(known, self.now)),
            "kv_events": self.kv_events.get(&rank).map(|source| kv_events(source, self.now)),
        });
        self.add_load(rank, &mut shown);
        shown
    }

    /// Load of one rank as a row.
    pub(super) fn load(&self, rank: WorkerRank) -> Value {
        let mut shown = rank_of(rank);
        self.add_load(rank, &mut shown);
        shown
    }

    fn add_load(&self, rank: WorkerRank, shown: &mut Value) {
        let load = self.loads.get(&rank);
        shown["active_requests"] = load.map(|load| load.active_requests).into();
        shown["active_prefill_tokens"] = load.map(|load| load.potential_prefill_tokens).into();
        shown["active_blocks"] = load.map(|load| load.potential_decode_blocks).into();
        shown["engine_load"] = json!(self.engine_loads.get(&rank));
    }
}

/// A request without tokens, which adds no load.
pub(super) fn nothing<'a>() -> RouteRequest<'a> {
    RouteRequest::query(Prompt::Tokens(&[]))
}

/// A rank as an identifier.
pub(super) fn rank_of(rank: WorkerRank) -> Value {
    json!({ "worker": rank.worker.to_string(), "rank": rank.rank })
}

pub(super) fn ranks_of(ranks: &BTreeSet<WorkerRank>) -> Vec<Value> {
    ranks.iter().copied().map(rank_of).collect()
}

pub(super) fn health(health: &RankHealth, now: Timestamp) -> Value {
    let (state, until) = match health.state {
        HealthState::Healthy => ("healthy", None),
        HealthState::Asleep => ("asleep", None),
        HealthState::Suspected => ("suspected", None),
        HealthState::Stalled { until } => ("stalled", Some(until)),
        HealthState::Refusing { until } => ("refusing", Some(until)),
        HealthState::Ejected { until } => ("ejected", until),
    };
    let remaining_seconds = until.map(|until| until.since(now).as_secs_f64());
    json!({ "state": state, "reason": health.reason, "remaining_seconds": remaining_seconds })
}

pub(super) fn kv_events(source: &KvSourceStatus, now: Timestamp) -> Value {
    let age = |at: Timestamp| now.since(at).as_secs_f64();
    let audit = source.audit.as_ref().map(|audit| {
        let difference = audit.difference.as_ref().map(|found| {
            let blocks =
                found.examples.iter().map(|(tier, name)| json!({ "tier": tier, "name": format!("{:016x}", name.0) }));
            json!({
                "age_seconds": age(found.at),
                "since_seconds": found.since.map(age),
                "stale_blocks": found.stale_blocks,
                "missing_blocks": found.missing_blocks,
                "blocks": blocks.collect::<Vec<_>>(),
                "heal": found.heal,
            })
        });
        json!({
            "result": audit.result,
            "cause": audit.cause,
            "age_seconds": age(audit.at),
            "equal_age_seconds": audit.equal_at.map(age),
            "difference": difference,
        })
    });
    json!({
        "endpoint": source.endpoint,
        "connected": source.connected,
        "caught_up": source.caught_up,
        "state": source.state.name(),
        "reason": source.reason,
        "unused": source.unused,
        "last_error": source.last_error,
        "last_sequence_number": source.applied,
        "messages_total": source.messages,
        "message_age_seconds": source.message_at.map(age),
        "restore": source.restore.map(|restore| restore.name()),
        "audit": audit,
    })
}

pub(super) fn discovery(status: &DiscoveryStatus, now: Timestamp) -> Value {
    let DiscoveryStatus { source, workers, last_error, failing_since: _, closed, refused, leaving, removed } = status;
    let refused: BTreeMap<String, &String> = refused.iter().map(|(id, why)| (id.to_string(), why)).collect();
    let leaving: Vec<String> = leaving.iter().map(ToString::to_string).collect();
    let removed: BTreeMap<String, &String> = removed.iter().map(|(id, url)| (id.to_string(), url)).collect();
    json!({
        "source": source,
        "workers": workers,
        "last_error": last_error,
        "stale_seconds": status.stale_for(now).as_secs_f64(),
        "closed": closed,
        "rejected": refused,
        "leaving": leaving,
        "removed": removed,
    })
}

/// Replaces worker ids by strings in all `worker` fields.
pub(super) fn worker_ids_as_text(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value.as_u64() {
                    Some(id) if name == "worker" => *value = id.to_string().into(),
                    Some(_) => {}
                    None => worker_ids_as_text(value),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(worker_ids_as_text),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
