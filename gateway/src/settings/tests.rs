use pointsman::policy::{KvConfig, PolicyConfig};
use std::path::{Path, PathBuf};

use pointsman::RouterConfig;
use pointsman::config::QueueOrder;
use pointsman::internals::config::QueueConfig;
use serde::Serialize;
use toml::{Table, Value};

use super::fields::{Field, FieldKind, fields_of};
use super::section::flattened;
use super::*;

const MODEL: &str = "\n[[models]]\nname = \"m\"\nworker_urls = [\"http://e:8000\"]\n";

/// Sources with a file in `/etc` and the working directory `/home`.
fn sources(text: &str, env: &[(&str, &str)], flags: &[(&str, &str)]) -> Sources {
    let variables = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let flags = flags.iter().map(|(setting, value)| Flag {
        name: format!("--set {setting}"),
        setting: (*setting).to_owned(),
        value: (*value).to_owned(),
    });
    let file = Some(ConfigFile { text: text.to_owned(), directory: "/etc".into() });
    Sources { file, variables, flags: flags.collect(), model: None, directory: "/home".into() }
}

/// Result for a file with one additional plain model.
fn loaded(text: &str, env: &[(&str, &str)]) -> Loaded {
    sources(&format!("{text}{MODEL}"), env, &[]).load().unwrap_or_else(|errors| panic!("{errors}"))
}

fn refused(sources: Sources) -> Vec<String> {
    let errors = sources.load().expect_err("rejected");
    errors.0.iter().map(ToString::to_string).collect()
}

fn problems(text: &str, env: &[(&str, &str)]) -> Vec<String> {
    refused(sources(&format!("{text}{MODEL}"), env, &[]))
}

/// Compares problems with lines.
fn assert_reported(problems: Vec<String>, expected: &str) {
    assert_eq!(problems.join("\n"), expected.trim());
}

/// Line of a setting within a printed section.
fn line<'a>(printed: &'a str, section: &str, setting: &str) -> &'a str {
    let mut lines = printed.lines().skip_while(|line| line.split(' ').next() != Some(section)).skip(1);
    let mut lines = lines.by_ref().take_while(|line| !line.starts_with('['));
    lines.find(|line| line.starts_with(setting)).unwrap_or_else(|| panic!("no {setting} in {printed}"))
}

#[test]
fn an_engine_is_named_once_in_all_lists() {
    let text = "[[models]]\nname = \"m\"\nworkers = [{ url = \"http://e:8000/\" }, { url = \"http://h\" }]\n\
        worker_urls = [\"http://E:8000\", \"http://127.0.0.1:1\", \"http://localhost:1/\", \"http://h:81\"]\n";
    let expected = r#"
models[0].worker_urls[0] is "http://E:8000", must be another engine than models[0].workers[0].url, which is "http://e:8000" (file)
models[0].worker_urls[2] is "http://localhost:1/", must be another engine than models[0].worker_urls[1], which is "http://127.0.0.1:1" (file)
"#;
    assert_reported(refused(sources(text, &[], &[])), expected);
}

#[test]
fn flags_override_environment_and_environment_overrides_file() {
    let text = format!(
        "[router]\nblock_size = 16\nseed = 1\npolicy = {{ name = \"kv\", temperature = 1 }}\nqueue.order = \"lcfs\"\n{MODEL}"
    );
    let env = [
        ("POINTSMAN_ROUTER_BLOCK_SIZE", "32"),
        ("POINTSMAN_ROUTER_SEED", "2"),
        ("POINTSMAN_ROUTER_QUEUE_THRESHOLD", "2.5"),
        ("POINTSMAN_SERVER_PORT", "left alone"),
        ("PATH", "/bin"),
    ];
    let flags = [("router.seed", "3"), ("router.is_eagle", "true"), ("router.is_eagle", "false")];
    let loaded = sources(&text, &env, &flags).load().expect("accepted");
    let expected = RouterConfig {
        pool: "m".to_owned(),
        block_size: Some(32),
        seed: 3,
        is_eagle: false,
        queue: QueueConfig { order: QueueOrder::Lcfs, threshold: Some(2.5), ..QueueConfig::default() },
        policy: PolicyConfig::Kv(KvConfig { temperature: 1.0, ..KvConfig::default() }),
        ..RouterConfig::default()
    };
    assert_eq!(loaded.settings.models[0].router, expected);
    let printed = loaded.to_string();
    let origins = [
        ("block_size", "environment: POINTSMAN_ROUTER_BLOCK_SIZE"),
        ("seed", "flag: --set router.seed"),
        ("policy.temperature", "file"),
        ("policy.name", "file"),
        ("events.mode", "default"),
        ("# index.bytes_max is not set", "default"),
    ];
    for (setting, origin) in origins {
        let line = line(&printed, "[router]", setting);
        assert!(line.ends_with(&format!(" # {origin}")), "{line}");
    }
}

