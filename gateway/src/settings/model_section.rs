//! Sections of one of `[[models]]`.

use std::path::{Path, PathBuf};

use pointsman::RouterConfig;
use pointsman::discovery::{FileError, FileFormat, NamedWorker};
use pointsman::policy::Policy;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::error::LoadError;
use super::section::{Origin, Section, nested};
use super::{DisaggregationSettings, KubernetesSettings, MessagesMode, TokensSettings};

/// Tables of a model with their own sections.
const TABLES: [&str; 4] = ["router", "tokens", "kubernetes", "disaggregation"];

/// Settings of a model; router and tokens have their own sections.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ModelFields {
    pub(super) name: String,
    pub(super) aliases: Vec<String>,
    pub(super) upstream_name: Option<String>,
    pub(super) workers: Vec<Table>,
    pub(super) workers_file: Option<PathBuf>,
    pub(super) worker_urls: Vec<String>,
    pub(super) worker_names: Vec<String>,
    pub(super) worker_api_key_file: Option<PathBuf>,
    pub(super) messages: MessagesMode,
}

#[derive(Clone, Debug)]
pub(super) struct ModelSections {
    pub(super) own: Section,
    pub(super) router: Section,
    pub(super) tokens: Section,
    /// Present if the file has the table.
    pub(super) kubernetes: Option<Section>,
    /// Present if the file has the table.
    pub(super) disaggregation: Option<Section>,
}

impl ModelSections {
    pub(super) fn new(n: usize) -> Self {
        Self {
            own: Section::of::<ModelFields>(format!("models[{n}]")).with_tables(&TABLES),
            router: Section::of_router(format!("models[{n}].router")),
            tokens: Section::of::<TokensSettings>(format!("models[{n}].tokens")),
            kubernetes: None,
            disaggregation: None,
        }
    }

    pub(super) fn read(&mut self, mut table: Table, directory: &Path, problems: &mut Vec<LoadError>) {
        if table.contains_key("kubernetes") {
            let path = self.own.setting("kubernetes");
            self.kubernetes = Some(Section::of::<KubernetesSettings>(path));
        }
        if table.contains_key("disaggregation") {
            let path = self.own.setting("disaggregation");
            self.disaggregation = Some(Section::of::<DisaggregationSettings>(path));
        }
        let optional = self.kubernetes.iter_mut().chain(&mut self.disaggregation);
        for section in [&mut self.router, &mut self.tokens].into_iter().chain(optional) {
            let key = section.path.rsplit('.').next().unwrap_or_default();
            let Some(value) = table.remove(key) else { continue };
            match value {
                Value::Table(table) => section.read(table, directory, problems),
                value => problems.push(not_a(&section.path, &value, "a table")),
            }
        }
        locate_key_files(&mut table, directory);
        self.own.read(table, directory, problems);
    }

    /// Effective router settings: those of the model over those of all routers.
    pub(super) fn router_config(&self, all: &Section, name: &str) -> RouterConfig {
        let mut values = all.values.clone();
        if self.router.policy().is_some_and(|policy| policy != policy_in_force(all, None)) {
            values.retain(|name, _| !name.starts_with("policy.")); // they are another policy's
        }
        values.extend(self.router.values.clone());
        values.entry("pool").or_insert_with(|| Value::from(pool_name(name)));
        nested(values).try_into().expect("every value was parsed alone, and every field has a default")
    }

    pub(super) fn router_origin(&self, all: &Section, name: &'static str) -> Origin {
        match (self.router.origins.get(name), all.origins.get(name)) {
            (Some(origin), _) | (None, Some(origin)) => origin.clone(),
            (None, None) if name == "pool" => Origin::ModelName,
            (None, None) => Origin::Default,
        }
    }
}

/// Makes the paths of the workers' key files relative to the directory of the file, like all others.
fn locate_key_files(model: &mut Table, directory: &Path) {
    let workers = model.get_mut("workers").and_then(Value::as_array_mut).into_iter().flatten();
    for file in workers.filter_map(|worker| worker.get_mut("api_key_file")) {
        if let Value::String(path) = file {
            *path = directory.join(&*path).to_string_lossy().into_owned();
        }
    }
}

/// The name of the policy that a router section gives, else the one below it, else the default.
pub(super) fn policy_in_force<'a>(section: &'a Section, below: Option<&'a Section>) -> &'a str {
    let given = section.policy().or_else(|| below.and_then(Section::policy));
    given.unwrap_or_else(|| Policy::default().name())
}

/// Pool label of a model name.
fn pool_name(model: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "_.-".contains(c) { c } else { '_' };
    let name: String = model.chars().map(plain).collect();
    if name.is_empty() { RouterConfig::default().pool } else { name }
}

pub(super) fn not_a(setting: &str, value: &Value, rule: &str) -> LoadError {
    let (setting, value, rule) = (setting.to_owned(), value.to_string(), rule.to_owned());
    LoadError::Value { setting, value, rule, origin: Origin::File }
}

/// Parses workers like a worker file.
pub(super) fn read_workers(section: &Section, workers: Vec<Table>, problems: &mut Vec<LoadError>) -> Vec<NamedWorker> {
    let read = |workers: Vec<Table>| {
        let file = Table::from_iter([("workers".to_owned(), Value::from(workers))]);
        FileFormat::Toml.parse(file.to_string().as_bytes())
    };
    let mut refused = |setting: String, value: String, reason: String| {
        problems.push(LoadError::Structure { setting, value, reason, origin: Origin::File });
    };
    let mut is_refused = false;
    for (n, worker) in workers.iter().enumerate() {
        let Err(error) = read(vec![worker.clone()]) else { continue };
        is_refused = true;
        // Line and position would refer to a nonexistent file.
        let reason = match error {
            FileError::Line { line: _, reason } | FileError::Worker { position: _, url: _, rule: reason } => reason,
            FileError::Url { position: _, error } => error.to_string(),
            error @ (FileError::Format | FileError::TooLong(_) | FileError::NotText | FileError::Duplicate(_)) => {
                error.to_string()
            }
        };
        refused(section.setting(&format!("workers[{n}]")), Value::from(worker.clone()).to_string(), reason);
    }
    if is_refused {
        return Vec::new();
    }
    read(workers).unwrap_or_else(|error| {
        refused(section.setting("workers"), "a list".to_owned(), error.to_string());
        Vec::new()
    })
}
