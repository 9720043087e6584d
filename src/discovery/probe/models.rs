//! Parser of `/v1/models`, the page that every OpenAI-compatible engine has.

use std::collections::BTreeSet;

use serde::Deserialize;

#[derive(Deserialize)]
struct List {
    data: Vec<ServedModel>,
}

#[derive(Deserialize)]
struct ServedModel {
    id: String,
    /// The base model of an adapter.
    parent: Option<String>,
    max_model_len: Option<u32>,
}

/// Facts of the page.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct ModelList {
    pub(super) models: BTreeSet<String>,
    pub(super) lora_adapters: BTreeSet<String>,
    pub(super) max_model_len: Option<u32>,
}

impl ModelList {
    pub(super) fn read(body: &[u8]) -> Result<Self, String> {
        let List { data } = serde_json::from_slice(body).map_err(|error| error.to_string())?;
        let (adapters, models): (Vec<_>, Vec<_>) = data.into_iter().partition(|model| model.parent.is_some());
        let max_model_len = models.iter().filter_map(|model| model.max_model_len).filter(|len| *len > 0).max();
        let names = |models: Vec<ServedModel>| models.into_iter().map(|model| model.id).collect();
        Ok(Self { models: names(models), lora_adapters: names(adapters), max_model_len })
    }
}