/// A non-default value of the field in the form of a variable.
fn another(Field { name, kind }: Field, default: Option<&Value>) -> Option<String> {
    let value = match kind {
        FieldKind::Switch => (default != Some(&Value::Boolean(true))).to_string(),
        FieldKind::Integer { .. } if name == "index.bytes_max" => "2000000".to_owned(),
        FieldKind::Integer { .. } => {
            default.and_then(Value::as_integer).map_or(7, |n| if n > 1 { n - 1 } else { n + 1 }).to_string()
        }
        FieldKind::Number => "0.375".to_owned(),
        FieldKind::Choice(names) => {
            (*names.iter().rev().find(|name| default != Some(&Value::from(**name)))?).to_owned()
        }
        FieldKind::Text if name == "log_level" => "trace".to_owned(),
        FieldKind::Text if name == "access_log" => "off".to_owned(),
        FieldKind::Text | FieldKind::File => "other".to_owned(),
        FieldKind::Address => "127.0.0.1:9".to_owned(),
        FieldKind::Structured | FieldKind::Nested | FieldKind::Policy => return None,
    };
    Some(value)
}

#[test]
fn every_simple_setting_can_be_set_in_all_three_ways() {
    fn table(value: &impl Serialize) -> Table {
        Table::try_from(value).expect("settings are TOML")
    }
    let sections = [
        ("gateway", fields_of::<GatewaySettings>(), table(&GatewaySettings::default())),
        ("admin", fields_of::<AdminSettings>(), table(&AdminSettings::default())),
        ("picker", fields_of::<PickerSettings>(), table(&PickerSettings::default())),
        ("replicas", fields_of::<ReplicasSettings>(), table(&ReplicasSettings::default())),
        ("router", fields_of::<RouterConfig>(), flattened(table(&RouterConfig::default()))),
    ];
    for (section, fields, defaults) in sections {
        for field in fields {
            let (name, default) = (field.name, defaults.get(field.name));
            let Some(text) = another(field, default) else { continue };
            let value = match field.kind {
                FieldKind::Switch | FieldKind::Integer { .. } | FieldKind::Number => text.clone(),
                _ => format!("{text:?}"),
            };
            let variable = format!("POINTSMAN_{}_{}", section.to_uppercase(), field.variable());
            let setting = format!("{section}.{name}");
            let required = match setting.as_str() {
                "admin.listen" | "admin.index_token_file" | "admin.read_token_file" => "token_file = \"t\"\n",
                "replicas.listen" => "peers = [\"p:1\"]\nkey_file = \"k\"\n",
                "replicas.key_file" => "listen = \"127.0.0.1:1\"\npeers = [\"p:1\"]\n",
                name if name.starts_with("replicas.") => {
                    "listen = \"127.0.0.1:1\"\npeers = [\"p:1\"]\nkey_file = \"k\"\n"
                }
                _ => "",
            };
            let others = if required.is_empty() { MODEL.to_owned() } else { format!("[{section}]\n{required}{MODEL}") };
            let ways = [
                sources(&format!("[{section}]\n{required}{name} = {value}\n{MODEL}"), &[], &[]),
                sources(&others, &[(&variable, &text)], &[]),
                sources(&others, &[], &[(&setting, &text)]),
            ];
            for (sources, origin) in ways.into_iter().zip(["file", "environment: ", "flag: --set "]) {
                let shown = match sources.load() {
                    // Some settings require others; the problem still contains the origin.
                    Ok(loaded) => line(&loaded.to_string(), &format!("[{section}]"), &format!("{name} = ")).to_owned(),
                    Err(errors) => errors.to_string(),
                };
                assert!(shown.contains(origin), "{setting}: {shown}");
                assert!(shown.contains(&text) && !shown.contains("not a known"), "{setting}: {shown}");
            }
        }
    }
}

