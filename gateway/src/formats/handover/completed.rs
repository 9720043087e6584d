//! Client response of a request that the prefill leg has completed.

use super::object::{ObjectText, with_changed_elements};
use crate::formats::openai::Endpoint;

/// The response without the fields for a decode leg.
pub(super) fn response(text: &str) -> String {
    let Ok(object) = ObjectText::parse(text, &["choices", "prompt_token_ids"]) else { return text.to_owned() };
    let edit = object.edit().remove("prompt_token_ids");
    match object.json("choices").and_then(|choices| with_changed_elements(choices, without_parameters)) {
        Some(choices) => edit.set("choices", choices).finish(),
        None => edit.finish(),
    }
}

/// The response as an event stream.
pub(super) fn stream(text: &str, endpoint: Endpoint, include_usage: bool) -> String {
    let done = "data: [DONE]\n\n";
    let Ok(object) = ObjectText::parse(text, &["object", "choices", "prompt_token_ids", "usage"]) else {
        return done.to_owned();
    };
    let chunk = |choices: String| {
        let edit = object.edit().remove("prompt_token_ids").set("choices", choices);
        match endpoint {
            Endpoint::Chat => edit.set("object", r#""chat.completion.chunk""#),
            _ => edit,
        }
    };
    let change: fn(&str) -> Option<String> =
        if endpoint == Endpoint::Chat { chat_chunk_choice } else { without_parameters };
    let choices = object.json("choices").filter(|choices| choices.starts_with('[')).unwrap_or("[]");
    let first = chunk(with_changed_elements(choices, change).unwrap_or_else(|| choices.to_owned()));
    let Some(_) = object.json("usage").filter(|_| include_usage) else {
        return format!("{}{done}", event(&first.remove("usage").finish()));
    };
    let usage = chunk("[]".to_owned()).finish();
    format!("{}{}{done}", event(&first.set("usage", "null").finish()), event(&usage))
}

/// An event of one line. Line breaks between JSON tokens have no meaning.
fn event(json: &str) -> String {
    format!("data: {}\n\n", json.replace(['\n', '\r'], " "))
}

fn without_parameters(choice: &str) -> Option<String> {
    let choice = ObjectText::parse(choice, &["disaggregated_params"]).ok()?;
    Some(choice.edit().remove("disaggregated_params").finish())
}

/// A choice with `delta` in place of `message`.
fn chat_chunk_choice(choice: &str) -> Option<String> {
    let choice = ObjectText::parse(choice, &["disaggregated_params", "message"]).ok()?;
    let delta = choice.json("message").map(|message| delta(message).unwrap_or_else(|| message.to_owned()));
    let edit = choice.edit().remove("disaggregated_params").remove("message");
    Some(match delta {
        Some(delta) => edit.set("delta", delta).finish(),
        None => edit.finish(),
    })
}

/// A message whose tool calls have an index, which chunks require.
fn delta(message: &str) -> Option<String> {
    let message = ObjectText::parse(message, &["tool_calls"]).ok()?;
    let mut indices = 0_usize..;
    let calls = with_changed_elements(message.json("tool_calls")?, |call| {
        let (index, call) = (indices.next()?, ObjectText::parse(call, &["index"]).ok()?);
        Some(call.edit().set("index", index.to_string()).finish())
    })?;
    Some(message.edit().set("tool_calls", calls).finish())
}
