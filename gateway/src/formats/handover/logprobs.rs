//! Probabilities of the prompt's tokens, from the prefill leg to the response of the decode leg.
//!
//! A completion with `echo` and `logprobs` reports the prompt's tokens as well. With SGLang the decode engine has the
//! text of the prompt, but not the probabilities, which only the prefill engine computes (reference: SGLang,
//! `serving_completions.py`). Each choice of the prefill response has lists for the prompt and for the one token that a
//! prefill engine generates.

use super::object::{ObjectText, elements, with_changed_elements};
use crate::formats::events::each_data;

/// Lists of `logprobs`, one entry per token.
const LISTS: [&str; 4] = ["tokens", "token_logprobs", "top_logprobs", "text_offset"];

/// List whose first entry is null if it begins with the prompt: nothing precedes the first token.
const PROBABILITIES: &str = "token_logprobs";

/// Entries of the prompt's tokens, by choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptLogprobs(Vec<ChoiceLists>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct ChoiceLists {
    index: String,
    /// JSON of the entries, separated by commas, for each of [`LISTS`]. Empty without entries.
    entries: [String; LISTS.len()],
}

impl PromptLogprobs {
    /// Reads a prefill response, which is a JSON body or an event stream. Without probabilities the result is empty.
    ///
    /// ```
    /// use pointsman_gateway::formats::handover::PromptLogprobs;
    ///
    /// let body = r#"{"choices":[{"index":0,"logprobs":{"tokens":["a","b","c"],"token_logprobs":[null,-1,-2]}}]}"#;
    /// let prompt = PromptLogprobs::read(body);
    /// let decode = r#"{"choices":[{"index":0,"logprobs":{"tokens":["c"],"token_logprobs":[-2]}}]}"#;
    /// assert_eq!(prompt.merged(decode, &mut Vec::new()).as_deref(), Some(body));
    /// ```
    pub fn read(body: &str) -> Self {
        let mut read = Self::default();
        match body.trim_start().starts_with("data:") {
            true => each_data(body).for_each(|data| read.add(&data)),
            false => read.add(body),
        }
        read.0.iter_mut().for_each(ChoiceLists::drop_output);
        read.0.retain(|choice| choice.entries.iter().any(|entries| !entries.is_empty()));
        read
    }

    fn add(&mut self, json: &str) {
        for choice in choices(json).unwrap_or_default() {
            let Some((index, lists)) = lists(choice) else { continue };
            let at = self.0.iter().position(|known| known.index == index).unwrap_or_else(|| {
                self.0.push(ChoiceLists { index: index.to_owned(), entries: Default::default() });
                self.0.len() - 1
            });
            for (entries, more) in self.0[at].entries.iter_mut().zip(lists) {
                let more = more.map_or("", inner);
                *entries = joined(entries, more);
            }
        }
    }

    /// Whether there is nothing to merge.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A response or event of the decode leg with the entries of the prompt in front of its own; `None` if it does not
    /// change. Entries of the prompt that the decode engine has sent remain as they are.
    ///
    /// Of the events of a stream only the first with probabilities of a choice changes.
    /// `done` has the indices of choices with such an event.
    pub fn merged(&self, json: &str, done: &mut Vec<String>) -> Option<String> {
        let object = ObjectText::parse(json, &["choices"]).ok()?;
        let choices = with_changed_elements(object.json("choices")?, |choice| self.merged_choice(choice, done))?;
        Some(object.edit().set("choices", choices).finish())
    }

    fn merged_choice(&self, choice: &str, done: &mut Vec<String>) -> Option<String> {
        let (index, given) = lists(choice)?;
        if done.iter().any(|known| known == index) {
            return None;
        }
        done.push(index.to_owned());
        let prompt = self.0.iter().find(|known| known.index == index)?;
        let probabilities = LISTS.iter().zip(given).find(|(name, _)| **name == PROBABILITIES)?.1?;
        if elements(probabilities)?.first() == Some(&"null") {
            return None;
        }
        let object = ObjectText::parse(choice, &["logprobs"]).ok()?;
        let logprobs = ObjectText::parse(object.json("logprobs")?, &LISTS).ok()?;
        let mut edit = logprobs.edit();
        for ((name, entries), own) in LISTS.into_iter().zip(&prompt.entries).zip(given) {
            if let Some(own) = own.filter(|_| !entries.is_empty()) {
                edit = edit.set(name, format!("[{}]", joined(entries, inner(own))));
            }
        }
        Some(object.edit().set("logprobs", edit.finish()).finish())
    }
}

impl ChoiceLists {
    /// Removes the entry of the generated token, which the decode leg repeats.
    fn drop_output(&mut self) {
        for entries in &mut self.entries {
            let list = format!("[{entries}]");
            if let Some((_, prompt)) = elements(&list).as_deref().and_then(<[_]>::split_last) {
                *entries = prompt.join(",");
            }
        }
    }
}

fn choices(json: &str) -> Option<Vec<&str>> {
    elements(ObjectText::parse(json, &["choices"]).ok()?.json("choices")?)
}

/// Index and lists of a choice with `logprobs`.
fn lists(choice: &str) -> Option<(&str, [Option<&str>; LISTS.len()])> {
    let object = ObjectText::parse(choice, &["index", "logprobs"]).ok()?;
    let logprobs = ObjectText::parse(object.json("logprobs")?, &LISTS).ok()?;
    let list = |name| logprobs.json(name).filter(|list| list.starts_with('['));
    Some((object.json("index").unwrap_or("0"), LISTS.map(list)))
}

/// Text between the brackets of a list.
fn inner(list: &str) -> &str {
    list.strip_prefix('[').and_then(|list| list.strip_suffix(']')).unwrap_or_default().trim()
}

fn joined(first: &str, second: &str) -> String {
    match (first.is_empty(), second.is_empty()) {
        (false, false) => format!("{first},{second}"),
        _ => format!("{first}{second}"),
    }
}