#[test]
fn the_router_of_a_model_overrides_the_shared_router() {
    let text = r#"
        [router]
        block_size = 16
        seed = 1
        queue.classes = [{ name = "a" }]
        [[models]]
        name = "org/one"
        worker_urls = ["http://e:8000"]
        [models.router]
        seed = 2
        [models.tokens]
        source = "none"
        [[models]]
        name = "two"
        workers_file = "two.toml"
        [models.router]
        pool = "second"
        queue.classes = []
    "#;
    let loaded = sources(text, &[("POINTSMAN_ROUTER_SEED", "3")], &[]).load().expect("accepted");
    let [one, two] = &loaded.settings.models[..] else { panic!("two models") };
    assert_eq!((one.router.pool.as_str(), one.router.block_size, one.router.seed), ("org_one", Some(16), 2));
    assert_eq!((two.router.pool.as_str(), two.router.block_size, two.router.seed), ("second", Some(16), 3));
    assert_eq!((one.router.queue.classes.len(), two.router.queue.classes.len()), (1, 0));
    assert_eq!(one.tokens.source, TokenSourceChoice::None);
    assert_eq!(two.workers_file.as_deref(), Some(Path::new("/etc/two.toml")));
    let printed = loaded.to_string();
    assert!(line(&printed, "[models.router]", "pool = \"org_one\"").ends_with("# default: the model's name"));
    assert!(line(&printed, "[models.router]", "seed = 2").ends_with("# file"));
}

#[test]
fn printed_settings_load_to_equal_settings() {
    let text = r#"
        [gateway]
        salt_secret_file = "salt"
        log_level = "info,pointsman=debug"
        [admin]
        token_file = "/run/token"
        [router]
        session.weight = 1e-7
        queue.threshold = 2
        queue.default_family = "chat"
        queue.uncached_buckets = [{ min_tokens = 0, bucket = "short" }, { min_tokens = 4096, bucket = "long" }]
        [[router.queue.classes]]
        name = "chat-short"
        family = "chat"
        bucket = "short"
        [[router.queue.classes]]
        name = "batch"
        order = "wspt"
        busy_prefill_frac = 0.5
        [[models]]
        name = "m"
        aliases = ["n \"o\""]
        [[models.workers]]
        url = "http://e:8000"
        data_parallel_size = 2
        kv_events = { endpoint = "tcp://*:5557" }
        [[models.workers]]
        url = "http://f:8000"
        probe = true
        [models.tokens]
        tokenizer_file = "tokenizer.json"
        [[models]]
        name = "two"
        worker_names = ["engines:8000"]
        [models.router]
        block_size = 32
        [[tenants]]
        name = "acme"
        keys_file = "acme.keys"
        policy_class = "batch"
    "#;
    let env = [("POINTSMAN_ROUTER_SEED", "9223372036854775807"), ("POINTSMAN_GATEWAY_WORKER_CA_FILE", "ca.pem")];
    let first = sources(text, &env, &[]).load().unwrap_or_else(|errors| panic!("{errors}"));
    let again = sources(&first.to_string(), &[], &[]).load().unwrap_or_else(|errors| panic!("{errors}\n{first}"));
    assert_eq!(format!("{:?}", again.settings), format!("{:?}", first.settings));
    let workers = &first.settings.models[0].workers;
    assert_eq!((workers[0].config.data_parallel_size, workers[1].probe), (2, true));
    let events = workers[0].config.kv_events.as_ref().expect("given");
    assert_eq!(events.endpoint, "tcp://e:5557", "format of the workers file");
    assert_eq!(first.settings.models[1].router.queue.classes.len(), 2);
    assert_eq!(first.settings.gateway.salt_secret_file, Some(PathBuf::from("/etc/salt")), "beside the file");
    assert_eq!(first.settings.gateway.worker_ca_file, Some(PathBuf::from("/home/ca.pem")), "where the command runs");
    assert_eq!(first.settings.tenants[0].keys_file, PathBuf::from("/etc/acme.keys"));
}

