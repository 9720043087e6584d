//! Rules of settings beyond their types.
//!
//! Checks ranges and combinations, and reports all violations at a time with setting, value and rule.
//! [`RouterConfig::validate`](pointsman::RouterConfig::validate) checks router settings; readers check file contents.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;

use axum::http::uri::Authority;
use axum::http::{HeaderName, Uri};
use pointsman::{DnsNames, HttpUrl, WatchedFile};

use super::address::{is_loopback, is_server_url};
use super::log::{AccessLog, parse_level};
use super::rules::{Rules, SettingErrors};
use super::table::Declared as _;
use super::{MessagesMode, ModelSettings, ReplicasSettings, RouteSettings, Settings, TokenSourceChoice};
use crate::formats::openai::Endpoint;

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
        self.check_gateway(rules.at("gateway"));
        self.check_admin(rules.at("admin"));
        self.check_picker(rules.at("picker"));
        self.check_replicas(rules.at("replicas"));
        rules.at("").check("models", "empty", !self.models.is_empty(), "at least one model");
        self.check_names(&mut rules);
        for (n, model) in self.models.iter().enumerate() {
            model.check(&format!("models[{n}]"), self.admin.is_some(), &mut rules);
            if let Some(disaggregation) = &model.disaggregation {
                disaggregation.check(&model.name, self, rules.at(format!("models[{n}].disaggregation")));
            }
        }
        rules.at("gateway");
        let has_secret = self.tenants.is_empty() || self.gateway.salt_secret_file.is_some();
        rules.check("salt_secret_file", "absent", has_secret, "the path of a file if tenants exist");
        self.check_tenants(&mut rules);
        if rules.errors.is_empty() { Ok(()) } else { Err(SettingErrors(rules.errors)) }
    }

    fn check_gateway(&self, rules: &mut Rules) {
        let gateway = &self.gateway;
        for [(name, file), (other, other_file)] in [
            [("tls_certificate_file", &gateway.tls_certificate_file), ("tls_key_file", &gateway.tls_key_file)],
            [
                ("worker_certificate_file", &gateway.worker_certificate_file),
                ("worker_key_file", &gateway.worker_key_file),
            ],
        ] {
            let absent = |other| format!("absent without {other}");
            rules.given(name, file.as_ref(), |_| other_file.is_some(), absent(other));
            rules.given(other, other_file.as_ref(), |_| file.is_some(), absent(name));
        }
        gateway.check_ranges(rules);
        if let Some(bytes) = gateway.request_budget_bytes {
            let holds = bytes >= 2 * gateway.body_bytes_max;
            rules.check("request_budget_bytes", bytes, holds, "at least twice body_bytes_max");
        }
        for (name, share) in
            [("retry_share_max", gateway.retry_share_max), ("otlp_sample_share", gateway.otlp_sample_share)]
        {
            rules.check(name, share, (0.0..=1.0).contains(&share), "between 0 and 1");
        }
        let level_rule = "off, error, warn, info, debug or trace, or targets with these, such as info,pointsman=debug";
        rules.text("log_level", &gateway.log_level, parse_level(&gateway.log_level).is_ok(), level_rule);
        let is_known = AccessLog::parse(&gateway.access_log).is_some();
        let rule = "stdout, stderr, off, or the absolute path of a file";
        rules.text("access_log", &gateway.access_log, is_known, rule);
        for name in &gateway.session_headers {
            let is_name = HeaderName::from_bytes(name.as_bytes()).is_ok();
            rules.text("session_headers", name, is_name, "names of headers");
        }
        for (n, origin) in gateway.allow_origins.iter().flatten().enumerate() {
            let is_origin = origin == "*" || origin.contains("://") && !origin.ends_with('/');
            rules.text(
                format!("allow_origins[{n}]"),
                origin,
                is_origin,
                "*, or a scheme and a host such as https://chat.example",
            );
        }
        for (n, RouteSettings { path, model }) in gateway.routes.iter().enumerate() {
            let is_free = path.starts_with('/') && path.parse::<Uri>().is_ok_and(|uri| uri.path() == path);
            let is_free = is_free && Endpoint::of_path(path).is_none();
            rules.text(format!("routes[{n}].path"), path, is_free, "a path that the gateway does not serve itself");
            let is_known = self.models.iter().any(|known| known.name == *model);
            rules.text(format!("routes[{n}].model"), model, is_known, "the name of a model");
        }
        let is_usable = |endpoint: &str| {
            let authority = endpoint.strip_prefix("http://").and_then(|rest| rest.parse::<Authority>().ok());
            authority.is_some_and(|authority| authority.port().is_some())
        };
        rules.given("otlp_endpoint", gateway.otlp_endpoint.as_ref(), is_usable, "http://HOST:PORT");
    }

    fn check_admin(&self, rules: &mut Rules) {
        let Some(admin) = &self.admin else { return };
        let rule = format!("an address other than gateway.listen, {}", self.gateway.listen);
        rules.check("listen", admin.listen, !collide(self.gateway.listen, admin.listen), rule);
        let is_given = !admin.token_file.as_os_str().is_empty();
        rules.text("token_file", "", is_given, "the path of a file: there is no admin listener without a token");
    }

    /// Whether none of the first `n` listeners, of clients, operators and proxies, has an address that collides.
    fn is_free(&self, address: SocketAddr, n: usize) -> bool {
        let (admin, picker) = (self.admin.as_ref(), self.picker.as_ref());
        let taken = [Some(self.gateway.listen), admin.map(|admin| admin.listen), picker.map(|picker| picker.listen)];
        taken.into_iter().take(n).flatten().all(|other| !collide(other, address))
    }

    fn check_picker(&self, rules: &mut Rules) {
        let Some(picker) = &self.picker else { return };
        let is_free = self.is_free(picker.listen, 2);
        rules.check("listen", picker.listen, is_free, "an address other than gateway.listen and admin.listen");
        let files = [("tls_certificate_file", &picker.tls_certificate_file), ("tls_key_file", &picker.tls_key_file)];
        let has_both = files.iter().all(|(_, file)| file.is_some());
        for (name, file) in files {
            rules.given(name, file.as_ref(), |_| has_both, "given with the other file of chain and key");
            rules.given(name, file.as_ref(), |_| !picker.plaintext, "absent with plaintext");
        }
    }

    fn check_replicas(&self, rules: &mut Rules) {
        let Some(replicas) = &self.replicas else { return };
        replicas.check(rules);
        let Some(listen) = replicas.listen else { return };
        let rule = "an address other than gateway.listen, admin.listen and picker.listen";
        rules.check("listen", listen, self.is_free(listen, 3), rule);
    }

    /// Checks that names and pools are unique.
    fn check_names(&self, rules: &mut Rules) {
        let (mut names, mut pools) = (BTreeMap::new(), BTreeMap::new());
        for (n, model) in self.models.iter().enumerate() {
            let aliases = model.aliases.iter().enumerate();
            let aliases = aliases.map(|(m, alias)| (format!("models[{n}].aliases[{m}]"), alias));
            for (setting, name) in [(format!("models[{n}].name"), &model.name)].into_iter().chain(aliases) {
                rules.text(&setting, name, is_name(name), NAME_RULE);
                let first = names.entry(name).or_insert_with(|| setting.clone());
                rules.text(&setting, name, *first == setting, format!("a name other than {first}"));
            }
            let setting = format!("models[{n}].router.pool");
            let first = pools.entry(&model.router.pool).or_insert_with(|| setting.clone());
            rules.text(&setting, &model.router.pool, *first == setting, format!("a name other than {first}"));
        }
    }

    fn check_tenants(&self, rules: &mut Rules) {
        let mut names = BTreeMap::new();
        for (n, tenant) in self.tenants.iter().enumerate() {
            rules.at(format!("tenants[{n}]")).text("name", &tenant.name, is_name(&tenant.name), NAME_RULE);
            let first = *names.entry(&tenant.name).or_insert(n);
            rules.text("name", &tenant.name, first == n, format!("a name other than tenants[{first}].name"));
            rules.text("keys_file", "", !tenant.keys_file.as_os_str().is_empty(), "the path of a file");
            tenant.check_ranges(rules);
            if let Some(class) = &tenant.policy_class {
                let lacking = self.models.iter().find(|model| !model.router.queue.knows_class(class));
                let lacking =
                    lacking.map(|model| format!("a class or family of every model, {:?} has none", model.name));
                rules.text("policy_class", class, lacking.is_none(), lacking.unwrap_or_default());
            }
        }
    }

    /// Whether the clients' listener serves `/metrics`.
    #[must_use]
    pub fn is_metrics_public(&self) -> bool {
        self.gateway.metrics_public.unwrap_or(self.tenants.is_empty())
    }

    /// Warnings about valid but probably unintended settings.
    pub fn warnings(&self) -> Vec<String> {
        let gateway = &self.gateway;
        let (listen, is_local) = (gateway.listen, gateway.listen.ip().is_loopback());
        let public_admin = self.admin.as_ref().map(|admin| admin.listen).filter(|listen| !listen.ip().is_loopback());
        let is_insecure = self.replicas.as_ref().is_some_and(|replicas| replicas.insecure);
        let sends_keys = gateway.tls_certificate_file.is_none() && !is_local && !self.tenants.is_empty();
        let shows_metrics = self.is_metrics_public() && !(self.tenants.is_empty() && is_local);
        let own = [
            public_admin.map(|listen| {
                format!("admin.listen is {listen}: clients that reach it with the token control the gateway")
            }),
            is_insecure.then(|| {
                "replicas.insecure is true: any process that reaches replicas.listen can change the load".to_owned()
            }),
            sends_keys.then(|| format!("gateway.listen is {listen} without TLS: tenant keys are sent in clear text")),
            shows_metrics.then(|| {
                format!("/metrics on {listen} is public and names workers and tenants (gateway.metrics_public)")
            }),
        ];
        let of_models = self.models.iter().flat_map(|model| model.warnings(!self.tenants.is_empty()));
        own.into_iter().flatten().chain(of_models).collect()
    }

    /// Files with certificates that this gateway presents, with their settings.
    pub(crate) fn certificate_files(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let picker = self.picker.as_ref().and_then(|picker| picker.tls_certificate_file.as_deref());
        let replicas = self.replicas.as_ref().and_then(|replicas| replicas.tls_certificate_file.as_deref());
        let files = [
            ("gateway.tls_certificate_file", self.gateway.tls_certificate_file.as_deref()),
            ("gateway.worker_certificate_file", self.gateway.worker_certificate_file.as_deref()),
            ("picker.tls_certificate_file", picker),
            ("replicas.tls_certificate_file", replicas),
        ];
        files.into_iter().filter_map(|(setting, file)| Some((setting, file?)))
    }

    /// Files with API keys of workers, with their settings.
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
}

