//! Handlers of completions and chat completions.

use axum::Extension;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;

use super::answer::Api;
use super::completions::{Incoming, Prepared, respond};
use super::request::{ChatRequest, CompletionRequest, Message, Parsed, PromptInput};
use super::{Connection, Shared, legs};
use crate::engine::Stage;
use crate::mock::engine::Engine;
use crate::mock::tokenizer::{chat_text, tokenize};

/// `POST /v1/completions`.
pub(super) async fn complete(
    State(engine): Shared,
    Extension(connection): Extension<Connection>,
    headers: HeaderMap,
    Parsed(request): Parsed<CompletionRequest>,
) -> Response {
    let (tokens, has_token_prompt) = match request.prompt {
        PromptInput::Text(text) => (tokenize(&text), false),
        PromptInput::Tokens(tokens) => (tokens, true),
    };
    let incoming = Incoming { api: Api::Completion, common: request.common, tokens, has_token_prompt, headers };
    answer(&engine, &connection, incoming).await
}

/// `POST /v1/chat/completions`.
pub(super) async fn chat(
    State(engine): Shared,
    Extension(connection): Extension<Connection>,
    headers: HeaderMap,
    Parsed(request): Parsed<ChatRequest>,
) -> Response {
    let texts: Vec<String> = request.messages.iter().map(Message::text).collect();
    let messages = request.messages.iter().zip(&texts).map(|(message, text)| (message.role.as_str(), text.as_str()));
    let mut text = chat_text(messages);
    if request.continue_final_message == Some(true)
        && let Some(open) = text.strip_suffix("\nassistant\n")
    {
        text.truncate(open.len());
    }
    let tokens = tokenize(&text);
    let incoming = Incoming { api: Api::Chat, common: request.common, tokens, has_token_prompt: false, headers };
    answer(&engine, &connection, incoming).await
}

async fn answer(engine: &Engine, connection: &Connection, request: Incoming) -> Response {
    if let Some(board) = &engine.handover {
        return legs::serve(engine, board, connection, request).await;
    }
    let run = match Prepared::new(engine, &request, None).and_then(|prepared| prepared.submit(Stage::Whole, None)) {
        Ok(run) => run,
        Err(refusal) => return *refusal,
    };
    respond(connection, &request.common, run).await
}
