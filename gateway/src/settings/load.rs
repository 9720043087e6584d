//! Settings loader: file, overridden by the environment, overridden by flags.
//!
//! Loading is a pure function of its arguments. It tracks the origin of each value and reports all problems at a time;
//! printed settings load again to the same values. `main` reads file and environment; [`Settings::validate`] has the
//! rules.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use pointsman::RouterConfig;
use toml::{Table, Value};

use super::error::{LoadError, LoadErrors, nearest};
use super::fields::{Field, fields_of, router_fields};
use super::model_section::{ModelFields, ModelSections, not_a, policy_in_force, read_workers};
use super::section::{Origin, Section};
use super::{
    AdminSettings, GatewaySettings, LogFormat, ModelSettings, PickerSettings, ReplicasSettings, SettingError, Settings,
    TenantSettings, TokensSettings,
};

/// Top-level tables of the file.
const TABLES: [&str; 7] = ["gateway", "admin", "picker", "replicas", "router", "models", "tenants"];

/// Sections of flags. The last two are those of the model on the command line.
const FLAG_SECTIONS: [&str; 7] = ["gateway", "admin", "picker", "replicas", "router", "tokens", "model"];

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
    #[must_use]
    pub fn log_format(&self) -> LogFormat {
        let flag = self.flags.iter().rev().find(|flag| flag.setting == "gateway.log_format");
        let variable = || self.variables.iter().find(|(name, _)| name == "POINTSMAN_GATEWAY_LOG_FORMAT");
        let file = || {
            let table: Table = self.file.as_ref()?.text.parse().ok()?;
            Some(table.get("gateway")?.get("log_format")?.as_str()?.to_owned())
        };
        let given =
            flag.map(|flag| flag.value.clone()).or_else(|| variable().map(|(_, value)| value.clone())).or_else(file);
        if given.as_deref() == Some("json") { LogFormat::Json } else { LogFormat::Text }
    }

    /// Loads all sources.
    ///
    /// # Errors
    /// All problems of file, variables, flags and the resulting values.
    pub fn load(self) -> Result<Loaded, LoadErrors> {
        let mut loading = Loading::default();
        if let Some(file) = &self.file {
            loading.read_file(file);
        }
        // In the order of their names, so that the same problems are told in the same order.
        for (variable, value) in BTreeMap::from_iter(self.variables) {
            loading.read_variable(variable, &value, &self.directory);
        }
        if let Some((name, worker_urls)) = self.model {
            let n = loading.sections.models.len();
            let mut model = ModelSections::new(n);
            model.own.insert("name", Value::from(name), Origin::Flag("--model".to_owned()));
            model.own.insert("worker_urls", Value::from(worker_urls), Origin::Flag("--worker".to_owned()));
            loading.sections.models.push(model);
            loading.flag_model = Some(n);
        }
        for flag in self.flags {
            loading.read_flag(&flag, &self.directory);
        }
        loading.finish()
    }
}

/// Fields of a section that variables and flags can set; none for an unknown section.
fn simple_fields(section: &str) -> Vec<Field> {
    match section {
        "gateway" => fields_of::<GatewaySettings>(),
        "admin" => fields_of::<AdminSettings>(),
        "picker" => fields_of::<PickerSettings>(),
        "replicas" => fields_of::<ReplicasSettings>(),
        "router" => router_fields(),
        "tokens" => fields_of::<TokensSettings>(),
        "model" => {
            // The others have flags of their own.
            let is_settable = |field: &Field| !matches!(field.name, "name" | "worker_urls");
            fields_of::<ModelFields>().into_iter().filter(is_settable).collect()
        }
        _ => Vec::new(),
    }
}

/// Section and name of a setting on the command line: `model.tokens.source` is `tokens.source`.
fn section_and_name(setting: &str) -> (&str, &str) {
    let (section, name) = setting.split_once('.').unwrap_or((setting, ""));
    match (section, name.split_once('.')) {
        ("model" | "models", Some((section @ ("router" | "tokens"), name))) => (section, name),
        ("models", _) => ("model", name),
        _ => (section, name),
    }
}

/// The most similar setting: of this section, else of any.
fn nearest_setting(section: &str, name: &str) -> Option<String> {
    let fields = simple_fields(section);
    if let Some(near) = nearest(name, fields.iter().map(|field| field.name)) {
        return Some(format!("{section}.{near}"));
    }
    let name = if name.is_empty() { section } else { name };
    let all: Vec<_> = FLAG_SECTIONS.into_iter().map(|section| (section, simple_fields(section))).collect();
    let near = nearest(name, all.iter().flat_map(|(_, fields)| fields).map(|it| it.name))?;
    let (section, _) = all.iter().find(|(_, fields)| fields.iter().any(|field| field.name == near))?;
    Some(format!("{section}.{near}"))
}

