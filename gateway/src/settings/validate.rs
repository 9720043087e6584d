//! Rules of settings beyond their types.
//!
//! Checks ranges and combinations, and reports all violations at a time with setting, value and rule.
//! [`RouterConfig::validate`](pointsman::RouterConfig::validate) checks router settings; readers check file contents.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;

use axum::http::uri::Authority;
use pointsman::DnsNames;
use pointsman::discovery::{FileFormat, HttpUrl, engine_key};

use super::address::{is_loopback, is_server_url};
use super::log::{AccessLog, parse_level};
use super::rules::{Rules, SettingErrors, is_object_name};
use super::{MessagesMode, ModelSettings, ReplicasSettings, Settings, TokenSourceChoice};

const DAY_MS: u64 = 24 * 60 * 60 * 1000;

/// Maximum limit of a tenant.
const LIMIT_MAX: u64 = 1_000_000_000_000;

/// Maximum length of a model or tenant name, in bytes.
const NAME_BYTES_MAX: usize = 256;

const NAME_RULE: &str = "1 to 256 bytes without control characters";

impl Settings {
    /// Checks every rule without reading files.
    ///
    /// ```
    /// use pointsman_gateway::settings::{ModelSettings, Settings};
    ///
    /// let mut settings = Settings::default();
    /// let told = settings.validate().expect_err("nothing to serve").to_string();
    /// assert_eq!(told, "models is empty, must be at least one model\n");
    ///
    /// let worker_urls = vec!["http://10.0.0.7:8000".to_owned()];
    /// settings.models = vec![ModelSettings { worker_urls, ..ModelSettings::named("llama") }];
    /// assert_eq!(settings.validate(), Ok(()));
    /// ```
    ///
    /// # Errors
    /// All violations.
    pub fn validate(&self) -> Result<(), SettingErrors> {
        let mut rules = Rules::default();
        self.check_gateway(&mut rules);
        self.check_admin(&mut rules);
        self.check_picker(&mut rules);
        self.check_replicas(&mut rules);
        rules.check("models", "empty", !self.models.is_empty(), "at least one model");
        self.check_names(&mut rules);
        for (n, model) in self.models.iter().enumerate() {
            model.check(&format!("models[{n}]"), self.admin.is_some(), &mut rules);
            if let Some(disaggregation) = &model.disaggregation {
                disaggregation.check(&format!("models[{n}].disaggregation"), &model.name, self, &mut rules);
            }
        }
        self.check_tenants(&mut rules);
        if rules.errors.is_empty() { Ok(()) } else { Err(SettingErrors(rules.errors)) }
    }

