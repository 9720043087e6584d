//! Settings loader: file, overridden by the environment, overridden by flags.
//!
//! Loading is a pure function of its arguments. It tracks the origin of each value and reports all problems at a time;
//! printed settings load again to the same values. `main` reads file and environment; [`Settings::validate`] has the
//! rules.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use pointsman::RouterConfig;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use super::error::{LoadError, LoadErrors, nearest};
use super::fields::Field;
use super::section::{Origin, Schema, Section, not_a};
use super::{
    AdminSettings, GatewaySettings, LogFormat, ModelSettings, PickerSettings, ReplicasSettings, SettingError, Settings,
    TenantSettings,
};

/// The tables of the file that appear once.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Root {
    gateway: GatewaySettings,
    admin: Option<AdminSettings>,
    picker: Option<PickerSettings>,
    replicas: Option<ReplicasSettings>,
    router: RouterConfig,
}

static ROOT: LazyLock<Schema> = LazyLock::new(|| {
    Schema::of::<Root>(
        "gateway, admin, picker, replicas, router, models or tenants",
        &["gateway", "admin", "picker", "replicas", "router", "models", "tenants"],
        &[
            ("gateway.", "[gateway]", ""),
            ("admin.", "[admin]", "# [admin] is not set: operators cannot connect"),
            ("picker.", "[picker]", "# [picker] is not set: there is no endpoint picker"),
            ("replicas.", "[replicas]", "# [replicas] is not set: this gateway is the only one"),
            ("router.", "[router]", ""),
        ],
    )
});

static MODEL: LazyLock<Schema> = LazyLock::new(|| {
    Schema::of::<ModelSettings>(
        "the name of a setting",
        &["router", "tokens", "kubernetes", "disaggregation"],
        &[
            ("", "[[models]]", ""),
            ("kubernetes.", "[models.kubernetes]", ""),
            ("disaggregation.", "[models.disaggregation]", ""),
            ("router.", "[models.router]                              # over [router]", ""),
            ("tokens.", "[models.tokens]", ""),
        ],
    )
});

static TENANT: LazyLock<Schema> =
    LazyLock::new(|| Schema::of::<TenantSettings>("the name of a setting", &[], &[("", "[[tenants]]", "")]));

/// Settings with files that must exist at startup and are no secrets.
const FILES: [&str; 8] = [
    ".tls_certificate_file",
    ".tls_key_file",
    "_ca_file",
    ".worker_certificate_file",
    ".worker_key_file",
    ".kubeconfig_file",
    ".tokenizer_file",
    ".chat_template_file",
];

/// Sources of settings.
///
/// ```
/// use pointsman_gateway::settings::{ConfigFile, Sources};
///
/// let text = "[[models]]\nname = \"llama\"\nworker_urls = [\"http://10.0.0.7:8000\"]\n".to_owned();
/// let file = ConfigFile { text, directory: "/etc/pointsman".into() };
/// let variables = vec![("POINTSMAN_ROUTER_BLOCK_SIZE".to_owned(), "16".to_owned())];
/// let loaded = Sources { file: Some(file), variables, ..Sources::default() }.load()?;
/// assert_eq!(loaded.settings.models[0].router.block_size, Some(16));
/// # Ok::<(), pointsman_gateway::settings::LoadErrors>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// TOML file.
    pub file: Option<ConfigFile>,
    /// Environment; unrelated variables are ignored.
    pub variables: Vec<(String, String)>,
    /// Flags for single settings; the last flag of a setting applies.
    pub flags: Vec<Flag>,
    /// A model given by flags: its name and worker addresses.
    pub model: Option<(String, Vec<String>)>,
    /// Base directory of paths in variables and flags.
    pub directory: PathBuf,
}

/// File content and the base directory of its paths.
#[derive(Clone, Debug)]
pub struct ConfigFile {
    /// TOML text.
    pub text: String,
    /// Directory of the file.
    pub directory: PathBuf,
}

/// A setting on the command line.
#[derive(Clone, Debug)]
pub struct Flag {
    /// Flag name for problems: `--listen`.
    pub name: String,
    /// Setting with its section: `gateway.listen`.
    pub setting: String,
    /// Value in the form of a variable.
    pub value: String,
}

/// Valid settings with their origins. Displayed as TOML, one setting per line.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The settings.
    pub settings: Settings,
    sections: Sections,
}

