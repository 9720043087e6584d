//! Client response of a request that the prefill leg has completed.

use super::object::{ObjectText, elements};
use crate::formats::openai::Endpoint;

/// The response without the fields for a decode leg.
pub(super) fn response(text: &str) -> String {
    let Ok(object) = ObjectText::parse(text, &["choices", "prompt_token_ids"]) else { return text.to_owned() };
    let edit = object.edit().remove("prompt_token_ids");
    match choices(&object, without_parameters) {
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
    let choices = match endpoint {
        Endpoint::Chat => choices(&object, chat_chunk_choice),
        _ => choices(&object, without_parameters),
    };
    let first = chunk(choices.unwrap_or_else(|| "[]".to_owned()));
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

/// The changed choices; `None` without a list of choices.
fn choices(response: &ObjectText<'_>, change: fn(&str) -> Option<String>) -> Option<String> {
    let choices = elements(response.json("choices")?)?;
    let choices: Vec<String> =
        choices.into_iter().map(|choice| change(choice).unwrap_or_else(|| choice.to_owned())).collect();
    Some(format!("[{}]", choices.join(",")))
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
    let calls = elements(message.json("tool_calls")?)?;
    let calls: Option<Vec<String>> = (0_usize..)
        .zip(calls)
        .map(|(index, call)| {
            let call = ObjectText::parse(call, &["index"]).ok()?;
            Some(call.edit().set("index", index.to_string()).finish())
        })
        .collect();
    Some(message.edit().set("tool_calls", format!("[{}]", calls?.join(","))).finish())
}