    fn check_gateway(&self, rules: &mut Rules) {
        let gateway = &self.gateway;
        let pairs = [
            ("tls_certificate_file", &gateway.tls_certificate_file, "tls_key_file", &gateway.tls_key_file),
            ("tls_key_file", &gateway.tls_key_file, "tls_certificate_file", &gateway.tls_certificate_file),
            ("worker_certificate_file", &gateway.worker_certificate_file, "worker_key_file", &gateway.worker_key_file),
            ("worker_key_file", &gateway.worker_key_file, "worker_certificate_file", &gateway.worker_certificate_file),
        ];
        for (setting, file, other, other_file) in pairs {
            if let Some(file) = file {
                let rule = format!("absent without {other}");
                rules.text(format!("gateway.{setting}"), &file.to_string_lossy(), other_file.is_some(), rule);
            }
        }
        let timeouts = [
            ("head_timeout_ms", gateway.head_timeout_ms, 1),
            ("body_timeout_ms", gateway.body_timeout_ms, 1),
            ("connect_timeout_ms", gateway.connect_timeout_ms, 1),
            ("first_byte_timeout_ms", gateway.first_byte_timeout_ms, 1),
            ("answer_timeout_ms", gateway.answer_timeout_ms, 1),
            ("queue_timeout_ms", gateway.queue_timeout_ms, 1),
            ("hold_without_endpoints_ms", gateway.hold_without_endpoints_ms, 0),
            ("idle_timeout_ms", gateway.idle_timeout_ms, 1),
            ("drain_delay_ms", gateway.drain_delay_ms, 0),
            ("drain_timeout_ms", gateway.drain_timeout_ms, 0),
            ("warm_up_ms", gateway.warm_up_ms, 0),
            ("snapshot_interval_ms", gateway.snapshot_interval_ms, 1_000),
        ];
        rules.range("gateway.connections_max", gateway.connections_max, 1, 1_000_000);
        rules.range("gateway.body_bytes_max", gateway.body_bytes_max, 1 << 10, 1 << 30);
        if let Some(bytes) = gateway.body_budget_bytes {
            let holds = bytes >= gateway.body_bytes_max;
            rules.check("gateway.body_budget_bytes", bytes, holds, "at least body_bytes_max");
        }
        for (setting, value, least) in timeouts {
            rules.range(format!("gateway.{setting}"), value, least, DAY_MS);
        }
        rules.range("gateway.decision_file_bytes_max", gateway.decision_file_bytes_max, 1 << 20, 1 << 40);
        rules.range("gateway.decision_files_max", gateway.decision_files_max, 1, 10_000);
        rules.range("gateway.attempts_max", gateway.attempts_max, 1, 10);
        let share = gateway.retry_share_max;
        rules.check("gateway.retry_share_max", share, (0.0..=1.0).contains(&share), "between 0 and 1");
        rules.range("gateway.stream_migrations_max", gateway.stream_migrations_max, 0, 10);
        rules.range("gateway.stream_migration_tokens_max", gateway.stream_migration_tokens_max, 1, 1 << 20);
        let level_rule = "off, error, warn, info, debug or trace, or targets with these, such as info,pointsman=debug";
        rules.text("gateway.log_level", &gateway.log_level, parse_level(&gateway.log_level).is_ok(), level_rule);
        let access_log = &gateway.access_log;
        let is_known = AccessLog::parse(access_log).is_some();
        rules.text("gateway.access_log", access_log, is_known, "stdout, stderr, off, or the absolute path of a file");
        if let Some(endpoint) = &gateway.otlp_endpoint {
            let authority = endpoint.strip_prefix("http://").and_then(|rest| rest.parse::<Authority>().ok());
            let is_usable = authority.is_some_and(|authority| authority.port().is_some());
            rules.text("gateway.otlp_endpoint", endpoint, is_usable, "http://HOST:PORT");
        }
        let share = gateway.otlp_sample_share;
        rules.check("gateway.otlp_sample_share", share, (0.0..=1.0).contains(&share), "between 0 and 1");
    }

    fn check_admin(&self, rules: &mut Rules) {
        let Some(admin) = &self.admin else { return };
        let rule = format!("an address other than gateway.listen, {}", self.gateway.listen);
        rules.check("admin.listen", admin.listen, !collide(self.gateway.listen, admin.listen), rule);
        let is_given = !admin.token_file.as_os_str().is_empty();
        rules.text("admin.token_file", "", is_given, "the path of a file: there is no admin listener without a token");
    }

    fn check_picker(&self, rules: &mut Rules) {
        let Some(picker) = &self.picker else { return };
        let others = [Some(self.gateway.listen), self.admin.as_ref().map(|admin| admin.listen)];
        let is_free = others.into_iter().flatten().all(|other| !collide(other, picker.listen));
        rules.check("picker.listen", picker.listen, is_free, "an address other than gateway.listen and admin.listen");
        let files = [("tls_certificate_file", &picker.tls_certificate_file), ("tls_key_file", &picker.tls_key_file)];
        let has_both = files.iter().all(|(_, file)| file.is_some());
        for (setting, file) in files {
            let Some(file) = file else { continue };
            let file = file.to_string_lossy();
            rules.text(format!("picker.{setting}"), &file, has_both, "given with the other file of chain and key");
            rules.text(format!("picker.{setting}"), &file, !picker.plaintext, "absent with plaintext");
        }
    }

    fn check_replicas(&self, rules: &mut Rules) {
        let Some(replicas) = &self.replicas else { return };
        replicas.check(rules);
        let Some(listen) = replicas.listen else { return };
        let others = [
            Some(self.gateway.listen),
            self.admin.as_ref().map(|admin| admin.listen),
            self.picker.as_ref().map(|picker| picker.listen),
        ];
        let is_free = others.into_iter().flatten().all(|other| !collide(other, listen));
        rules.check(
            "replicas.listen",
            listen,
            is_free,
            "an address other than gateway.listen, admin.listen and picker.listen",
        );
    }

