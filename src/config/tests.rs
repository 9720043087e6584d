use super::*;
use crate::policy::{KvConfig, Policy, PolicyConfig};

fn refused(json: &str) -> String {
    let config: RouterConfig = serde_json::from_str(json).expect("well formed");
    config.validate().expect_err("must be refused").to_string()
}

#[test]
fn defaults_pass() {
    RouterConfig::default().validate().expect("the defaults follow the rules");
    for policy in Policy::ALL {
        let config = RouterConfig { policy: policy.into(), ..RouterConfig::default() };
        config.validate().expect("the defaults follow the rules under every policy");
    }
}

#[test]
fn every_rule_names_field_value_and_rule() {
    assert_eq!(refused(r#"{"block_size":0}"#), "block_size is 0, must be at least 1");
    assert_eq!(refused(r#"{"pool":"a b"}"#), "pool is a b, must be one or more letters, digits, _, . or -");
    assert_eq!(refused(r#"{"policy":{"temperature":-0.5}}"#), "policy.temperature is -0.5, must be between 0 and 1e9");
    assert_eq!(
        refused(r#"{"index":{"host_hit_weight":1.5}}"#),
        "index.host_hit_weight is 1.5, must be between 0 and 1"
    );
    assert_eq!(refused(r#"{"index":{"shards":65}}"#), "index.shards is 65, must be 1 to 64");
    assert_eq!(
        refused(r#"{"block_size":0,"queue":{"classes":[{"name":"a b"}]}}"#),
        "block_size is 0, must be at least 1; \
         queue.classes[0].name is a b, must be one or more letters, digits, _, . or -",
        "all at once"
    );
    assert_eq!(
        refused(r#"{"queue":{"classes":[{"name":"a","refuse_program_starts":true}]}}"#),
        "queue.classes[0].refuse_program_starts is true, must be true only with program_hold_ms"
    );
    assert_eq!(
        refused(r#"{"index":{"speculative":{"model":"lru"}}}"#),
        "index.speculative.model is lru, must be ttl unless events.mode is off"
    );
    assert_eq!(
        refused(r#"{"policy":{"name":"kv","prefill_load_scale":1e300}}"#).split(" is ").next(),
        Some("policy.prefill_load_scale"),
        "costs must stay finite"
    );
    let policy = PolicyConfig::Kv(KvConfig { overlap_score_credit: f64::NAN, ..KvConfig::default() });
    let nan = RouterConfig { policy, ..RouterConfig::default() };
    assert!(nan.validate().expect_err("refused").to_string().contains("NaN"));
}

#[test]
fn a_setting_without_effect_is_rejected_by_name() {
    for (json, field) in [
        (r#"{"session":{"affinity":"off","weight":1}}"#, "session.weight"),
        (r#"{"session":{"affinity":"hard","weight":1}}"#, "session.weight"),
        (r#"{"policy":"random","session":{"weight":1}}"#, "session.weight"),
        (r#"{"session":{"affinity":"off","ttl_ms":1}}"#, "session.ttl_ms"),
        (r#"{"session":{"affinity":"off","sessions_max":1}}"#, "session.sessions_max"),
        (r#"{"index":{"speculative":{"ttl_ms":1}}}"#, "index.speculative.ttl_ms"),
        (
            r#"{"events":{"mode":"auto"},"index":{"speculative":{"with_events_ttl_ms":1}}}"#,
            "index.speculative.with_events_ttl_ms",
        ),
        (r#"{"load":{"prefill_model":"learned"}}"#, "load.prefill_model"),
        (r#"{"queue":{"overlap_refresh_after_ms":1}}"#, "queue.overlap_refresh_after_ms"),
        (r#"{"queue":{"unstated_batched_tokens":1}}"#, "queue.unstated_batched_tokens"),
        (r#"{"queue":{"classes":[{"name":"a"}],"order":"lcfs"}}"#, "queue.order"),
        (r#"{"queue":{"classes":[{"name":"a","busy_prefill_tokens":1}],"threshold":1}}"#, "queue.threshold"),
        (r#"{"slow_start":{"max_ms":1}}"#, "slow_start.max_ms"),
    ] {
        let told = refused(json);
        assert!(told.starts_with(&format!("{field} is ")) && !told.contains(';'), "{json}: {told}");
    }
}

#[test]
fn unknown_keys_are_refused_by_name() {
    let error = serde_json::from_str::<RouterConfig>(r#"{"blok_size":16}"#).expect_err("refused");
    assert!(error.to_string().contains("blok_size"));
    let error = serde_json::from_str::<RouterConfig>(r#"{"index":{"shard":16}}"#).expect_err("refused");
    assert!(error.to_string().contains("unknown field `shard`"));
}

#[test]
fn an_index_is_kept_while_overlap_has_an_effect() {
    let kept = |json: &str| serde_json::from_str::<RouterConfig>(json).expect("well formed").has_index();
    assert!(kept("{}") && kept(r#"{"policy":"round_robin"}"#));
    assert!(!kept(r#"{"index":{"enabled":false}}"#));
    assert!(!kept(r#"{"policy":{"name":"kv","overlap_score_credit":0}}"#));
}
