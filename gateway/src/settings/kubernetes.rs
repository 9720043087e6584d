//! Settings of workers that are pods of a Kubernetes cluster.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::rules::{NOT_BUILT, Rules, is_object_name};
use super::table::{Declared as _, settings};

/// Maximum number of target ports of an InferencePool.
const PORTS_MAX: usize = 8;

settings! {
    /// `[models.kubernetes]`: pods of one namespace as workers of a model.
    #[derive(Eq)]
    pub struct KubernetesSettings {
        /// Namespace of the pods. Default: that of the kubeconfig context or of the service account.
        namespace: Option<String>;
        /// Label selector of the pods, in the notation of `kubectl --selector`.
        selector: Option<String>;
        /// Ports for requests of the selected pods. Port `n` serves data-parallel rank `n`.
        ports: Vec<u16>;
        /// Name of an InferencePool (`inference.networking.k8s.io/v1`), which has selector and ports.
        inference_pool: Option<String>;
        /// Role of the pods by the label `llm-d.ai/role`. Default: pods of all roles.
        role: Option<PodRoleChoice>;
        /// Port of the KV event publisher of rank 0, for pods without annotation. Default: as probed.
        kv_events_port: Option<u32>, in 1..=65_535;
        /// Port of the KV event replay socket of rank 0, for pods without annotation.
        kv_replay_port: Option<u32>, in 1..=65_535;
        /// Kubeconfig file of the API server. Default: `KUBECONFIG`, `~/.kube/config`, then the service account of the pod.
        kubeconfig_file: Option<PathBuf>;
    }
}

/// Role of pods in disaggregated serving.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PodRoleChoice {
    /// Label `prefill` or `both`.
    Prefill,
    /// Another label than `prefill`, or none.
    Decode,
}

impl KubernetesSettings {
    pub(super) fn check(&self, rules: &mut Rules) {
        rules.check("", "present", cfg!(feature = "kubernetes"), NOT_BUILT);
        let has_one = self.selector.is_some() != self.inference_pool.is_some();
        rules.check("", self.selection(), has_one, "given either selector or inference_pool");
        for (name, value) in [("namespace", &self.namespace), ("inference_pool", &self.inference_pool)] {
            rules.given(name, value.as_ref(), is_object_name, "the name of a Kubernetes object");
        }
        let ports = self.ports.len();
        let (is_valid, rule) = match &self.selector {
            Some(_) => {
                ((1..=PORTS_MAX).contains(&ports) && self.has_distinct_ports(), "1 to 8 different ports with selector")
            }
            None => (ports == 0, "absent without selector: an InferencePool has its own ports"),
        };
        rules.check("ports", format!("{:?}", self.ports), is_valid, rule);
        self.check_ranges(rules);
        let has_events = self.kv_replay_port.is_none() || self.kv_events_port.is_some();
        let replay = self.kv_replay_port.unwrap_or_default();
        rules.check("kv_replay_port", replay, has_events, "absent without kv_events_port");
    }

    fn selection(&self) -> &'static str {
        match (&self.selector, &self.inference_pool) {
            (Some(_), Some(_)) => "with two selections",
            _ => "without a selection",
        }
    }

    fn has_distinct_ports(&self) -> bool {
        self.ports.iter().enumerate().all(|(n, port)| *port > 0 && !self.ports[..n].contains(port))
    }
}

#[cfg(test)]
mod tests {
    #[cfg(feature = "kubernetes")]
    use super::super::Settings;
    use super::super::{ConfigFile, Loaded, Sources};
    use super::*;

    fn load(kubernetes: &str) -> Result<Loaded, Vec<String>> {
        let text = format!("[[models]]\nname = \"m\"\n[models.kubernetes]\n{kubernetes}");
        let file = Some(ConfigFile { text, directory: "/etc".into() });
        let loaded = Sources { file, ..Sources::default() }.load();
        loaded.map_err(|errors| errors.0.iter().map(ToString::to_string).collect())
    }

    #[cfg(feature = "kubernetes")]
    fn settings_of(loaded: Loaded) -> KubernetesSettings {
        let Settings { models, .. } = loaded.settings;
        models.into_iter().next().and_then(|model| model.kubernetes).expect("the model has the table")
    }

    #[cfg(feature = "kubernetes")]
    #[test]
    fn printed_settings_load_again_to_the_same_values() {
        let text = "namespace = \"llm\"\nselector = \"app=e\"\nports = [8000, 8001]\nrole = \"decode\"\n\
                    kv_events_port = 5557\nkv_replay_port = 5657\nkubeconfig_file = \"kc.yaml\"\n";
        let loaded = load(text).expect("valid settings");
        let printed = loaded.to_string();
        let settings = settings_of(loaded);
        assert_eq!((settings.ports.as_slice(), settings.role), (&[8000, 8001][..], Some(PodRoleChoice::Decode)));
        assert_eq!(settings.kubeconfig_file, Some("/etc/kc.yaml".into()), "relative to the directory of the file");
        let file = Some(ConfigFile { text: printed, directory: "/".into() });
        let again = Sources { file, ..Sources::default() }.load().expect("printed settings are valid");
        assert_eq!(settings_of(again), settings);
    }

    #[cfg(feature = "kubernetes")]
    #[test]
    fn violated_rules_name_setting_and_value() {
        let cases = r#"
 => $ is without a selection, must be given either selector or inference_pool
selector = "a"; ports = [1]; inference_pool = "p" => $ is with two selections, must be given either selector or inference_pool
selector = "a" => $.ports is [], must be 1 to 8 different ports with selector
selector = "a"; ports = [1, 1] => $.ports is [1, 1], must be 1 to 8 different
selector = "a"; ports = [0] => $.ports is [0], must be 1 to 8 different
inference_pool = "p"; ports = [1] => $.ports is [1], must be absent without selector
inference_pool = "A/b" => $.inference_pool is "A/b", must be the name of a
inference_pool = "p"; kv_replay_port = 1 => $.kv_replay_port is 1, must be absent without kv_events_port
inference_pool = "p"; kv_events_port = 65536 => $.kv_events_port is 65536, must be 1 to 65535
"#;
        for line in cases.trim().lines() {
            let (text, expected) = line.split_once("=> ").expect("a problem");
            let expected = expected.replace('$', "models[0].kubernetes");
            let problems = load(&text.replace("; ", "\n")).expect_err(text);
            assert!(problems.len() == 1 && problems[0].starts_with(&expected), "{problems:?}\nmust be\n{expected}");
        }
    }

    #[cfg(not(feature = "kubernetes"))]
    #[test]
    fn a_build_without_the_feature_names_it() {
        let problems = load("inference_pool = \"p\"").expect_err("the feature is absent");
        let expected = "models[0].kubernetes is present, must be absent: this program was built without the feature \
                        kubernetes";
        assert!(problems[0].starts_with(expected), "{problems:?}");
    }

    #[cfg(feature = "kubernetes")]
    #[test]
    fn other_sources_are_not_required() {
        assert_eq!(settings_of(load("inference_pool = \"p\"").expect("valid")).inference_pool.as_deref(), Some("p"));
    }

    #[test]
    fn names_of_objects_are_dns_subdomains() {
        for (name, is_valid) in
            [("llm", true), ("a.b-1", true), ("", false), ("-a", false), ("A", false), ("a/b", false)]
        {
            assert_eq!(is_object_name(name), is_valid, "{name}");
        }
    }
}