    /// Checks that names and pools are unique.
    fn check_names(&self, rules: &mut Rules) {
        let (mut names, mut pools) = (BTreeMap::new(), BTreeMap::new());
        for (n, model) in self.models.iter().enumerate() {
            let aliases = model.aliases.iter().enumerate();
            let aliases = aliases.map(|(m, alias)| (format!("models[{n}].aliases[{m}]"), alias));
            for (setting, name) in [(format!("models[{n}].name"), &model.name)].into_iter().chain(aliases) {
                rules.text(setting.clone(), name, is_name(name), NAME_RULE);
                let first = names.entry(name).or_insert_with(|| setting.clone());
                rules.text(&setting, name, *first == setting, format!("a name other than {first}"));
            }
            let setting = format!("models[{n}].router.pool");
            let first = pools.entry(&model.router.pool).or_insert_with(|| setting.clone());
            rules.text(&setting, &model.router.pool, *first == setting, format!("a name other than {first}"));
        }
    }

    fn check_tenants(&self, rules: &mut Rules) {
        let has_secret = self.tenants.is_empty() || self.gateway.salt_secret_file.is_some();
        rules.check("gateway.salt_secret_file", "absent", has_secret, "the path of a file if tenants exist");
        let mut names = BTreeMap::new();
        for (n, tenant) in self.tenants.iter().enumerate() {
            let setting = |name: &str| format!("tenants[{n}].{name}");
            rules.text(setting("name"), &tenant.name, is_name(&tenant.name), NAME_RULE);
            let first = *names.entry(&tenant.name).or_insert(n);
            rules.text(setting("name"), &tenant.name, first == n, format!("a name other than tenants[{first}].name"));
            let is_given = !tenant.keys_file.as_os_str().is_empty();
            rules.text(setting("keys_file"), "", is_given, "the path of a file");
            let limits = [
                ("requests_per_minute", tenant.requests_per_minute),
                ("tokens_per_minute", tenant.tokens_per_minute),
                ("tokens_per_day", tenant.tokens_per_day),
                ("requests_in_flight_max", tenant.requests_in_flight_max.map(u64::from)),
                ("key_requests_per_minute", tenant.key_requests_per_minute),
                ("key_tokens_per_minute", tenant.key_tokens_per_minute),
                ("key_tokens_per_day", tenant.key_tokens_per_day),
                ("key_requests_in_flight_max", tenant.key_requests_in_flight_max.map(u64::from)),
            ];
            for (name, limit) in limits {
                limit.into_iter().for_each(|limit| rules.range(setting(name), limit, 1, LIMIT_MAX));
            }
            if let Some(class) = &tenant.policy_class {
                let lacking = self.models.iter().find(|model| !model.router.queue.knows_class(class));
                let lacking =
                    lacking.map(|model| format!("a class or family of every model, {:?} has none", model.name));
                rules.text(setting("policy_class"), class, lacking.is_none(), lacking.unwrap_or_default());
            }
        }
    }