#[test]
fn flags_alone_are_enough() {
    let model = Some(("m".to_owned(), vec!["http://e:8000".to_owned()]));
    let loaded = Sources { model, ..Sources::default() }.load().expect("accepted");
    let model = &loaded.settings.models[0];
    assert_eq!((model.name.as_str(), &model.worker_urls[..]), ("m", &["http://e:8000".to_owned()][..]));
    let printed = loaded.to_string();
    assert!(line(&printed, "[[models]]", "name = ").ends_with("# flag: --model"));
    assert!(line(&printed, "[[models]]", "worker_urls = ").ends_with("# flag: --worker"));
    assert_eq!(refused(Sources::default()), ["models is empty, must be at least one model (default)"]);
}

#[test]
fn unknown_names_are_rejected_with_a_suggestion() {
    let text = format!(
        "server = 1\n[router]\nblok_size = 1\n[gatway]\n{MODEL}worker_url = 1\n[models.tokens]\nthread = 1\n[models.ruter]\n"
    );
    let env = [("POINTSMAN_ROUTER_BLOK_SIZE", "1"), ("POINTSMAN_ROUTER_", ""), ("POINTSMAN_ADMIN_TOKEN", "hush")];
    let flags = [("gateway.lisen", "x"), ("models.name", "x"), ("listen", "x")];
    let variable = "is not a known variable, must end in the name of a setting in upper case";
    let setting =
        "must be a setting of gateway, admin, picker, replicas, router, tokens or model, such as gateway.listen";
    let expected = format!(
        r"
gatway is not a known key, must be gateway, admin, picker, replicas, router, models or tenants, perhaps gateway (file)
models[0].tokens.thread is not a known key, must be the name of a setting, perhaps threads (file)
models[0].ruter is not a known key, must be the name of a setting, perhaps router (file)
models[0].worker_url is not a known key, must be the name of a setting, perhaps worker_urls (file)
router.blok_size is not a known key, must be the name of a setting, perhaps block_size (file)
server is not a known key, must be gateway, admin, picker, replicas, router, models or tenants (file)
POINTSMAN_ADMIN_TOKEN {variable}
POINTSMAN_ROUTER_ {variable}
POINTSMAN_ROUTER_BLOK_SIZE {variable}, perhaps POINTSMAN_ROUTER_BLOCK_SIZE
gateway.lisen is not a known setting, {setting}, perhaps gateway.listen (flag: --set gateway.lisen)
models.name is not a known setting, {setting} (flag: --set models.name)
listen is not a known setting, {setting}, perhaps gateway.listen (flag: --set listen)
"
    );
    assert_reported(refused(sources(&text, &env, &flags)), &expected);
    assert_eq!(problems("router = 3", &[]), ["router is 3, must be a table (file)"]);
    assert_eq!(refused(sources("models = 3", &[], &[])), ["models is 3, must be a list of tables (file)"]);
    assert_eq!(refused(sources("models = [3]", &[], &[])), ["models[0] is 3, must be a table (file)"]);
}

#[test]
fn type_errors_name_value_rule_and_origin() {
    let text =
        "[router]\nblock_size = \"x\"\nseed = -1\nis_eagle = 1\n[gateway]\nlisten = \"here\"\ntls_key_file = \"\"\n";
    let env = [("POINTSMAN_ROUTER_QUEUE_REQUESTS_MAX", "4294967296"), ("POINTSMAN_GATEWAY_LOG_FORMAT", "xml")];
    let expected = r#"
gateway.listen is "here", must be an IP address with a port, such as 127.0.0.1:8080 or 0.0.0.0:8080, or a port of 127.0.0.1 (file)
gateway.tls_key_file is "", must be the path of a file (file)
router.block_size is "x", must be an integer from 0 to 4294967295 (file)
router.is_eagle is 1, must be true or false (file)
router.seed is -1, must be an integer from 0 to 9223372036854775807 (file)
gateway.log_format is "xml", must be one of text, json (environment: POINTSMAN_GATEWAY_LOG_FORMAT)
router.queue.requests_max is "4294967296", must be an integer from 0 to 4294967295 (environment: POINTSMAN_ROUTER_QUEUE_REQUESTS_MAX)
"#;
    assert_reported(problems(text, &env), expected);
}