#[derive(Clone, Debug)]
struct Sections {
    gateway: Section,
    /// Present once any setting of it is given.
    admin: Option<Section>,
    /// Present once any setting of it is given.
    picker: Option<Section>,
    replicas: Option<Section>,
    router: Section,
    models: Vec<ModelSections>,
    tenants: Vec<Section>,
}

impl Default for Sections {
    fn default() -> Self {
        Self {
            gateway: Section::of::<GatewaySettings>("gateway"),
            admin: None,
            picker: None,
            replicas: None,
            router: Section::of_router("router"),
            models: Vec::new(),
            tenants: Vec::new(),
        }
    }
}

impl Sections {
    /// A section that variables and flags can set.
    fn simple(&mut self, name: &str) -> Option<&mut Section> {
        match name {
            "gateway" => Some(&mut self.gateway),
            "admin" => Some(self.admin.get_or_insert_with(|| Section::of::<AdminSettings>("admin"))),
            "picker" => Some(self.picker.get_or_insert_with(|| Section::of::<PickerSettings>("picker"))),
            "replicas" => Some(self.replicas.get_or_insert_with(|| Section::of::<ReplicasSettings>("replicas"))),
            "router" => Some(&mut self.router),
            _ => None,
        }
    }

    fn all(&self) -> impl Iterator<Item = &Section> {
        let models = self.models.iter().flat_map(|model| {
            let ModelSections { own, router, tokens, kubernetes, disaggregation } = model;
            [own, router, tokens].into_iter().chain(kubernetes).chain(disaggregation)
        });
        [&self.gateway, &self.router]
            .into_iter()
            .chain(&self.admin)
            .chain(&self.picker)
            .chain(&self.replicas)
            .chain(models)
            .chain(&self.tenants)
    }

    /// Section and field of a setting such as `models[0].router.queue.classes[1].name`.
    fn find(&self, setting: &str) -> Option<(&Section, &'static str)> {
        self.all().find_map(|section| {
            let rest = setting.strip_prefix(&section.path)?.strip_prefix('.')?;
            let is_part = |tail: &str| tail.is_empty() || tail.starts_with(['[', '.']);
            let field = section.fields.iter().find(|field| rest.strip_prefix(field.name).is_some_and(is_part))?;
            Some((section, field.name))
        })
    }
}