    /// Warnings about valid but probably unintended settings.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let gateway = &self.gateway;
        if let Some(admin) = self.admin.as_ref().filter(|admin| !admin.listen.ip().is_loopback()) {
            let listen = admin.listen;
            warnings
                .push(format!("admin.listen is {listen}: clients that reach it with the token control the gateway"));
        }
        if self.replicas.as_ref().is_some_and(|replicas| replicas.insecure) {
            warnings.push(
                "replicas.insecure is true: any process that reaches replicas.listen can change the load".to_owned(),
            );
        }
        let is_plain = gateway.tls_certificate_file.is_none() && !gateway.listen.ip().is_loopback();
        if is_plain && !self.tenants.is_empty() {
            let listen = gateway.listen;
            warnings.push(format!("gateway.listen is {listen} without TLS: tenant keys are sent in clear text"));
        }
        if gateway.metrics_public && !(self.tenants.is_empty() && gateway.listen.ip().is_loopback()) {
            let listen = gateway.listen;
            warnings.push(format!("gateway.metrics_public is true: /metrics on {listen} is public and names workers"));
        }
        for model in &self.models {
            let name = &model.name;
            if !model.has_sources() {
                warnings.push(format!("model {name:?} has no workers until an operator adds some"));
            }
            if model.messages == MessagesMode::Pass && !self.tenants.is_empty() {
                warnings.push(format!(
                    "model {name:?} passes Anthropic Messages: tenants share caches unless its engines read cache_salt \
                     in them"
                ));
            }
            if model.assumes_batched_tokens() {
                let assumed = model.router.queue.unstated_batched_tokens();
                warnings.push(format!(
                    "model {name:?} limits prefill by a share of max_num_batched_tokens: {assumed} is assumed for \
                     workers that do not state it (set router.queue.unstated_batched_tokens; vLLM does not state it)"
                ));
            }
        }
        warnings
    }

    /// Files with API keys of workers, with their settings.
    #[must_use]
    pub fn worker_key_files(&self) -> Vec<(String, &Path)> {
        let of_gateway = ("gateway.worker_api_key_file".to_owned(), self.gateway.worker_api_key_file.as_deref());
        let of_models = self.models.iter().enumerate().flat_map(|(n, model)| {
            let own = (format!("models[{n}].worker_api_key_file"), model.worker_api_key_file.as_deref());
            let workers = model.workers.iter().enumerate().map(move |(m, worker)| {
                (format!("models[{n}].workers[{m}].api_key_file"), worker.config.api_key_file.as_deref())
            });
            std::iter::once(own).chain(workers)
        });
        let files = std::iter::once(of_gateway).chain(of_models);
        files.filter_map(|(setting, file)| Some((setting, file?))).collect()
    }

    /// Files that must exist at startup, with their settings; excludes secrets.
    #[must_use]
    pub fn files(&self) -> Vec<(String, &Path)> {
        let gateway = &self.gateway;
        let mut files = vec![
            ("gateway.tls_certificate_file".to_owned(), &gateway.tls_certificate_file),
            ("gateway.tls_key_file".to_owned(), &gateway.tls_key_file),
            ("gateway.worker_ca_file".to_owned(), &gateway.worker_ca_file),
            ("gateway.worker_certificate_file".to_owned(), &gateway.worker_certificate_file),
            ("gateway.worker_key_file".to_owned(), &gateway.worker_key_file),
        ];
        if let Some(picker) = &self.picker {
            files.push(("picker.tls_certificate_file".to_owned(), &picker.tls_certificate_file));
            files.push(("picker.tls_key_file".to_owned(), &picker.tls_key_file));
        }
        if let Some(replicas) = &self.replicas {
            files.push(("replicas.tls_certificate_file".to_owned(), &replicas.tls_certificate_file));
            files.push(("replicas.tls_key_file".to_owned(), &replicas.tls_key_file));
            files.push(("replicas.tls_ca_file".to_owned(), &replicas.tls_ca_file));
            files.push(("replicas.kubeconfig_file".to_owned(), &replicas.kubeconfig_file));
        }
        for (n, model) in self.models.iter().enumerate() {
            if let Some(kubernetes) = &model.kubernetes {
                files.push((format!("models[{n}].kubernetes.kubeconfig_file"), &kubernetes.kubeconfig_file));
            }
            files.push((format!("models[{n}].tokens.tokenizer_file"), &model.tokens.tokenizer_file));
            files.push((format!("models[{n}].tokens.chat_template_file"), &model.tokens.chat_template_file));
        }
        files.into_iter().filter_map(|(setting, file)| Some((setting, file.as_deref()?))).collect()
    }
}

