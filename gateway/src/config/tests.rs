use pointsman::config::QueueOrder;

use super::*;

fn loaded(text: &str, env: &[(&str, &str)]) -> Result<Loaded, LoadErrors> {
    load(text, env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
}

fn problems(text: &str, env: &[(&str, &str)]) -> Vec<String> {
    let errors = loaded(text, env).expect_err("must be refused");
    errors.0.iter().map(ToString::to_string).collect()
}

fn origin(loaded: &Loaded, name: &str) -> Origin {
    loaded.origins.iter().find(|(field, _)| *field == name).expect("a setting").1.clone()
}

#[test]
fn nothing_given_is_the_defaults() {
    for text in ["", "[router]\n"] {
        let loaded = loaded(text, &[]).expect("accepted");
        assert_eq!(loaded.router, RouterConfig::default());
        assert!(loaded.origins.iter().all(|(_, origin)| *origin == Origin::Default));
    }
}

#[test]
fn the_environment_wins_over_the_file() {
    let text = "[router]\nblock_size = 16\ntemperature = 1\nqueue_policy = \"lcfs\"\n";
    let env = [
        ("POINTSMAN_ROUTER_BLOCK_SIZE", "32"),
        ("POINTSMAN_ROUTER_QUEUE_THRESHOLD", "2.5"),
        ("POINTSMAN_ROUTER_IS_EAGLE", "true"),
        ("POINTSMAN_SERVER_PORT", "left alone"),
        ("PATH", "/bin"),
    ];
    let loaded = loaded(text, &env).expect("accepted");
    let expected = RouterConfig {
        block_size: 32,
        is_eagle: true,
        temperature: 1.0,
        queue_threshold: Some(2.5),
        queue_policy: QueueOrder::Lcfs,
        ..RouterConfig::default()
    };
    assert_eq!(loaded.router, expected);
    assert_eq!(origin(&loaded, "block_size"), Origin::Environment("POINTSMAN_ROUTER_BLOCK_SIZE".into()));
    assert_eq!(origin(&loaded, "temperature"), Origin::File);
    assert_eq!(origin(&loaded, "seed"), Origin::Default);
}

#[test]
fn every_setting_is_printed_with_its_origin() {
    let text = "[router]\nblock_size = 16\n";
    let printed = loaded(text, &[("POINTSMAN_ROUTER_SEED", "7")]).expect("accepted").to_string();
    let line = |setting: &str, origin: &str| {
        let found = printed.lines().find(|line| line.starts_with(setting)).unwrap_or_else(|| panic!("{printed}"));
        assert!(found.ends_with(&format!("# {origin}")), "{found}");
    };
    line("block_size = 16 ", "file");
    line("seed = 7 ", "environment: POINTSMAN_ROUTER_SEED");
    line("overlap_score_credit = 1.0 ", "default");
    line("queue_classes = [] ", "default");
    line("# queue_threshold is not set ", "default");
    assert_eq!(printed.lines().count(), 1 + fields_of::<RouterConfig>().len());
}

#[test]
fn what_is_printed_loads_again_to_the_same() {
    let text = r#"
        [router]
        session_weight = 1e-7
        queue_threshold = 2
        queue_default_family = "chat"
        queue_uncached_buckets = [{ min_tokens = 0, bucket = "short" }, { min_tokens = 4096, bucket = "long" }]
        [[router.queue_classes]]
        name = "chat-short"
        family = "chat"
        bucket = "short"
        [[router.queue_classes]]
        name = "batch"
        order = "wspt"
        busy_prefill_frac = 0.5
    "#;
    let first = loaded(text, &[("POINTSMAN_ROUTER_SEED", "9223372036854775807")]).expect("accepted");
    let again = loaded(&first.to_string(), &[]).expect("what was printed is accepted");
    assert_eq!(again.router, first.router);
    assert_eq!(first.router.queue_classes.len(), 2);
}

#[test]
fn unknown_keys_are_refused_by_name() {
    let text = "server = 1\n[router]\nblok_size = 1\nsead = 2\n[rooter]\n";
    assert_eq!(
        problems(
            text,
            &[("POINTSMAN_ROUTER_BLOK_SIZE", "1"), ("POINTSMAN_ROUTER_", ""), ("POINTSMAN_ROUTER_Seed", "1")]
        ),
        [
            "rooter is not a known key, must be router, the only table",
            "router.blok_size is not a known key, must be the name of a setting",
            "router.sead is not a known key, must be the name of a setting",
            "server is not a known key, must be router, the only table",
            "POINTSMAN_ROUTER_ is not a known variable, must end in the name of a setting in upper case",
            "POINTSMAN_ROUTER_BLOK_SIZE is not a known variable, must end in the name of a setting in upper case",
            "POINTSMAN_ROUTER_Seed is not a known variable, must end in the name of a setting in upper case",
        ]
    );
    assert_eq!(problems("router = 3", &[]), ["router is 3, must be a table"]);
}

#[test]
fn values_of_the_wrong_type_name_value_and_rule() {
    let text = "[router]\nblock_size = \"x\"\nseed = -1\npolicy = \"best\"\nis_eagle = 1\n";
    assert_eq!(
        problems(text, &[("POINTSMAN_ROUTER_REQUESTS_MAX", "4294967296"), ("POINTSMAN_ROUTER_FANOUT", "")]),
        [
            "router.block_size is \"x\", must be an integer from 0 to 4294967295",
            "router.is_eagle is 1, must be true or false",
            "router.policy is \"best\", must be one of kv, round_robin, random, power_of_two, least_loaded",
            "router.seed is -1, must be an integer from 0 to 9223372036854775807",
            "POINTSMAN_ROUTER_FANOUT is \"\", must be one of shortlist, all",
            "POINTSMAN_ROUTER_REQUESTS_MAX is \"4294967296\", must be an integer from 0 to 4294967295",
        ]
    );
}

#[test]
fn broken_rules_name_value_rule_and_origin() {
    let text = "[router]\nblock_size = 0\nqueue_classes = [{ name = \"a b\" }]\n";
    assert_eq!(
        problems(text, &[("POINTSMAN_ROUTER_TEMPERATURE", "NaN")]),
        [
            "router.temperature is NaN, must be between 0 and 1e9 (environment: POINTSMAN_ROUTER_TEMPERATURE)",
            "router.block_size is 0, must be at least 1 (file)",
            "router.queue_classes[0].name is a b, must be one or more letters, digits, _, . or - (file)",
        ]
    );
}

#[test]
fn only_values_in_force_are_judged() {
    let text = "[router]\nblock_size = 0\n";
    let loaded = loaded(text, &[("POINTSMAN_ROUTER_BLOCK_SIZE", "16")]).expect("the file's value is not used");
    assert_eq!(loaded.router.block_size, 16);
}

#[test]
fn all_problems_are_told_at_once() {
    let text = "[router]\nblok_size = 1\nindex_shards = 0\nis_eagle = \"no\"\n";
    let told = problems(text, &[("POINTSMAN_ROUTER_SEED", "x"), ("POINTSMAN_ROUTER_SEAD", "1")]);
    let begins = |start: &str| assert!(told.iter().any(|problem| problem.starts_with(start)), "{start}: {told:?}");
    assert_eq!(told.len(), 5, "{told:?}");
    begins("router.blok_size is not");
    begins("router.index_shards is 0, must be 1 to 64");
    begins("router.is_eagle is \"no\"");
    begins("POINTSMAN_ROUTER_SEED is \"x\"");
    begins("POINTSMAN_ROUTER_SEAD is not");
}

#[test]
fn rules_about_unread_fields_are_not_judged() {
    let text = "[router]\nuse_kv_events = \"no\"\napproximate_policy = \"lru\"\n";
    assert_eq!(problems(text, &[]), ["router.use_kv_events is \"no\", must be true or false"]);
}

#[test]
fn lists_are_set_in_the_file_only() {
    assert_eq!(
        problems("", &[("POINTSMAN_ROUTER_QUEUE_CLASSES", "[]")]),
        ["POINTSMAN_ROUTER_QUEUE_CLASSES is \"[]\", must be absent: queue_classes can be set in the file only"]
    );
}

#[test]
fn each_bad_element_of_a_list_is_named() {
    let text = "[router]\nqueue_classes = [{ name = \"a\", quantm = 1 }, { name = \"b\" }, { order = \"fcfs\" }]\n";
    let told = problems(text, &[]);
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told[0].starts_with("router.queue_classes[0] is {"), "{told:?}");
    assert!(told[0].contains("unknown field `quantm`"), "{told:?}");
    assert!(told[1].starts_with("router.queue_classes[2] is {"), "{told:?}");
    assert!(told[1].contains("missing field `name`"), "{told:?}");
    let told = problems("[router]\nqueue_classes = 1\n", &[]);
    assert!(told[0].starts_with("router.queue_classes is 1, which cannot be read: "), "{told:?}");
}

#[test]
fn text_that_is_not_toml_is_told_with_its_place() {
    let told = problems("[router]\nblock_size = = 1\n", &[("POINTSMAN_ROUTER_SEED", "x")]);
    assert_eq!(told.len(), 2, "the environment is looked at all the same: {told:?}");
    assert!(told[0].starts_with("the file cannot be read as TOML: ") && told[0].contains("line 2"), "{told:?}");
}