impl ReplicasSettings {
    fn check(&self, rules: &mut Rules) {
        let has_peers = self.dns.is_some() || !self.peers.is_empty();
        if let Some(url) = &self.nats {
            rules.text("nats", url, is_server_url(url), "nats://HOST:PORT or tls://HOST:PORT, without a password");
            let is_alone = !has_peers && self.listen.is_none();
            rules.text("nats", url, is_alone, "absent with listen, peers or dns");
        } else {
            rules.check("listen", "absent", self.listen.is_some(), "an IP address with a port");
            rules.check("", "without peers", has_peers, "given peers, dns or nats");
        }
        rules.given("dns", self.dns.as_ref(), |_| self.peers.is_empty(), "absent with peers");
        rules.given("dns", self.dns.as_ref(), is_host_and_port, "NAME:PORT");
        for (n, peer) in self.peers.iter().enumerate() {
            rules.text(format!("peers[{n}]"), peer, is_host_and_port(peer), "HOST:PORT");
        }
        rules.given("id", self.id.as_ref(), is_name, NAME_RULE);
        let files = [
            ("tls_certificate_file", &self.tls_certificate_file),
            ("tls_key_file", &self.tls_key_file),
            ("tls_ca_file", &self.tls_ca_file),
        ];
        let has_all = files.iter().all(|(_, file)| file.is_some());
        let rule = "absent unless tls_certificate_file, tls_key_file and tls_ca_file are given";
        files.into_iter().for_each(|(name, file)| rules.given(name, file.as_ref(), |_| has_all, rule));
        let is_secure = self.key_file.is_some() || has_all || self.insecure;
        let is_local = self.listen.is_none_or(|listen| listen.ip().is_loopback())
            && self.peers.iter().chain(&self.dns).all(|address| is_loopback(address))
            && self.nats.iter().all(|url| url.split_once("://").is_some_and(|(_, address)| is_loopback(address)));
        let rule = "given beyond loopback, unless there are tls_certificate_file, tls_key_file and tls_ca_file, or \
                    insecure is true";
        rules.check("key_file", "absent", is_secure || is_local, rule);
    }
}