/// Loader state.
#[derive(Default)]
struct Loading {
    sections: Sections,
    /// Whether the file or a list in it could not be read, so that missing settings are unknown.
    is_partial: bool,
    /// Position of the model on the command line.
    flag_model: Option<usize>,
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
                ("gateway" | "admin" | "picker" | "replicas" | "router", Value::Table(table)) => {
                    let section = self.sections.simple(&key).expect("section has a known name");
                    section.read(table, &file.directory, &mut self.problems);
                }
                (name, value) if TABLES.contains(&name) => {
                    let rule = if matches!(name, "models" | "tenants") { "a list of tables" } else { "a table" };
                    self.problems.push(not_a(name, &value, rule));
                    self.is_partial = true;
                }
                (name, _) => self.problems.push(LoadError::Unknown {
                    what: "key",
                    name: name.to_owned(),
                    rule: "gateway, admin, picker, replicas, router, models or tenants",
                    near: nearest(name, TABLES).map(str::to_owned),
                    origin: Origin::File,
                }),
            }
        }
    }

    fn read_list(&mut self, key: &str, elements: Vec<Value>, directory: &Path) {
        for (n, element) in elements.into_iter().enumerate() {
            let table = match element {
                Value::Table(table) => table,
                other => {
                    self.problems.push(not_a(&format!("{key}[{n}]"), &other, "a table"));
                    self.is_partial = true;
                    Table::new()
                }
            };
            if key == "models" {
                let mut model = ModelSections::new(n);
                model.read(table, directory, &mut self.problems);
                self.sections.models.push(model);
            } else {
                let mut tenant = Section::of::<TenantSettings>(format!("tenants[{n}]"));
                tenant.read(table, directory, &mut self.problems);
                self.sections.tenants.push(tenant);
            }
        }
    }

    fn read_variable(&mut self, variable: String, value: &str, directory: &Path) {
        let parts = [
            ("POINTSMAN_GATEWAY_", "gateway"),
            ("POINTSMAN_ADMIN_", "admin"),
            ("POINTSMAN_PICKER_", "picker"),
            ("POINTSMAN_REPLICAS_", "replicas"),
            ("POINTSMAN_ROUTER_", "router"),
        ];
        let part = parts.iter().find_map(|(prefix, section)| Some((*prefix, *section, variable.strip_prefix(prefix)?)));
        let Some((prefix, section, setting)) = part else { return };
        if is_of_a_service(setting) {
            return;
        }
        let fields = simple_fields(section);
        let Some(field) = fields.iter().find(|field| field.variable() == setting) else {
            let known: Vec<String> = fields.iter().map(Field::variable).collect();
            let near = nearest(setting, known.iter().map(String::as_str)).map(str::to_owned);
            let near = near.map(|near| format!("{prefix}{near}"));
            self.problems.push(LoadError::UnknownVariable { variable, near });
            return;
        };
        let section = self.sections.simple(section).expect("section has fields");
        section.read_text(*field, value, Origin::Environment(variable), directory, &mut self.problems);
    }

    fn read_flag(&mut self, flag: &Flag, directory: &Path) {
        let origin = Origin::Flag(flag.name.clone());
        let (section, name) = section_and_name(&flag.setting);
        let Some(field) = simple_fields(section).into_iter().find(|field| field.is_named(name)) else {
            self.problems.push(LoadError::Unknown {
                what: "setting",
                name: flag.setting.clone(),
                rule: "a setting of gateway, admin, picker, replicas, router, tokens or model, such as gateway.listen",
                near: nearest_setting(section, name),
                origin,
            });
            return;
        };
        let model = self.flag_model.and_then(|n| self.sections.models.get_mut(n));
        let section = match (section, model) {
            ("tokens", Some(model)) => &mut model.tokens,
            ("model", Some(model)) => &mut model.own,
            ("tokens" | "model", None) => {
                let table = if section == "tokens" { "[models.tokens]" } else { "[[models]]" };
                let rule = format!("given for a model: with --model and --worker, or in {table} of the file");
                let (setting, value) = (flag.setting.clone(), format!("{:?}", flag.value));
                self.problems.push(LoadError::Value { setting, value, rule, origin });
                return;
            }
            _ => self.sections.simple(section).expect("section has fields"),
        };
        section.read_text(field, &flag.value, origin, directory, &mut self.problems);
    }

    fn finish(mut self) -> Result<Loaded, LoadErrors> {
        let router = &mut self.sections.router;
        let policy = policy_in_force(router, None).to_owned();
        router.refuse_settings_of_others(&policy, &mut self.problems);
        for model in &mut self.sections.models {
            let policy = policy_in_force(&model.router, Some(router)).to_owned();
            model.router.refuse_settings_of_others(&policy, &mut self.problems);
        }
        let sections = &self.sections;
        let models = sections.models.iter().map(|model| {
            let fields: ModelFields = model.own.parsed();
            let ModelFields {
                name,
                aliases,
                upstream_name,
                workers,
                workers_file,
                worker_urls,
                worker_names,
                worker_api_key_file,
                messages,
            } = fields;
            let router = model.router_config(&sections.router, &name);
            let workers = read_workers(&model.own, workers, &mut self.problems);
            let tokens = model.tokens.parsed();
            ModelSettings {
                name,
                aliases,
                upstream_name,
                router,
                workers,
                workers_file,
                worker_urls,
                worker_names,
                worker_api_key_file,
                kubernetes: model.kubernetes.as_ref().map(Section::parsed),
                disaggregation: model.disaggregation.as_ref().map(Section::parsed),
                tokens,
                messages,
            }
        });
        let settings = Settings {
            models: models.collect(),
            gateway: sections.gateway.parsed(),
            admin: sections.admin.as_ref().map(Section::parsed),
            picker: sections.picker.as_ref().map(Section::parsed),
            replicas: sections.replicas.as_ref().map(Section::parsed),
            tenants: sections.tenants.iter().map(Section::parsed).collect(),
        };
        for (model, section) in settings.models.iter().zip(&mut self.sections.models) {
            let has_none = section.own.values.get("workers").and_then(Value::as_array).is_none_or(Vec::is_empty);
            if model.workers.is_empty() && !has_none {
                section.own.unread.push("workers");
            }
        }
        if !self.is_partial {
            self.check_rules(&settings);
        }
        let Self { sections, problems, .. } = self;
        if problems.is_empty() { Ok(Loaded { settings, sections }) } else { Err(LoadErrors(problems)) }
    }

    /// Adds violated rules whose settings are all known.
    fn check_rules(&mut self, settings: &Settings) {
        let mut broken = settings.validate().err().map_or(Vec::new(), |errors| errors.0);
        if settings.models.is_empty() {
            let router: RouterConfig = self.sections.router.parsed();
            let errors = router.validate().err().map_or(Vec::new(), |errors| errors.0);
            broken.extend(errors.into_iter().map(|error| SettingError {
                setting: format!("router.{}", error.field),
                value: error.value,
                rule: error.rule.to_owned(),
            }));
        }
        let unread: Vec<&'static str> = self.sections.all().flat_map(|section| section.unread.clone()).collect();
        let mut reported = BTreeSet::new();
        for SettingError { setting, value, rule } in broken {
            let setting = self.given_as(setting);
            let found = self.sections.find(&setting);
            // A rule on an unread setting may hold with its actual value.
            let is_unread = found.is_some_and(|(section, name)| section.unread.contains(&name));
            if is_unread || unread.iter().any(|unread| rule.contains(unread)) {
                continue;
            }
            let origin = found.map_or(Origin::Default, |(section, name)| section.origin(name));
            let origin = if origin == Origin::Default { self.derived_origin(&setting) } else { origin };
            if reported.insert((setting.clone(), rule.clone())) {
                self.problems.push(LoadError::Value { setting, value, rule, origin });
            }
        }
    }

    /// The place to change: most settings of a model's router come from the shared router section.
    fn given_as(&self, setting: String) -> String {
        let Some((section, name)) = self.sections.find(&setting) else { return setting };
        let is_inherited = !section.mentions(name) && (name != "pool" || self.sections.router.mentions(name));
        match setting.split_once(".router.") {
            Some((_, rest)) if is_inherited => format!("router.{rest}"),
            _ => setting,
        }
    }

    fn derived_origin(&self, setting: &str) -> Origin {
        if setting.ends_with(".router.pool") { Origin::ModelName } else { Origin::Default }
    }
}