#[test]
fn violated_rules_name_the_setting_to_change() {
    let text = format!(
        "[router]\nblock_size = 0\n{MODEL}[models.router]\nqueue.classes = [{{ name = \"a b\" }}]\n\
         [[models]]\nname = \"n\"\nworker_urls = [\"http://f\"]\n"
    );
    let expected = r"
router.block_size is 0, must be at least 1 (file)
router.policy.temperature is NaN, must be between 0 and 1e9 (environment: POINTSMAN_ROUTER_POLICY_TEMPERATURE)
models[0].router.queue.classes[0].name is a b, must be one or more letters, digits, _, . or - (file)
";
    assert_reported(refused(sources(&text, &[("POINTSMAN_ROUTER_POLICY_TEMPERATURE", "NaN")], &[])), expected);
    let expected = r"
models is empty, must be at least one model (default)
router.block_size is 0, must be at least 1 (file)
";
    assert_reported(refused(sources("[router]\nblock_size = 0\n", &[], &[])), expected);
}

#[test]
fn settings_of_another_policy_are_rejected_with_both_names() {
    let env = [("POINTSMAN_ROUTER_POLICY_PREFILL_LOAD_SCALE", "2")];
    let expected = r"
router.policy.prefill_load_scale is 2.0, must be absent under policy random, which has no such setting (environment: POINTSMAN_ROUTER_POLICY_PREFILL_LOAD_SCALE)
router.policy.temperature is 1.0, must be absent under policy random, which has no such setting (file)
";
    assert_reported(problems("[router]\npolicy = { name = \"random\", temperature = 1.0 }\n", &env), expected);
    let text = "[router]\npolicy = { name = \"kv\", temperature = 0.5 }\n";
    let same = format!("{text}{MODEL}[models.router.policy]\nprefill_load_scale = 2.0\n");
    let other = format!("{text}{MODEL}[models.router]\npolicy = \"latency\"\n");
    let policy =
        |text: &str| sources(text, &[], &[]).load().expect("accepted").settings.models[0].router.policy.clone();
    let kv = KvConfig { temperature: 0.5, prefill_load_scale: 2.0, ..KvConfig::default() };
    assert_eq!(policy(&same), PolicyConfig::Kv(kv), "settings of the same policy are inherited");
    assert_eq!(policy(&other), PolicyConfig::default(), "settings of another policy are not inherited");
    let kept = loaded(text, &[]);
    let printed = sources(&kept.to_string(), &[], &[]).load().expect("loads again");
    assert_eq!(printed.settings.models[0].router, kept.settings.models[0].router);
}

#[test]
fn only_effective_values_are_validated() {
    let text = "[router]\nblock_size = 0\n";
    let loaded = loaded(text, &[("POINTSMAN_ROUTER_BLOCK_SIZE", "16")]);
    assert_eq!(loaded.settings.models[0].router.block_size, Some(16));
    let text = format!("{text}{MODEL}[models.router]\nblock_size = 8\n");
    assert!(sources(&text, &[], &[]).load().is_ok(), "no model uses it");
}

#[test]
fn rules_about_unread_settings_are_skipped() {
    let text = "[router]\nevents.mode = \"no\"\n[router.index.speculative]\nmodel = \"lru\"\n";
    assert_eq!(problems(text, &[]), ["router.events.mode is \"no\", must be one of off, on, auto (file)"]);
    let text = "[[models]]\nname = \"m\"\nworker_urls = 3\n";
    let reported = refused(sources(text, &[], &[]));
    assert!(
        reported.len() == 1 && reported[0].starts_with("models[0].worker_urls is 3, which cannot be read: "),
        "{reported:?}"
    );
}

#[test]
fn lists_are_set_in_the_file_only() {
    let expected = r#"
router.queue.classes is "[]", must be absent here: it can be set in the file only (environment: POINTSMAN_ROUTER_QUEUE_CLASSES)
"#;
    assert_reported(problems("", &[("POINTSMAN_ROUTER_QUEUE_CLASSES", "[]")]), expected);
}

