//! Message interface of the router, for embedders that exchange request and response messages.

use std::time::Duration;

use super::request::{Prompt, RouteRequest};
use super::router::Router;
use crate::error::{HandleError, RequestError, RouteError};
use crate::hashing::HashScheme;
use crate::message::{LoadMessage, MessagePrompt, PromptMessage, RouterRequest, RouterResponse};
use crate::schedule::Rejection;

impl Router {
    /// Handles one message. `context_id` is the id of the embedder's current request. It names the bookings of the
    /// message, and reports without an id refer to it.
    ///
    /// A booking made here lasts until it is freed, or until `load.booking_liveness_ms` passes without a report.
    ///
    /// # Errors
    /// Failures other than routing outcomes: a message without a prompt, a duplicate id, no eligible rank, a router
    /// that is down. Backpressure is an outcome: [`RouterResponse::QueueRejected`].
    pub async fn handle(&self, context_id: &str, request: RouterRequest) -> Result<RouterResponse, HandleError> {
        let meant = |request_id: Option<String>| {
            request_id.filter(|id| !id.trim().is_empty()).unwrap_or_else(|| context_id.to_owned())
        };
        match request {
            RouterRequest::New(message) => self.handle_new(context_id, &message).await,
            RouterRequest::PotentialLoads(message) => self.handle_potential_loads(&message).await,
            RouterRequest::MarkPrefill { request_id } => {
                let success = known(self.mark_prefill_completed(&meant(request_id)))?;
                Ok(RouterResponse::PrefillMarked { success })
            }
            RouterRequest::MarkFree { request_id } => {
                Ok(RouterResponse::FreeMarked { success: known(self.free(&meant(request_id)))? })
            }
        }
    }

    async fn handle_new(&self, context_id: &str, message: &PromptMessage) -> Result<RouterResponse, HandleError> {
        let prompt = message.prompt(&self.scheme(message))?;
        let request = RouteRequest { request_id: Some(context_id), ..as_route(message, &prompt) };
        match self.route(request).await {
            Ok(placement) => {
                let placed = RouterResponse::New {
                    worker_id: placement.rank().worker,
                    dp_rank: placement.rank().rank,
                    overlap_blocks: placement.overlap_blocks(),
                    cached_tokens: placement.cached_tokens(),
                };
                placement.detach();
                Ok(placed)
            }
            Err(RouteError::Rejected(Rejection::Backpressure(refused))) => Ok(refused.into()),
            Err(error) => Err(error.into()),
        }
    }

    async fn handle_potential_loads(&self, message: &PromptMessage) -> Result<RouterResponse, HandleError> {
        let prompt = message.prompt(&self.scheme(message))?;
        let loads = self.potential_loads(as_route(message, &prompt)).await?;
        let pending = self.pending().await?;
        Ok(RouterResponse::PotentialLoads {
            loads: loads.into_iter().map(LoadMessage::from).collect(),
            pending_count: pending.iter().map(|class| class.depth.requests).sum(),
            pending_isl_tokens: pending.iter().map(|class| class.depth.raw_tokens).sum(),
            pending_by_class: pending.into_iter().map(|class| (class.class, class.depth.requests)).collect(),
        })
    }

    fn scheme<'a>(&self, message: &'a PromptMessage) -> HashScheme<'a> {
        HashScheme {
            block_size: self.config().block_size_nonzero(),
            lora_name: message.lora_name.as_deref(),
            cache_salt: message.cache_salt.as_deref(),
            is_eagle: self.config().is_eagle,
        }
    }
}

/// Whether the booking exists.
fn known(marked: Result<(), RequestError>) -> Result<bool, HandleError> {
    match marked {
        Ok(()) => Ok(true),
        Err(RequestError::NotFound(_)) => Ok(false),
        Err(error @ RequestError::Decay(_)) => Err(error.into()),
    }
}

fn as_route<'a>(message: &'a PromptMessage, prompt: &'a MessagePrompt<'a>) -> RouteRequest<'a> {
    let prompt = match prompt {
        MessagePrompt::Tokens(tokens) => Prompt::Tokens(tokens),
        MessagePrompt::Hashed(hashed) => Prompt::Hashed(hashed),
    };
    RouteRequest {
        lora_name: message.lora_name.as_deref(),
        cache_salt: message.cache_salt.as_deref(),
        mm_spans: &message.mm_spans,
        strict_priority: message.strict_priority,
        priority_jump: message.priority_jump,
        deadline: message.deadline_ms.map(Duration::from_millis),
        policy_class: message.policy_class.as_deref(),
        do_not_queue: message.do_not_queue,
        constraints: message.constraints.as_ref(),
        session_id: message.session_id.as_deref(),
        expected_output_tokens: message.expected_output_tokens,
        output_tokens_max: message.output_tokens_max,
        not_streamed: message.not_streamed,
        tenant: message.tenant.as_deref(),
        overrides: message.overrides.as_ref(),
        ..RouteRequest::query(prompt)
    }
}