impl fmt::Display for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { settings, sections } = self;
        writeln!(f, "[gateway]")?;
        sections.gateway.write_lines(f, &settings.gateway, |name| Some(sections.gateway.origin(name)))?;
        match (&settings.admin, &sections.admin) {
            (Some(admin), Some(section)) => {
                writeln!(f, "\n[admin]")?;
                section.write_lines(f, admin, |name| Some(section.origin(name)))?;
            }
            _ => writeln!(f, "\n# [admin] is not set: operators cannot connect")?,
        }
        match (&settings.picker, &sections.picker) {
            (Some(picker), Some(section)) => {
                writeln!(f, "\n[picker]")?;
                section.write_lines(f, picker, |name| Some(section.origin(name)))?;
            }
            _ => writeln!(f, "\n# [picker] is not set: there is no endpoint picker")?,
        }
        match (&settings.replicas, &sections.replicas) {
            (Some(replicas), Some(section)) => {
                writeln!(f, "\n[replicas]")?;
                section.write_lines(f, replicas, |name| Some(section.origin(name)))?;
            }
            _ => writeln!(f, "\n# [replicas] is not set: this gateway is the only one")?,
        }
        writeln!(f, "\n[router]")?;
        let router: RouterConfig = sections.router.parsed();
        // Each model has its own pool, unless one name was given to all.
        let is_shown = |name: &str| name != "pool" || sections.router.mentions(name);
        let of_all = |name| is_shown(name).then(|| sections.router.origin(name));
        sections.router.write_lines(f, &router, of_all)?;
        for (model, own) in settings.models.iter().zip(&sections.models) {
            writeln!(f, "\n[[models]]")?;
            let fields: ModelFields = own.own.parsed();
            own.own.write_lines(f, &fields, |name| Some(own.own.origin(name)))?;
            if let (Some(kubernetes), Some(section)) = (&model.kubernetes, &own.kubernetes) {
                writeln!(f, "\n[models.kubernetes]")?;
                section.write_lines(f, kubernetes, |name| Some(section.origin(name)))?;
            }
            if let (Some(disaggregation), Some(section)) = (&model.disaggregation, &own.disaggregation) {
                writeln!(f, "\n[models.disaggregation]")?;
                section.write_lines(f, disaggregation, |name| Some(section.origin(name)))?;
            }
            writeln!(f, "\n[models.router]                              # over [router]")?;
            let differs = |name: &'static str| own.router.mentions(name) || (name == "pool" && !is_shown(name));
            let of_model = |name| differs(name).then(|| own.router_origin(&sections.router, name));
            own.router.write_lines(f, &model.router, of_model)?;
            writeln!(f, "\n[models.tokens]")?;
            own.tokens.write_lines(f, &model.tokens, |name| Some(own.tokens.origin(name)))?;
        }
        for (tenant, section) in settings.tenants.iter().zip(&sections.tenants) {
            writeln!(f, "\n[[tenants]]")?;
            section.write_lines(f, tenant, |name| Some(section.origin(name)))?;
        }
        Ok(())
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