impl Sources {
    /// Log format, even if other settings are invalid, because problems are reported in it. Text if the setting itself
    /// is invalid.
    pub fn log_format(&self) -> LogFormat {
        let loading = self.clone().read();
        if loading.sections.root.text("gateway.log_format") == Some("json") { LogFormat::Json } else { LogFormat::Text }
    }

    /// Loads all sources.
    ///
    /// # Errors
    /// All problems of file, variables, flags and the resulting values.
    pub fn load(self) -> Result<Loaded, LoadErrors> {
        self.read().finish()
    }

    fn read(self) -> Loading {
        let mut loading = Loading::default();
        if let Some(file) = &self.file {
            loading.read_file(file);
        }
        // In the order of their names, so that the same problems are told in the same order.
        for (variable, value) in BTreeMap::from_iter(self.variables) {
            loading.read_variable(variable, &value, &self.directory);
        }
        let has_model = self.model.is_some();
        if let Some((name, worker_urls)) = self.model {
            let mut model = loading.sections.new_model();
            for (setting, value, flag) in
                [("name", Value::from(name), "--model"), ("worker_urls", Value::from(worker_urls), "--worker")]
            {
                let field = MODEL.field(setting).expect("a setting of models");
                model.give(field, Some(value), Origin::Flag(flag.to_owned()), &self.directory);
            }
            loading.sections.models.push(model);
        }
        for flag in self.flags {
            loading.read_flag(&flag, has_model, &self.directory);
        }
        loading
    }
}

/// A setting on the command line by its section and name: `models.tokens.source` is `tokens.source`.
fn canonical(setting: &str) -> String {
    match setting.strip_prefix("models.").or_else(|| setting.strip_prefix("model.")) {
        Some(name) if name.starts_with("router.") || name.starts_with("tokens.") => name.to_owned(),
        Some(name) => format!("model.{name}"),
        None => setting.to_owned(),
    }
}

/// The settings that flags can set, with their names.
fn flag_fields() -> impl Iterator<Item = (String, Field)> {
    // Name and addresses have flags of their own.
    let of_model = MODEL.fields.iter().filter_map(|field| match field.name {
        "name" | "worker_urls" => None,
        name if name.starts_with("tokens.") => Some((name.to_owned(), *field)),
        name => (!name.contains('.')).then(|| (format!("model.{name}"), *field)),
    });
    ROOT.fields.iter().map(|field| (field.name.to_owned(), *field)).chain(of_model)
}

/// The most similar setting: of this section, else of any.
fn nearest_setting(setting: &str) -> Option<String> {
    let (section, name) = setting.split_once('.').unwrap_or((setting, setting));
    let all: Vec<String> = flag_fields().map(|(name, _)| name).collect();
    let parts = || all.iter().filter_map(|known| known.split_once('.'));
    let near = nearest(name, parts().filter(|(of, _)| *of == section).map(|(_, known)| known));
    let near = near.map(|near| (section, near)).or_else(|| {
        let near = nearest(name, parts().map(|(_, known)| known))?;
        parts().find(|(_, known)| *known == near)
    });
    near.map(|(section, near)| format!("{section}.{near}"))
}

#[derive(Clone, Debug)]
struct Sections {
    root: Section,
    models: Vec<Section>,
    tenants: Vec<Section>,
}

impl Default for Sections {
    fn default() -> Self {
        Self { root: Section::new("", &ROOT), models: Vec::new(), tenants: Vec::new() }
    }
}

impl Sections {
    fn new_model(&self) -> Section {
        Section::new(format!("models[{}].", self.models.len()), &MODEL)
    }

    fn all(&self) -> impl Iterator<Item = &Section> {
        [&self.root].into_iter().chain(&self.models).chain(&self.tenants)
    }

    /// Section and field of a setting such as `models[0].router.queue.classes[1].name`: the place to change, as most
    /// settings of a model's router come from the shared router section.
    fn find<'a>(&'a self, setting: &'a str) -> Option<(&'a Section, &'static str, &'a str)> {
        self.all().find_map(|section| {
            let rest = setting.strip_prefix(&section.path)?;
            let tail_of = |field: &Field| rest.strip_prefix(field.name);
            let is_part = |tail: &str| tail.is_empty() || tail.starts_with(['[', '.']);
            let field = section.schema.fields.iter().find(|field| tail_of(field).is_some_and(is_part))?;
            let is_inherited = field.name.starts_with("router.") && !section.mentions(field.name);
            Some((if is_inherited { &self.root } else { section }, field.name, &rest[field.name.len()..]))
        })
    }
}