impl ReplicasSettings {
    fn check(&self, rules: &mut Rules) {
        let has_peers = self.dns.is_some() || self.kubernetes_service.is_some() || !self.peers.is_empty();
        if let Some(url) = &self.nats {
            let rule = "nats://HOST:PORT or tls://HOST:PORT, without a password";
            rules.text("replicas.nats", url, is_server_url(url), rule);
            let is_alone = !has_peers && self.listen.is_none();
            rules.text("replicas.nats", url, is_alone, "absent with listen, peers, dns or kubernetes_service");
        } else {
            rules.check("replicas.listen", "absent", self.listen.is_some(), "an IP address with a port");
            rules.check("replicas", "without peers", has_peers, "given peers, dns, kubernetes_service or nats");
        }
        if let Some(name) = &self.dns {
            rules.text("replicas.dns", name, self.peers.is_empty(), "absent with peers");
            rules.text("replicas.dns", name, is_host_and_port(name), "NAME:PORT");
        }
        self.check_kubernetes(rules);
        for (n, peer) in self.peers.iter().enumerate() {
            rules.text(format!("replicas.peers[{n}]"), peer, is_host_and_port(peer), "HOST:PORT");
        }
        if let Some(id) = &self.id {
            rules.text("replicas.id", id, is_name(id), NAME_RULE);
        }
        let files = [
            ("tls_certificate_file", &self.tls_certificate_file),
            ("tls_key_file", &self.tls_key_file),
            ("tls_ca_file", &self.tls_ca_file),
        ];
        let has_all = files.iter().all(|(_, file)| file.is_some());
        for (setting, file) in files {
            if let Some(file) = file {
                let rule = "absent unless tls_certificate_file, tls_key_file and tls_ca_file are given";
                rules.text(format!("replicas.{setting}"), &file.to_string_lossy(), has_all, rule);
            }
        }
        let is_secure = self.key_file.is_some() || has_all || self.insecure;
        let is_local = self.listen.is_none_or(|listen| listen.ip().is_loopback())
            && self.kubernetes_service.is_none()
            && self.peers.iter().chain(&self.dns).all(|address| is_loopback(address))
            && self.nats.iter().all(|url| url.split_once("://").is_some_and(|(_, address)| is_loopback(address)));
        let rule = "given beyond loopback, unless there are tls_certificate_file, tls_key_file and tls_ca_file, or \
                    insecure is true";
        rules.check("replicas.key_file", "absent", is_secure || is_local, rule);
    }
}

impl ReplicasSettings {
    fn check_kubernetes(&self, rules: &mut Rules) {
        if let Some(service) = &self.kubernetes_service {
            let is_valid = service.rsplit_once(':').is_some_and(|(name, _)| is_object_name(name));
            let rule = if cfg!(feature = "kubernetes") {
                "NAME:PORT"
            } else {
                "absent: this program was built without the feature kubernetes"
            };
            let is_valid = is_valid && is_host_and_port(service) && cfg!(feature = "kubernetes");
            rules.text("replicas.kubernetes_service", service, is_valid, rule);
            let is_alone = self.peers.is_empty() && self.dns.is_none();
            rules.text("replicas.kubernetes_service", service, is_alone, "absent with peers or dns");
        }
        let has_service = self.kubernetes_service.is_some();
        if let Some(namespace) = &self.kubernetes_namespace {
            let setting = "replicas.kubernetes_namespace";
            rules.text(setting, namespace, is_object_name(namespace), "the name of a Kubernetes object");
            rules.text(setting, namespace, has_service, "absent without kubernetes_service");
        }
        if let Some(file) = &self.kubeconfig_file {
            let rule = "absent without kubernetes_service";
            rules.text("replicas.kubeconfig_file", &file.to_string_lossy(), has_service, rule);
        }
    }
}

impl ModelSettings {
    fn has_sources(&self) -> bool {
        let has_lists = [&self.worker_urls, &self.worker_names].into_iter().any(|list| !list.is_empty());
        has_lists || !self.workers.is_empty() || self.workers_file.is_some() || self.kubernetes.is_some()
    }

    /// Whether a limit may depend on the built-in assumption for a worker's `max_num_batched_tokens`.
    fn assumes_batched_tokens(&self) -> bool {
        let by_hand = |worker: &pointsman::discovery::NamedWorker| worker.config.max_num_batched_tokens.is_some();
        let all_stated = self.has_fixed_workers_only() && self.workers.iter().all(by_hand);
        let is_built_in = self.router.queue.unstated_batched_tokens.is_none();
        is_built_in && !all_stated && self.router.uses_batched_tokens()
    }

    /// Whether all workers are fully described in the settings.
    fn has_fixed_workers_only(&self) -> bool {
        !self.workers.is_empty()
            && self.workers_file.is_none()
            && self.worker_urls.is_empty()
            && self.worker_names.is_empty()
            && self.kubernetes.is_none()
    }

