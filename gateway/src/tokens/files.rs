//! Discovery of chat templates and special tokens beside a `tokenizer.json`.
//!
//! Errors name the file. The tokenizer and [`template`](super::template) parse the contents.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use minijinja::Value;
use serde::Deserialize;

use super::template::TemplateSources;

/// Template variables that hold a token.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// One template, or several by name.
#[derive(Deserialize)]
#[serde(untagged)]
enum Stated {
    One(String),
    Named(Vec<Named>),
}

#[derive(Deserialize)]
struct Named {
    name: String,
    template: String,
}

/// Finds templates: `chat_template_file` if given, else the first of `chat_template.jinja` and `tokenizer_config.json`
/// beside the tokenizer that has one. Special tokens come from the file beside the tokenizer, or from the given
/// `tokenizer_config.json`.
pub(super) fn template_sources(
    tokenizer_file: &Path,
    chat_template_file: Option<&Path>,
) -> Result<TemplateSources, String> {
    let beside = |name: &str| tokenizer_file.with_file_name(name);
    let is_json = |path: &&Path| path.extension().is_some_and(|extension| extension == "json");
    let given_config = chat_template_file.filter(is_json);
    let config_path = given_config.map_or_else(|| beside("tokenizer_config.json"), Path::to_path_buf);
    let config = match given_config {
        Some(path) => Some(json(path, &read(path)?)?),
        None => optional(&config_path)?.map(|text| json(&config_path, &text)).transpose()?,
    };
    let mut sources = TemplateSources::default();
    let jinja = match chat_template_file {
        Some(path) if given_config.is_none() => Some(read(path)?),
        Some(_) => None,
        None => optional(&beside("chat_template.jinja"))?,
    };
    match jinja {
        Some(source) => sources.default = Some(source),
        None => {
            let stated =
                config.as_ref().and_then(|config| config.get("chat_template")).filter(|stated| !stated.is_null());
            stated.map(|stated| state(stated, &config_path, &mut sources)).transpose()?;
        }
    }
    if chat_template_file.is_some() && sources.default.is_none() && sources.tool_use.is_none() {
        return Err(unusable(&config_path, &"the file has no chat_template"));
    }
    let map_path = beside("special_tokens_map.json");
    let map = optional(&map_path)?.map(|text| json(&map_path, &text)).transpose()?;
    for name in SPECIAL_TOKENS {
        let token = [&config, &map].into_iter().flatten().find_map(|file| token_text(file.get(name)?));
        sources.special_tokens.extend(token.map(|token| (name.to_owned(), Value::from(token))));
    }
    Ok(sources)
}

/// Length and time of the last change of a file; `None` for a missing one.
pub(super) type Stamp = Option<(u64, SystemTime)>;

/// Stamps of all files that a tokenizer is read from.
pub(super) fn stamps(tokenizer_file: &Path, chat_template_file: Option<&Path>) -> Vec<Stamp> {
    let beside = ["chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"];
    let beside = beside.map(|name| tokenizer_file.with_file_name(name));
    let files = [Some(tokenizer_file), chat_template_file].into_iter().flatten().map(Path::to_owned).chain(beside);
    let stamp = |path: PathBuf| fs::metadata(path).and_then(|file| Ok((file.len(), file.modified()?))).ok();
    files.map(stamp).collect()
}

/// Text of a token: a string, or the content of an object.
fn token_text(token: &serde_json::Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

fn state(stated: &serde_json::Value, path: &Path, sources: &mut TemplateSources) -> Result<(), String> {
    let stated = Stated::deserialize(stated);
    match stated.map_err(|_| unusable(path, &"chat_template must be a string or a list"))? {
        Stated::One(source) => sources.default = Some(source),
        Stated::Named(all) => {
            for Named { name, template } in all {
                match name.as_str() {
                    "default" => sources.default = Some(template),
                    "tool_use" => sources.tool_use = Some(template),
                    // Templates for other purposes, which no request selects.
                    _ => {}
                }
            }
        }
    }
    Ok(())
}

fn json(path: &Path, text: &str) -> Result<serde_json::Value, String> {
    serde_json::from_str(text).map_err(|error| unusable(path, &error))
}

pub(super) fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| unreadable(path, &error))
}

/// `None` for a missing file.
fn optional(path: &PathBuf) -> Result<Option<String>, String> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unreadable(path, &error)),
    }
}

fn unreadable(path: &Path, error: &io::Error) -> String {
    format!("{} cannot be read: {error}", path.display())
}

/// The message about an invalid chat template.
pub(super) fn unusable(path: &Path, problem: &dyn fmt::Display) -> String {
    format!("{} cannot be used: {problem}", path.display())
}

/// The message about an invalid `tokenizer.json`.
pub(super) fn no_tokenizer(path: &Path, problem: &dyn fmt::Display) -> String {
    format!("{} is no tokenizer: {problem}", path.display())
}