/// Loader state.
#[derive(Default)]
struct Loading {
    sections: Sections,
    /// Whether the file or a list in it could not be read, so that missing settings are unknown.
    is_partial: bool,
    problems: Vec<LoadError>,
}

impl Loading {
    fn read_file(&mut self, file: &ConfigFile) {
        let tables: Table = match file.text.parse() {
            Ok(tables) => tables,
            Err(error) => {
                let error: toml::de::Error = error;
                self.problems.push(LoadError::Syntax(error.to_string().trim_end().to_owned()));
                self.is_partial = true;
                return;
            }
        };
        for (key, value) in tables {
            match (key.as_str(), value) {
                ("models" | "tenants", Value::Array(elements)) => self.read_list(&key, elements, &file.directory),
                ("models" | "tenants", value) => self.refuse(key, &value, "a list of tables"),
                (_, value) => {
                    self.is_partial |= ROOT.tables.contains(&key.as_str()) && !value.is_table();
                    let table = Table::from_iter([(key, value)]);
                    self.sections.root.read("", table, &file.directory, &mut self.problems);
                }
            }
        }
    }

    fn read_list(&mut self, key: &str, elements: Vec<Value>, directory: &Path) {
        for (n, element) in elements.into_iter().enumerate() {
            let table = match element {
                Value::Table(table) => table,
                other => {
                    self.refuse(format!("{key}[{n}]"), &other, "a table");
                    Table::new()
                }
            };
            let schema = if key == "models" { &MODEL } else { &TENANT };
            let mut section = Section::new(format!("{key}[{n}]."), schema);
            section.read("", table, directory, &mut self.problems);
            let Sections { models, tenants, .. } = &mut self.sections;
            let list = if key == "models" { models } else { tenants };
            list.push(section);
        }
    }

    /// Refuses a part of the file that may have any setting.
    fn refuse(&mut self, setting: String, value: &Value, rule: &str) {
        self.problems.push(not_a(setting, value, rule));
        self.is_partial = true;
    }

    fn read_variable(&mut self, variable: String, value: &str, directory: &Path) {
        let Some(name) = variable.strip_prefix("POINTSMAN_") else { return };
        if let Some(field) = ROOT.fields.iter().find(|field| field.variable() == name) {
            let origin = Origin::Environment(variable);
            return self.sections.root.read_text(*field, value, origin, directory, &mut self.problems);
        }
        // Variables without the name of a table belong to others.
        for table in ROOT.tables.iter().map(|table| format!("{}_", table.to_ascii_uppercase())) {
            let Some(setting) = name.strip_prefix(&table).filter(|setting| !is_of_a_service(setting)) else { continue };
            let known: Vec<String> = ROOT.fields.iter().map(Field::variable).collect();
            let known: Vec<&str> = known.iter().filter_map(|known| known.strip_prefix(&table)).collect();
            let near = nearest(setting, known.iter().copied()).map(|near| format!("POINTSMAN_{table}{near}"));
            if !known.is_empty() {
                return self.problems.push(LoadError::UnknownVariable { variable, near });
            }
        }
    }

    fn read_flag(&mut self, flag: &Flag, has_model: bool, directory: &Path) {
        let origin = Origin::Flag(flag.name.clone());
        let setting = canonical(&flag.setting);
        let is_meant = |name: &str| name == setting || name.strip_suffix(".name") == Some(&setting);
        let Some((_, field)) = flag_fields().find(|(name, _)| is_meant(name)) else {
            self.problems.push(LoadError::Unknown {
                what: "setting",
                name: flag.setting.clone(),
                rule: "a setting of gateway, admin, picker, replicas, router, tokens or model, such as gateway.listen",
                near: nearest_setting(&setting),
                origin,
            });
            return;
        };
        let table = match setting.split_once('.') {
            Some(("tokens", _)) => "[models.tokens]",
            Some(("model", _)) => "[[models]]",
            _ => return self.sections.root.read_text(field, &flag.value, origin, directory, &mut self.problems),
        };
        if let Some(model) = self.sections.models.last_mut().filter(|_| has_model) {
            return model.read_text(field, &flag.value, origin, directory, &mut self.problems);
        }
        let rule = format!("given for a model: with --model and --worker, or in {table} of the file");
        let (setting, value) = (flag.setting.clone(), format!("{:?}", flag.value));
        self.problems.push(LoadError::Value { setting, value, rule, origin });
    }

