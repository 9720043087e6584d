//! Collects every broken rule of a configuration, and the errors that report them.

/// Largest weight, scale, credit, decay or temperature: costs stay finite under any load.
const WEIGHT_MAX: f64 = 1e9;

/// One field that breaks its rule: the field, its value and the rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}, must be {rule}")]
pub struct ConfigError {
    /// The field with its section, such as `queue.threshold`.
    pub field: String,
    /// Its value, as text.
    pub value: String,
    /// What it must be.
    pub rule: &'static str,
}

/// Every field of a refused configuration that breaks its rule, in the order of the fields.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
pub struct ConfigErrors(pub Vec<ConfigError>);

/// Broken rules found so far.
#[derive(Debug, Default)]
pub(crate) struct Problems(Vec<ConfigError>);

impl Problems {
    pub(crate) fn check(&mut self, field: impl Into<String>, value: impl ToString, holds: bool, rule: &'static str) {
        if !holds {
            self.0.push(ConfigError { field: field.into(), value: value.to_string(), rule });
        }
    }

    pub(crate) fn check_given<V: ToString>(
        &mut self,
        field: &'static str,
        value: Option<V>,
        holds: impl Fn(&V) -> bool,
        rule: &'static str,
    ) {
        if let Some(value) = value {
            let holds = holds(&value);
            self.check(field, value, holds, rule);
        }
    }

    /// A weight, scale, credit or temperature.
    pub(crate) fn weight(&mut self, field: &'static str, value: impl Into<Option<f64>>) {
        let holds = |value: &f64| (0.0..=WEIGHT_MAX).contains(value);
        self.check_given(field, value.into(), holds, "between 0 and 1e9");
    }

    /// A share of a whole.
    pub(crate) fn share(&mut self, field: &'static str, value: impl Into<Option<f64>>) {
        self.check_given(field, value.into(), |value| (0.0..=1.0).contains(value), "between 0 and 1");
    }

    /// A threshold as a share that may be above 1.
    pub(crate) fn threshold(&mut self, field: &'static str, value: Option<f64>) {
        self.check_given(field, value, |value| value.is_finite() && *value >= 0.0, "finite and not negative");
    }

    /// A count or a duration.
    pub(crate) fn positive(&mut self, field: &'static str, value: impl Into<u64>) {
        let value = value.into();
        self.check(field, value, value > 0, "at least 1");
    }

    /// A setting that has an effect only where `applies`: elsewhere it must be left at its default.
    pub(crate) fn unused<V: ToString + PartialEq>(
        &mut self,
        field: &'static str,
        value: V,
        default: V,
        applies: bool,
        rule: &'static str,
    ) {
        let holds = applies || value == default;
        self.check(field, value, holds, rule);
    }

    pub(crate) fn into_result(self) -> Result<(), ConfigErrors> {
        if self.0.is_empty() { Ok(()) } else { Err(ConfigErrors(self.0)) }
    }
}
