use super::*;

#[test]
fn defaults_pass() {
    RouterConfig::default().validate().expect("the defaults follow the rules");
}

#[test]
fn every_rule_names_field_value_and_rule() {
    let refused = |json: &str| {
        let config: RouterConfig = serde_json::from_str(json).expect("well formed");
        config.validate().expect_err("must be refused").to_string()
    };
    assert_eq!(refused(r#"{"block_size":0}"#), "block_size is 0, must be at least 1");
    assert_eq!(refused(r#"{"pool":"a b"}"#), "pool is a b, must be one or more letters, digits, _, . or -");
    assert_eq!(refused(r#"{"temperature":-0.5}"#), "temperature is -0.5, must be between 0 and 1e9");
    assert_eq!(refused(r#"{"host_cache_hit_weight":1.5}"#), "host_cache_hit_weight is 1.5, must be between 0 and 1");
    assert_eq!(refused(r#"{"index_shards":65}"#), "index_shards is 65, must be 1 to 64");
    assert_eq!(
        refused(r#"{"block_size":0,"queue_classes":[{"name":"a b"}]}"#),
        "block_size is 0, must be at least 1; \
         queue_classes[0].name is a b, must be one or more letters, digits, _, . or -",
        "all at once"
    );
    assert_eq!(
        refused(r#"{"approximate_policy":"lru"}"#),
        "approximate_policy is lru, must be ttl unless use_kv_events is false"
    );
    assert_eq!(
        refused(r#"{"prefill_load_scale":1e300}"#).split(" is ").next(),
        Some("prefill_load_scale"),
        "costs must stay finite"
    );
    let nan = RouterConfig { overlap_score_credit: f64::NAN, ..RouterConfig::default() };
    assert!(nan.validate().expect_err("refused").to_string().contains("NaN"));
}

#[test]
fn unknown_keys_are_refused_by_name() {
    let error = serde_json::from_str::<RouterConfig>(r#"{"blok_size":16}"#).expect_err("refused");
    assert!(error.to_string().contains("blok_size"));
}