#[test]
fn each_bad_element_of_a_list_is_named() {
    let text = "[router]\nqueue.classes = [{ name = \"a\", quantm = 1 }, { name = \"b\" }, { order = \"fcfs\" }]\n";
    let reported = problems(text, &[]);
    assert_eq!(reported.len(), 2, "{reported:?}");
    assert!(reported[0].starts_with("router.queue.classes[0] is {"), "{reported:?}");
    assert!(reported[0].contains("unknown field `quantm`"), "{reported:?}");
    assert!(reported[1].starts_with("router.queue.classes[2] is {"), "{reported:?}");
    let workers = "[[models]]\nname = \"m\"\nworkers = [{ url = \"http://e\" }, { endpoint = \"http://e\" }, { url = \"e\" }, \
                   { url = \"http://f\", total_kv_blocks = 0 }]\n";
    let reported = refused(sources(workers, &[], &[]));
    let expected = [
        "models[0].workers[1] is { endpoint = \"http://e\" }, which cannot be read: unknown field `endpoint`, must be `url`",
        "models[0].workers[2] is { url = \"e\" }, which cannot be read: url \"e\" is refused",
        "models[0].workers[3] is ",
    ];
    // The resulting lack of workers is not reported separately.
    assert_eq!(reported.len(), expected.len(), "{reported:?}");
    for (reported, expected) in reported.iter().zip(expected) {
        assert!(reported.starts_with(expected) && reported.ends_with("(file)"), "{reported}");
    }
    let twice = "[[models]]\nname = \"m\"\nworkers = [{ url = \"http://e\" }, { url = \"http://e\" }]\n";
    let reported = refused(sources(twice, &[], &[]));
    assert!(reported.len() == 1 && reported[0].contains("must be named once"), "{reported:?}");
}

#[test]
fn invalid_toml_is_reported_with_its_position() {
    let reported = problems("[router]\nblock_size = = 1\n", &[("POINTSMAN_ROUTER_SEED", "x")]);
    assert_eq!(reported.len(), 2, "the environment is still checked: {reported:?}");
    assert!(
        reported[0].starts_with("the file cannot be read as TOML: ") && reported[0].contains("line 2"),
        "{reported:?}"
    );
}