    fn finish(mut self) -> Result<Loaded, LoadErrors> {
        let Sections { root, models, tenants } = &mut self.sections;
        let policy = root.policy(None).to_owned();
        root.refuse_settings_of_others(&policy, &mut self.problems);
        for model in models.iter_mut() {
            let policy = model.policy(Some(root)).to_owned();
            model.refuse_settings_of_others(&policy, &mut self.problems);
            let pool = pool_name(model.text("name").unwrap_or_default());
            model.inherit(root, &pool);
        }
        let Root { gateway, admin, picker, replicas, router } = root.parsed();
        let models = models.iter().map(Section::parsed).collect();
        let tenants = tenants.iter().map(Section::parsed).collect();
        let settings = Settings { gateway, admin, picker, replicas, models, tenants };
        if !self.is_partial {
            self.check_rules(&settings, &router);
        }
        let Self { sections, problems, .. } = self;
        if problems.is_empty() { Ok(Loaded { settings, sections }) } else { Err(LoadErrors(problems)) }
    }

    /// Adds violated rules whose settings are all known.
    fn check_rules(&mut self, settings: &Settings, router: &RouterConfig) {
        let mut broken = settings.validate().err().map_or(Vec::new(), |errors| errors.0);
        if settings.models.is_empty() {
            let errors = router.validate().err().map_or(Vec::new(), |errors| errors.0);
            broken.extend(errors.into_iter().map(|error| SettingError {
                setting: format!("router.{}", error.field),
                value: error.value,
                rule: error.rule.to_owned(),
            }));
        }
        let unread: Vec<&'static str> = self.sections.all().flat_map(Section::unread).collect();
        let mut reported = BTreeSet::new();
        for SettingError { setting, value, rule } in broken {
            let found = self.sections.find(&setting);
            // A rule on an unread setting may hold with its actual value.
            let is_unread = found.is_some_and(|(section, name, _)| section.is_unread(name));
            if is_unread || unread.iter().any(|unread| rule.contains(unread)) {
                continue;
            }
            let origin = found.map_or(Origin::Default, |(section, name, _)| section.origin(name));
            let given = |(section, name, tail): (&Section, &str, &str)| format!("{}{name}{tail}", section.path);
            let setting = found.map_or_else(|| setting.clone(), given);
            if reported.insert((setting.clone(), rule.clone())) {
                self.problems.push(LoadError::Value { setting, value, rule, origin });
            }
        }
    }
}

impl Loaded {
    /// Files that must exist at startup, with their settings; excludes secrets.
    pub fn files(&self) -> impl Iterator<Item = (String, &Path)> {
        let texts = self.sections.all().flat_map(Section::texts);
        let files = texts.filter(|(setting, _)| FILES.iter().any(|file| setting.ends_with(file)));
        files.map(|(setting, file)| (setting, Path::new(file)))
    }
}

/// Pool label of a model name.
fn pool_name(model: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "_.-".contains(c) { c } else { '_' };
    let name: String = model.chars().map(plain).collect();
    if name.is_empty() { RouterConfig::default().pool } else { name }
}

impl fmt::Display for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { settings, sections } = self;
        sections.root.write(f, &sections.root.parsed::<Root>())?;
        settings.models.iter().zip(&sections.models).try_for_each(|(model, section)| section.write(f, model))?;
        settings.tenants.iter().zip(&sections.tenants).try_for_each(|(tenant, section)| section.write(f, tenant))
    }
}

/// Whether Kubernetes injects the variable for a service named `pointsman-gateway` (host, ports). No setting has such a
/// name.
fn is_of_a_service(setting: &str) -> bool {
    let is_numbered = |rest: &str| rest.starts_with(|first: char| first.is_ascii_digit());
    setting == "PORT"
        || setting.strip_prefix("PORT_").is_some_and(is_numbered)
        || setting.starts_with("SERVICE_HOST")
        || setting.starts_with("SERVICE_PORT")
}