impl ModelSettings {
    fn warnings(&self, has_tenants: bool) -> impl Iterator<Item = String> {
        let (name, passes) = (&self.name, self.messages == MessagesMode::Pass && has_tenants);
        let assumed = self.router.queue.unstated_batched_tokens();
        let warnings = [
            (!self.has_sources()).then(|| format!("model {name:?} has no workers until an operator adds some")),
            passes.then(|| {
                format!(
                    "model {name:?} passes Anthropic Messages: tenants share caches unless its engines read cache_salt \
                     in them"
                )
            }),
            self.assumes_batched_tokens().then(|| {
                format!(
                    "model {name:?} limits prefill by a share of max_num_batched_tokens: {assumed} is assumed for \
                     workers that do not state it (set router.queue.unstated_batched_tokens; vLLM does not state it)"
                )
            }),
        ];
        warnings.into_iter().flatten()
    }

    fn has_sources(&self) -> bool {
        !self.workers.is_empty() || self.has_changing_sources()
    }

    /// Whether workers may come that the settings do not describe.
    fn has_changing_sources(&self) -> bool {
        let has_lists = !self.worker_urls.is_empty() || !self.worker_names.is_empty();
        has_lists || self.workers_file.is_some() || self.kubernetes.is_some()
    }

    /// Whether a limit may depend on the built-in assumption for a worker's `max_num_batched_tokens`.
    fn assumes_batched_tokens(&self) -> bool {
        let is_fixed = !self.workers.is_empty() && !self.has_changing_sources();
        let all_stated = is_fixed && self.workers.iter().all(|worker| worker.config.max_num_batched_tokens.is_some());
        let is_built_in = self.router.queue.unstated_batched_tokens.is_none();
        is_built_in && !all_stated && self.router.uses_batched_tokens()
    }