    fn check(&self, path: &str, has_admin: bool, rules: &mut Rules) {
        if let Some(name) = &self.upstream_name {
            rules.text(format!("{path}.upstream_name"), name, is_name(name), NAME_RULE);
        }
        let rule = "given workers, workers_file, worker_urls, worker_names or kubernetes, unless [admin] can add some";
        rules.check(path, "without workers", self.has_sources() || has_admin, rule);
        if let Some(file) = &self.workers_file {
            let file = file.to_string_lossy();
            let is_known = FileFormat::of_name(&file).is_ok();
            rules.text(format!("{path}.workers_file"), &file, is_known, "a name that ends in .toml or .json");
        }
        for (n, url) in self.worker_urls.iter().enumerate() {
            if let Err(error) = HttpUrl::parse(url) {
                let rule = format!("the address of a worker: {}", error.rule);
                rules.text(format!("{path}.worker_urls[{n}]"), &error.url, false, rule);
            }
        }
        self.check_engines(path, rules);
        for (n, name) in self.worker_names.iter().enumerate() {
            let is_name = DnsNames::new([name]).is_ok();
            rules.text(format!("{path}.worker_names[{n}]"), name, is_name, "NAME:PORT or https://NAME:PORT");
        }
        if let Some(kubernetes) = &self.kubernetes {
            kubernetes.check(&format!("{path}.kubernetes"), rules);
        }
        for error in self.router.validate().err().into_iter().flat_map(|errors| errors.0) {
            rules.check(format!("{path}.router.{}", error.field), error.value, false, error.rule);
        }
        self.check_tokens(&format!("{path}.tokens"), rules);
    }

    /// Each engine is named once. As two workers it would appear half as loaded as it is.
    fn check_engines(&self, path: &str, rules: &mut Rules) {
        let workers = self.workers.iter().enumerate();
        let workers = workers.map(|(n, worker)| (format!("{path}.workers[{n}].url"), &worker.config.endpoint));
        let urls = self.worker_urls.iter().enumerate().map(|(n, url)| (format!("{path}.worker_urls[{n}]"), url));
        let mut named = BTreeMap::new();
        for (setting, url) in workers.chain(urls) {
            let Some(key) = engine_key(url) else { continue };
            match named.get(&key) {
                None => drop(named.insert(key, (setting, url))),
                Some((first, spelled)) => {
                    rules.text(setting, url, false, format!("another engine than {first}, which is {spelled:?}"));
                }
            }
        }
    }

    fn check_tokens(&self, path: &str, rules: &mut Rules) {
        let tokens = &self.tokens;
        let has_tokenizer = tokens.tokenizer_file.is_some();
        let is_local = tokens.source == TokenSourceChoice::Local;
        let rule = "a source other than local without tokenizer_file";
        rules.text(format!("{path}.source"), "local", !is_local || has_tokenizer, rule);
        if let Some(file) = &tokens.chat_template_file {
            let rule = "absent without tokenizer_file";
            rules.text(format!("{path}.chat_template_file"), &file.to_string_lossy(), has_tokenizer, rule);
        }
        if let Some(placeholder) = &tokens.media_placeholder {
            let rule = "a token of the tokenizer, and absent without tokenizer_file";
            let is_valid = has_tokenizer && !placeholder.is_empty();
            rules.text(format!("{path}.media_placeholder"), placeholder, is_valid, rule);
        }
        let rule = "false without tokenizer_file";
        rules.text(format!("{path}.media_uuids"), "true", !tokens.media_uuids || has_tokenizer, rule);
        rules.range(format!("{path}.threads"), tokens.threads, 1, 256);
        rules.range(format!("{path}.cache_bytes_max"), tokens.cache_bytes_max, 0, 1 << 40);
        rules.range(format!("{path}.engine_timeout_ms"), tokens.engine_timeout_ms, 1, DAY_MS);
    }
}

/// Whether the text is a host and a port from 1 on.
fn is_host_and_port(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let is_plain = |host: &str| !host.is_empty() && !host.contains([':', '/', '[', ']', ' ', '@']);
    let is_ip6 = text.parse::<SocketAddr>().is_ok();
    port.parse::<u16>().is_ok_and(|port| port > 0) && (is_plain(host) || is_ip6)
}

fn is_name(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.chars().any(char::is_control)
}

/// Whether both addresses cannot be bound together.
fn collide(one: SocketAddr, other: SocketAddr) -> bool {
    let same_ip = one.ip() == other.ip() || one.ip().is_unspecified() || other.ip().is_unspecified();
    one.port() != 0 && one.port() == other.port() && same_ip
}