#[test]
fn all_rules_between_sections_are_reported() {
    let text = r#"
        [gateway]
        listen = "0.0.0.0:8081"
        tls_key_file = "key"
        attempts_max = 11
        idle_timeout_ms = 0
        first_byte_timeout_ms = 86400001
        body_bytes_max = 1023
        retry_share_max = 1.5
        log_level = "loud"
        access_log = "access.jsonl"
        [admin]
        [[models]]
        name = "m"
        aliases = ["n", "n", ""]
        worker_urls = ["ftp://e", "http://e/v1/"]
        worker_names = ["e"]
        workers_file = "workers.yaml"
        [models.tokens]
        source = "local"
        threads = 0
        [[models]]
        name = "m"
        [[tenants]]
        name = "a"
        keys_file = "keys"
        policy_class = "fast"
        [[tenants]]
        name = "a"
    "#;
    let reported = refused(sources(text, &[], &[]));
    let expected = r#"
gateway.tls_key_file is "/etc/key", must be absent without tls_certificate_file (file)
gateway.body_bytes_max is 1023, must be 1024 to 1073741824 (file)
gateway.first_byte_timeout_ms is 86400001, must be 1 to 86400000 (file)
gateway.idle_timeout_ms is 0, must be 1 to 86400000 (file)
gateway.attempts_max is 11, must be 1 to 10 (file)
gateway.retry_share_max is 1.5, must be between 0 and 1 (file)
gateway.log_level is "loud", must be off, error, warn, info, debug or trace, or targets
gateway.access_log is "access.jsonl", must be stdout, stderr, off, or the absolute path of a file (file)
admin.listen is 127.0.0.1:8081, must be an address other than gateway.listen, 0.0.0.0:8081 (default)
admin.token_file is "", must be the path of a file: there is no admin listener without a token (default)
models[0].aliases[1] is "n", must be a name other than models[0].aliases[0] (file)
models[0].aliases[2] is "", must be 1 to 256 bytes without control characters (file)
models[1].name is "m", must be a name other than models[0].name (file)
models[1].router.pool is "m", must be a name other than models[0].router.pool (default: the model's name)
models[0].workers_file is "/etc/workers.yaml", must be a name that ends in .toml or .json (file)
models[0].worker_urls[0] is "ftp://e", must be the address of a worker:
models[0].worker_urls[1] is "http://e/v1/", must be the address of a worker: leave out /v1
models[0].worker_names[0] is "e", must be NAME:PORT or https://NAME:PORT (file)
models[0].tokens.source is "local", must be a source other than local without tokenizer_file (file)
models[0].tokens.threads is 0, must be 1 to 256 (file)
gateway.salt_secret_file is absent, must be the path of a file if tenants exist (default)
tenants[0].policy_class is "fast", must be a class or family of every model, "m" has none (file)
tenants[1].name is "a", must be a name other than tenants[0].name (file)
tenants[1].keys_file is "", must be the path of a file (default)
"#;
    let expected: Vec<&str> = expected.trim().lines().collect();
    assert_eq!(reported.len(), expected.len(), "{reported:#?}");
    for (reported, expected) in reported.iter().zip(expected) {
        assert!(reported.starts_with(expected), "{reported}\nmust be\n{expected}");
    }
}

#[test]
fn models_without_workers_require_an_admin_listener() {
    let text = "[[models]]\nname = \"m\"\n";
    let expected = r"
models[0] is without workers, must be given workers, workers_file, worker_urls, worker_names or kubernetes, unless [admin] can add some (default)
";
    assert_reported(refused(sources(text, &[], &[])), expected);
    let text =
        format!("[admin]\nlisten = \"0.0.0.0:8081\"\ntoken_file = \"t\"\n{text}[models.tokens]\nsource = \"none\"\n");
    let warnings = sources(&text, &[], &[]).load().expect("accepted").settings.warnings();
    let expected = ["admin.listen is 0.0.0.0:8081", "model \"m\" has no workers"];
    assert_eq!(warnings.len(), expected.len(), "{warnings:?}");
    for (warning, expected) in warnings.iter().zip(expected) {
        assert!(warning.starts_with(expected), "{warning}");
    }
    assert!(loaded("", &[]).settings.warnings().is_empty());
}

#[test]
fn public_metrics_are_warned_of() {
    let reported = |more: &str, tenants: &str| {
        let text = format!(
            "[gateway]\nsalt_secret_file = \"salt\"\n{more}\n{tenants}[[models]]\nname = \"m\"\nworker_urls = [\"http://a:1\"]\n"
        );
        let warnings = sources(&text, &[], &[]).load().expect("accepted").settings.warnings();
        warnings.iter().filter(|warning| warning.contains("(gateway.metrics_public)")).count()
    };
    let tenant = "[[tenants]]\nname = \"t\"\nkeys_file = \"keys\"\n";
    let public = "listen = \"0.0.0.0:80\"";
    assert_eq!((reported("", ""), reported("", tenant), reported(public, ""), reported(public, tenant)), (0, 0, 1, 0));
    assert_eq!((reported("metrics_public = true", tenant), reported("metrics_public = false", "")), (1, 0));
}

#[test]
fn limits_based_on_assumed_capacity_are_warned_of() {
    let warned = |router: &str, worker: &str| {
        let text = format!("[router]\n{router}\n[[models]]\nname = \"m\"\n{worker}\n");
        let warnings = sources(&text, &[], &[]).load().expect("accepted").settings.warnings();
        warnings.iter().filter(|warning| warning.contains("8192 is assumed for workers")).count()
    };
    let probed = "worker_urls = [\"http://a:1\"]";
    let (stated, unstated) = ("{ url = \"http://a:1\", max_num_batched_tokens = 2048 }", "{ url = \"http://b:1\" }");
    let class = "[[router.queue.classes]]\nname = \"c\"\n";
    for router in ["queue.threshold = 2.0", "overload.prefill_frac = 9.0", &format!("{class}busy_prefill_frac = 1.0")] {
        assert_eq!(warned(router, probed), 1, "{router}");
        assert_eq!(warned(router, &format!("workers = [{stated}, {unstated}]")), 1, "{router}");
        assert_eq!(warned(router, &format!("workers = [{stated}]")), 0, "{router}");
        assert_eq!(warned(&format!("queue.unstated_batched_tokens = 2048\n{router}"), probed), 0, "{router}");
    }
    assert_eq!(warned("", probed), 0, "nothing waits");
    assert_eq!(warned(&format!("{class}busy_prefill_tokens = 9000"), probed), 0, "a limit in tokens");
}

#[test]
fn log_levels_are_levels_for_targets() {
    for level in ["info", "off", "warn,pointsman=debug", "pointsman::serve=trace,error"] {
        loaded("", &[("POINTSMAN_GATEWAY_LOG_LEVEL", level)]);
    }
    for level in ["inof", "info,", "=debug", "pointsman=", "pointsman=loud", "info debug"] {
        assert_eq!(problems("", &[("POINTSMAN_GATEWAY_LOG_LEVEL", level)]).len(), 1, "{level}");
    }
}
