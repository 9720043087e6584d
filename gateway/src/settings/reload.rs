//! Settings that a reload can change.
//!
//! Other settings keep their running value and are reported, so a new setting needs a restart until its declaration
//! has `=> reloaded`. The gateway applies the changes.

use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::Table;

use super::section::{flattened, nested};
use super::table::Declared;
use super::{GatewaySettings, ModelSettings, Settings};

impl Settings {
    /// New settings limited to the reloadable ones, and the names of settings that need a restart. Open connections keep
    /// `head_timeout_ms`, `idle_timeout_ms` and their certificate.
    pub fn reloaded_over(mut self, running: &Self) -> (Self, Vec<String>) {
        let mut restart = Vec::new();
        let reloaded = GatewaySettings::RELOADED;
        self.gateway = kept("gateway", &self.gateway, &running.gateway, reloaded, &mut restart);
        keep_table("admin", &mut self.admin, &running.admin, &mut restart);
        keep_table("picker", &mut self.picker, &running.picker, &mut restart);
        keep_table("replicas", &mut self.replicas, &running.replicas, &mut restart);
        for (n, model) in self.models.iter_mut().enumerate() {
            let running = running.models.iter().find(|running| running.name == model.name);
            if let Some(running) = running {
                model.keep(running, &format!("models[{n}]"), &mut restart);
            }
        }
        (self, restart)
    }
}

impl ModelSettings {
    /// Under a router only names and workers change.
    fn keep(&mut self, running: &Self, path: &str, restart: &mut Vec<String>) {
        if self.upstream_name() != running.upstream_name() {
            restart.push(format!("{path}.upstream_name"));
        }
        self.upstream_name.clone_from(&running.upstream_name);
        self.router = kept(&format!("{path}.router"), &self.router, &running.router, &[], restart);
        self.tokens = kept(&format!("{path}.tokens"), &self.tokens, &running.tokens, &[], restart);
        keep_table(&format!("{path}.disaggregation"), &mut self.disaggregation, &running.disaggregation, restart);
    }
}

/// Keeps a table that may be absent, and which appears and disappears only with a restart.
fn keep_table<T: Declared + Serialize + DeserializeOwned + Clone>(
    path: &str,
    new: &mut Option<T>,
    running: &Option<T>,
    restart: &mut Vec<String>,
) {
    match (&mut *new, running) {
        (Some(new), Some(running)) => *new = kept(path, new, running, T::RELOADED, restart),
        (None, None) => {}
        (new, running) => {
            new.clone_from(running);
            restart.push(path.to_owned());
        }
    }
}

/// `new` with the running value of each setting outside `reloaded`. Differences are added to `restart`.
fn kept<T: Serialize + DeserializeOwned + Clone>(
    path: &str,
    new: &T,
    running: &T,
    reloaded: &[&str],
    restart: &mut Vec<String>,
) -> T {
    let table = |value: &T| flattened(Table::try_from(value).expect("values parsed from TOML serialize to TOML"));
    let (new, running) = (table(new), table(running));
    let mut names: Vec<&String> = new.keys().chain(running.keys()).collect();
    names.sort_unstable();
    names.dedup();
    let mut result = Table::new();
    for name in names {
        let is_reloaded = reloaded.contains(&name.as_str());
        if !is_reloaded && new.get(name) != running.get(name) {
            restart.push(format!("{path}.{name}"));
        }
        // An absent value is unset.
        let value = if is_reloaded { new.get(name) } else { running.get(name) };
        result.extend(value.map(|value| (name.clone(), value.clone())));
    }
    nested(result).try_into().expect("all values belong to this struct")
}

#[cfg(test)]
mod tests {
    use super::super::AdminSettings;
    use super::*;

    #[test]
    fn settings_that_need_a_restart_keep_their_values_and_are_listed() {
        let mut running = Settings { models: vec![ModelSettings::named("m")], ..Settings::default() };
        running.gateway.worker_ca_file = Some("ca".into());
        let mut new =
            Settings { models: vec![ModelSettings::named("n"), ModelSettings::named("m")], ..running.clone() };
        new.gateway.listen = ([127, 0, 0, 1], 9).into();
        new.gateway.attempts_max = 7;
        new.gateway.worker_ca_file = None;
        new.admin = Some(AdminSettings::default());
        new.models[0].router.block_size = Some(16);
        new.models[1].router.block_size = Some(16);
        new.models[1].aliases = vec!["alias".to_owned()];
        new.models[1].tokens.threads = 9;
        let (settings, restart) = new.reloaded_over(&running);
        assert_eq!(restart, ["gateway.listen", "admin", "models[1].router.block_size", "models[1].tokens.threads"]);
        assert_eq!(settings.gateway.listen, running.gateway.listen);
        assert_eq!((settings.gateway.attempts_max, settings.gateway.worker_ca_file), (7, None));
        assert_eq!(settings.admin, None);
        assert_eq!(settings.models[0].router.block_size, Some(16), "a new model has its configured values");
        assert_eq!(settings.models[1].router, running.models[0].router);
        assert_eq!(settings.models[1].tokens, running.models[0].tokens);
        assert_eq!(settings.models[1].aliases, ["alias"]);
    }

    #[test]
    fn the_same_settings_need_no_restart() {
        let running = Settings { models: vec![ModelSettings::named("m")], ..Settings::default() };
        let (settings, restart) = running.clone().reloaded_over(&running);
        assert_eq!((settings.gateway, restart), (running.gateway, Vec::<String>::new()));
    }
}
