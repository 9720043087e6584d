//! Selectors of the API server: labels in the notation of `kubectl --selector`, names, and the namespace.

use serde_json::Value;

/// Requirements of one list or watch.
#[derive(Clone)]
pub(super) struct Selector {
    requirements: Vec<Requirement>,
    /// Name by a field selector.
    field_name: Option<String>,
    /// Name in the path.
    name: Option<String>,
    namespace: String,
}

#[derive(Clone, Debug, PartialEq)]
struct Requirement {
    label: String,
    /// Allowed values, or forbidden ones.
    values: Vec<String>,
    is_forbidden: bool,
}

impl Selector {
    pub(super) fn parse(labels: &str, fields: &str, name: Option<String>, namespace: String) -> Self {
        let field_name = fields.strip_prefix("metadata.name=").map(str::to_owned);
        assert!(field_name.is_some() != fields.is_empty(), "unknown field selector {fields:?}");
        let requirements = parts(labels).into_iter().map(Requirement::parse).collect();
        Self { requirements, field_name, name, namespace }
    }

    /// Whether the path names an object.
    pub(super) fn names_one(&self) -> bool {
        self.name.is_some()
    }

    pub(super) fn selects(&self, object: &Value) -> bool {
        let metadata = &object["metadata"];
        let is_named = |name: &Option<String>| name.as_ref().is_none_or(|name| metadata["name"] == **name);
        let is_here = metadata["namespace"] == *self.namespace && is_named(&self.name) && is_named(&self.field_name);
        is_here && self.requirements.iter().all(|requirement| requirement.holds(&metadata["labels"]))
    }
}

impl Requirement {
    fn parse(text: &str) -> Self {
        let set = |operator: &str| {
            let (label, values) = text.split_once(operator)?;
            let values = values.trim().strip_prefix('(')?.strip_suffix(')')?;
            Some((label.trim().to_owned(), values.split(',').map(|value| value.trim().to_owned()).collect()))
        };
        if let Some((label, values)) = set(" notin ") {
            return Self { label, values, is_forbidden: true };
        }
        if let Some((label, values)) = set(" in ") {
            return Self { label, values, is_forbidden: false };
        }
        let (label, value) = text.split_once('=').unwrap_or_else(|| panic!("unknown requirement {text:?}"));
        Self { label: label.to_owned(), values: vec![value.to_owned()], is_forbidden: false }
    }

    fn holds(&self, labels: &Value) -> bool {
        let value = labels[&self.label].as_str();
        value.is_some_and(|value| self.values.iter().any(|known| known == value)) != self.is_forbidden
    }
}

/// The requirements, separated by commas outside parentheses.
fn parts(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0_u32, 0, Vec::new());
    for (at, character) in text.char_indices() {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts.retain(|part| !part.is_empty());
    parts
}