    fn check(&self, path: &str, has_admin: bool, rules: &mut Rules) {
        rules.at(path).given("upstream_name", self.upstream_name.as_ref(), is_name, NAME_RULE);
        let rule = "given workers, workers_file, worker_urls, worker_names or kubernetes, unless [admin] can add some";
        rules.check("", "without workers", self.has_sources() || has_admin, rule);
        rules.given(
            "workers_file",
            self.workers_file.as_ref(),
            WatchedFile::is_name,
            "a name that ends in .toml or .json",
        );
        for (n, url) in self.worker_urls.iter().enumerate() {
            let parsed = HttpUrl::parse(url).and_then(|address| match address.endpoint() {
                endpoint if endpoint.ends_with("/v1") => {
                    Err(HttpUrl::refused(url, "leave out /v1, which paths begin with"))
                }
                _ => Ok(()),
            });
            if let Err(error) = parsed {
                let rule = format!("the address of a worker: {}", error.rule);
                rules.text(format!("worker_urls[{n}]"), &error.url, false, rule);
            }
        }
        self.check_engines(path, rules);
        for (n, name) in self.worker_names.iter().enumerate() {
            let is_name = DnsNames::new([name]).is_ok();
            rules.text(format!("worker_names[{n}]"), name, is_name, "NAME:PORT or https://NAME:PORT");
        }
        if let Some(kubernetes) = &self.kubernetes {
            kubernetes.check(rules.at(format!("{path}.kubernetes")));
        }
        rules.at(format!("{path}.router"));
        for error in self.router.validate().err().into_iter().flat_map(|errors| errors.0) {
            rules.check(error.field, error.value, false, error.rule);
        }
        self.check_tokens(rules.at(format!("{path}.tokens")));
    }

    /// Each engine is named once. As two workers it would appear half as loaded as it is.
    fn check_engines(&self, path: &str, rules: &mut Rules) {
        let workers = self.workers.iter().enumerate();
        let workers = workers.map(|(n, worker)| (format!("workers[{n}].url"), &worker.config.endpoint));
        let urls = self.worker_urls.iter().enumerate().map(|(n, url)| (format!("worker_urls[{n}]"), url));
        let mut named = BTreeMap::new();
        for (name, url) in workers.chain(urls) {
            let Some(key) = HttpUrl::engine_key(url) else { continue };
            match named.get(&key) {
                None => drop(named.insert(key, (name, url))),
                Some((first, spelled)) => {
                    rules.text(name, url, false, format!("another engine than {path}.{first}, which is {spelled:?}"));
                }
            }
        }
    }

    fn check_tokens(&self, rules: &mut Rules) {
        let tokens = &self.tokens;
        let has_tokenizer = tokens.tokenizer_file.is_some();
        let is_local = tokens.source == TokenSourceChoice::Local;
        let rule = "a source other than local without tokenizer_file";
        rules.text("source", "local", !is_local || has_tokenizer, rule);
        let template = tokens.chat_template_file.as_ref();
        rules.given("chat_template_file", template, |_| has_tokenizer, "absent without tokenizer_file");
        let is_token = |token: &str| has_tokenizer && !token.is_empty();
        let rule = "a token of the tokenizer, and absent without tokenizer_file";
        rules.given("media_placeholder", tokens.media_placeholder.as_ref(), is_token, rule);
        rules.text("media_uuids", "true", !tokens.media_uuids || has_tokenizer, "false without tokenizer_file");
        tokens.check_ranges(rules);
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
