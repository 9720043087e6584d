//! Text form of generator settings: `rate=4,reply_tokens=32-768`.
//!
//! The name of a setting is the name of its field. Written settings parse to the same values.

use std::ops::RangeInclusive;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Number, Value};

use crate::workload::{LENGTH_MAX, REQUESTS_MAX, Rng, WorkloadError};

/// Defines the settings of a generator with their defaults.
macro_rules! settings {
    ($(#[$meta:meta])* pub struct $name:ident {
        $($(#[$field_meta:meta])* pub $field:ident: $type:ty = $default:expr,)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, ::serde::Serialize, ::serde::Deserialize)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    };
}
pub(super) use settings;

/// Inclusive range of a uniform distribution. The text form is `32-768`, or `32` for a single number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "String")]
pub struct Span {
    min: u32,
    max: u32,
}

impl Span {
    /// Minimum.
    #[must_use]
    pub fn min(self) -> u32 {
        self.min
    }

    /// Maximum.
    #[must_use]
    pub fn max(self) -> u32 {
        self.max
    }

    /// Mean of the distribution.
    #[must_use]
    pub fn mean(self) -> f64 {
        (f64::from(self.min) + f64::from(self.max)) / 2.0
    }

    /// Draws a number.
    pub fn draw(self, rng: &mut Rng) -> u32 {
        rng.within(self.min..=self.max)
    }
}

impl From<RangeInclusive<u32>> for Span {
    /// # Panics
    /// The range is empty.
    fn from(range: RangeInclusive<u32>) -> Self {
        assert!(!range.is_empty(), "the range from {} to {} is empty", range.start(), range.end());
        Self { min: *range.start(), max: *range.end() }
    }
}

impl From<u32> for Span {
    fn from(number: u32) -> Self {
        Self { min: number, max: number }
    }
}

impl From<Span> for String {
    fn from(Span { min, max }: Span) -> Self {
        if min == max { min.to_string() } else { format!("{min}-{max}") }
    }
}

impl TryFrom<Value> for Span {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let (min, max) = text.split_once('-').unwrap_or((&text, &text));
        let (Ok(min), Ok(max)) = (min.parse::<u32>(), max.parse::<u32>()) else {
            return Err("must be a whole number or a range such as 32-768".to_owned());
        };
        if min > max { Err("the minimum exceeds the maximum".to_owned()) } else { Ok(Self { min, max }) }
    }
}

/// Result of validating the settings of a generator.
pub(super) type Checked = Result<(), String>;

/// Parses the settings in `given` and takes all others from `default`.
pub(super) fn read<T: Serialize + DeserializeOwned>(
    default: &T,
    workload: &str,
    given: &str,
    check: impl Fn(&T) -> Checked,
) -> Result<T, WorkloadError> {
    let mut known = fields(default);
    for setting in given.split(',').map(str::trim).filter(|setting| !setting.is_empty()) {
        let Some((name, value)) = setting.split_once('=') else {
            return Err(WorkloadError(format!("{workload}: {setting:?} is not of the form setting=value")));
        };
        let (name, value) = (name.trim(), value.trim());
        let Some(field) = known.get_mut(name) else {
            let known = known.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            return Err(WorkloadError(format!("{workload} has no setting {name:?}; known are {known}")));
        };
        *field = number(value).unwrap_or_else(|| Value::String(value.to_owned()));
        // Parsed one by one, so that an error names its setting.
        serde_json::from_value::<T>(Value::Object(known.clone()))
            .map_err(|reason| WorkloadError(format!("{workload}: {name} is {value:?}: {reason}")))?;
    }
    let read: T = serde_json::from_value(Value::Object(known)).expect("every setting was read alone");
    check(&read).map_err(|rule| WorkloadError(format!("{workload}: {rule}")))?;
    Ok(read)
}

/// Parses a number exactly, which JSON's own parser does not guarantee.
fn number(text: &str) -> Option<Value> {
    let fraction = || text.parse().ok().and_then(Number::from_f64);
    text.parse::<u64>().map(Number::from).ok().or_else(fraction).map(Value::Number)
}

/// Writes settings in the form that [`read`] parses.
pub(super) fn write(settings: &Map<String, Value>) -> String {
    let setting = |(name, value): (&String, &Value)| match value {
        Value::String(text) => format!("{name}={text}"),
        other => format!("{name}={other}"),
    };
    settings.iter().map(setting).collect::<Vec<_>>().join(",")
}

/// Settings of a generator by name.
pub(super) fn fields<T: Serialize>(settings: &T) -> Map<String, Value> {
    match serde_json::to_value(settings) {
        Ok(Value::Object(fields)) => fields,
        other => unreachable!("settings are structs of numbers and ranges, not {other:?}"),
    }
}

/// Rejects invalid settings that were constructed in code.
#[track_caller]
pub(super) fn assert_checked(checked: Checked) {
    if let Err(rule) = checked {
        panic!("{rule}");
    }
}

/// Checks a rate in requests per second. The upper bound is the resolution of a µs clock.
pub(super) fn check_rate(rate: f64) -> Checked {
    if rate.is_finite() && (1e-6..=1e6).contains(&rate) {
        return Ok(());
    }
    Err(format!("rate is {rate}, must be 0.000001 to 1000000 requests per second"))
}

/// Checks the number of requests, given as a product of counts.
pub(super) fn check_requests(names: &str, counts: &[u32]) -> Checked {
    let requests = counts.iter().fold(1_u64, |product, &count| product.saturating_mul(u64::from(count)));
    if (1..=REQUESTS_MAX as u64).contains(&requests) {
        return Ok(());
    }
    Err(format!("{names} give {requests} requests, must be 1 to {REQUESTS_MAX}"))
}

/// Checks the size of a set that every request draws from.
pub(super) fn check_count(name: &str, count: u32) -> Checked {
    const MAX: u32 = 1_000_000;
    if (1..=MAX).contains(&count) { Ok(()) } else { Err(format!("{name} is {count}, must be 1 to {MAX}")) }
}

/// Checks the skew of a popularity distribution.
pub(super) fn check_skew(skew: u32) -> Checked {
    if skew <= 2 { Ok(()) } else { Err(format!("skew is {skew}, must be 0 to 2")) }
}

/// Checks that each length in tokens is at least `min`, and that their sum is within the maximum prompt length.
pub(super) fn check_lengths(lengths: &[(&str, Span, u32)], min: u32) -> Checked {
    for &(name, span, _) in lengths {
        if span.min < min {
            return Err(format!("{name} is {}, must be at least {min}", span.min));
        }
    }
    let longest = |&(_, span, times): &(&str, Span, u32)| u64::from(span.max).saturating_mul(u64::from(times));
    let all = lengths.iter().fold(0_u64, |sum, length| sum.saturating_add(longest(length)));
    if all > u64::from(LENGTH_MAX) {
        let names: Vec<_> = lengths.iter().map(|(name, ..)| *name).collect();
        return Err(format!("{} give prompts of up to {all} tokens, must be at most {LENGTH_MAX}", names.join(", ")));
    }
    Ok(())
}
