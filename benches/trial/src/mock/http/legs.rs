//! Legs of disaggregated requests.
//!
//! A prefill leg computes the prompt and one token, and holds the blocks for a decode engine. A decode leg fetches the
//! transfer first and then runs like a request whose prompt is computed. [`crate::mock::handover`] has the rules and the
//! transfers, [`super::completions`] runs and streams requests.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use tokio::time::sleep;
use xxhash_rust::xxh3::Xxh3;

use super::Connection;
use super::answer::{self, ABORT, DONE, Usage};
use super::completions::{Ended, Incoming, Prepared, Refusal, has_rank_header, request_id, respond, stream_headers};
use super::rules::classify;
use crate::engine::{RequestSpec, Stage};
use crate::mock::config::MockConfig;
use crate::mock::engine::Engine;
use crate::mock::handover::{
    Claim, DecodeLeg, Grant, HandoverBoard, HandoverProtocol, Leg, LoadFailure, NoResult, OpenTransfer, PrefillLeg,
    Push, RunningLeg, Source, TransferError, nixl_params, tensorrt_params,
};

/// One request and the parts of the engine that serve it.
struct Server<'a> {
    engine: &'a Engine,
    board: &'a Arc<HandoverBoard>,
    connection: &'a Connection,
}

/// Serves a request of an engine with disaggregated serving.
pub(super) async fn serve(
    engine: &Engine,
    board: &Arc<HandoverBoard>,
    connection: &Connection,
    mut request: Incoming,
) -> Response {
    let server = Server { engine, board, connection };
    let served = match classify(&board.facts, &request) {
        Ok(Leg::Plain) => server.plain(request).await,
        Ok(Leg::Prefill(leg)) => server.prefill(request, leg).await,
        Ok(Leg::Decode(mut leg)) => {
            if let Some(prompt) = leg.prompt.take() {
                request.tokens = prompt;
            }
            server.decode(request, leg).await
        }
        Err(message) => Err(server.reject(&message)),
    };
    served.unwrap_or_else(|refusal| *refusal)
}

impl Server<'_> {
    /// Rejects a violation of the protocol.
    fn reject(&self, message: &str) -> Refusal {
        self.board.count(|counters| counters.rejected += 1);
        Box::new(answer::error(StatusCode::BAD_REQUEST, message))
    }

    fn run(&self, request: &Incoming) -> RunningLeg {
        let rid = request.common.handover("rid").and_then(serde_json::Value::as_str);
        self.board.run(rid.or(request_id(request)))
    }

    /// Rank that the request names in SGLang's field, otherwise the default of its leg unless a header names one.
    fn rank(&self, request: &Incoming, default: Option<u16>) -> Result<Option<u16>, Refusal> {
        let field = request.common.handover("routed_dp_rank");
        let Some(rank) = field.filter(|_| self.board.facts.protocol == HandoverProtocol::Sglang) else {
            return Ok(default.filter(|_| !has_rank_header(&request.headers)));
        };
        let ranks = self.board.facts.ranks;
        let number = rank.as_u64().and_then(|rank| u16::try_from(rank).ok()).filter(|rank| *rank < ranks);
        number.map(Some).ok_or_else(|| self.reject(&format!("routed_dp_rank {rank} is not below {ranks}")))
    }

    async fn plain(&self, request: Incoming) -> Result<Response, Refusal> {
        let running = self.run(&request);
        let run = Prepared::new(self.engine, &request, None)?.submit(Stage::Whole, Some(running))?;
        self.board.count(|counters| counters.aggregated += 1);
        Ok(respond(self.connection, &request.common, run).await)
    }

    async fn prefill(&self, request: Incoming, leg: PrefillLeg) -> Result<Response, Refusal> {
        let protocol = self.board.facts.protocol;
        let mut running = self.run(&request);
        let mut prepared = Prepared::new(self.engine, &request, self.rank(&request, leg.rank)?)?;
        let is_complete = match protocol {
            HandoverProtocol::VllmNixl => blocks(self.engine, &prepared.spec) == 0,
            HandoverProtocol::TensorrtLlm => prepared.spec.output_tokens_max == 1,
            HandoverProtocol::VllmMooncake | HandoverProtocol::VllmP2pNccl | HandoverProtocol::Sglang => false,
        };
        prepared.spec.output_tokens_max = 1;
        let numeric_key = self.board.numeric_key(prepared.spec.id);
        let key = match (leg.key, protocol) {
            (Some(key), _) => key,
            (None, HandoverProtocol::TensorrtLlm) => numeric_key.to_string(),
            (None, _) => prepared.head.id.clone(),
        };
        let transfer = self.board.open(&key).ok_or_else(|| self.reject(&format!("transfer {key} is already open")))?;
        self.board.count(|counters| counters.legs_prefill += 1);
        if protocol == HandoverProtocol::Sglang {
            // As in SGLang, the prefill begins when the decode engine has allocated memory for it.
            let connected = tokio::select! {
                biased;
                () = running.aborted() => return Ok(aborted(&request, &prepared)),
                connected = transfer.connected() => connected,
            };
            self.connected(connected, &key).await?;
        }
        let (prompt, rank) = (fingerprint(&prepared.spec), prepared.rank_idx);
        let (tokens, blocks) = (prepared.spec.tokens.len() as u64, blocks(self.engine, &prepared.spec));
        let (head, run) = prepared.submit(if is_complete { Stage::Whole } else { Stage::Prefill }, None)?;
        let ended = tokio::select! {
            biased;
            () = running.aborted() => return Ok(aborted_as(&request, &head, Usage::default())),
            ended = run.all() => ended,
        };
        let Some(ended) = ended else { self.connection.reset().await };
        if is_complete {
            let mut answer = head.whole(&ended.text(), ended.reason, ended.usage);
            if protocol == HandoverProtocol::TensorrtLlm {
                answer["choices"][0]["finish_reason"] = "stop".into();
                answer["prompt_token_ids"] = request.tokens.into();
            }
            return Ok(Json(answer).into_response());
        }
        let grant = Grant { rank, tokens, blocks, first_token: ended.tokens.first().copied().unwrap_or_default() };
        let prefilled = Prefilled { head, ended, grant, prompt, numeric_key, push_to: leg.push_to };
        self.hand_over(request, &mut running, transfer, prefilled).await
    }

    /// Holds the blocks of a finished prefill for its decode engine, and responds in the protocol.
    async fn hand_over(
        &self,
        request: Incoming,
        running: &mut RunningLeg,
        transfer: OpenTransfer,
        Prefilled { head, ended, grant, prompt, numeric_key, push_to }: Prefilled,
    ) -> Result<Response, Refusal> {
        let (text, key) = (ended.text(), transfer.key.clone());
        let Ended { reason, usage, guard, .. } = ended;
        let Some(held) = transfer.hold(grant, prompt, guard) else { self.connection.reset().await };
        let mut answer = head.whole(&text, reason, usage);
        match self.board.facts.protocol {
            HandoverProtocol::VllmNixl => {
                let engine_id = self.board.engine_id(grant.rank);
                answer["kv_transfer_params"] =
                    nixl_params(&key, &engine_id, self.board.reachable(), &grant, held.expiry_ms);
                transfer.leave();
            }
            HandoverProtocol::VllmMooncake => transfer.leave(),
            HandoverProtocol::VllmP2pNccl => self.push(transfer, push_to, prompt, grant).await,
            HandoverProtocol::Sglang => {
                let claimed = tokio::select! {
                    biased;
                    () = running.aborted() => return Ok(aborted_as(&request, &head, usage)),
                    claimed = held.claimed => claimed.map_err(|_| transfer.unclaimed()),
                };
                self.connected(claimed, &key).await?;
                if request.common.is_stream() {
                    let mut chunks: Vec<_> = head.opening().into_iter().collect();
                    chunks.push(head.piece(&text, reason, None));
                    chunks.extend(request.common.has_usage_chunk().then(|| head.usage(usage)));
                    chunks.push(DONE);
                    return Ok((stream_headers(), Body::from(chunks.concat())).into_response());
                }
            }
            HandoverProtocol::TensorrtLlm => {
                answer["choices"][0]["finish_reason"] = "not_finished".into();
                answer["choices"][0]["disaggregated_params"] =
                    tensorrt_params(numeric_key, self.board.reachable(), &grant);
                answer["prompt_token_ids"] = request.tokens.into();
                transfer.leave();
            }
        }
        running.end_transfer();
        Ok(Json(answer).into_response())
    }

    /// Responds to a prefill leg whose decode engine did not connect or did not take the blocks.
    async fn connected(&self, connected: Result<(), NoResult>, key: &str) -> Result<(), Refusal> {
        match connected {
            Ok(()) => Ok(()),
            Err(NoResult::Restarted) => self.connection.reset().await,
            Err(NoResult::Timeout) => {
                self.board.count(|counters| counters.late_or_unknown += 1);
                let message = format!("no decode engine took bootstrap room {key} in time");
                Err(Box::new(answer::error(StatusCode::INTERNAL_SERVER_ERROR, &message)))
            }
        }
    }

    /// Pushes the blocks of a prefill to its decode engine. The blocks of a failed push are lost.
    async fn push(&self, transfer: OpenTransfer, address: Option<String>, prompt: u64, grant: Grant) {
        let key = transfer.key.clone();
        let sent = Push { key: key.clone(), prompt, grant };
        if self.board.push_to(&address.unwrap_or_default(), &sent).await {
            let claim = Claim { key, prompt, tokens: grant.tokens, engine_id: None, rank: None, waits: false };
            // An expired lease is counted as such.
            let _ = self.board.claim(&claim).await;
            transfer.leave();
        }
    }

    async fn decode(&self, request: Incoming, leg: DecodeLeg) -> Result<Response, Refusal> {
        let mut running = self.run(&request);
        let rank = self.rank(&request, None)?;
        let prepared = Prepared::new(self.engine, &request, rank)?;
        let spec = &prepared.spec;
        let tokens = spec.tokens.len() as u64;
        if leg.tokens.is_some_and(|reported| reported != tokens) {
            return Err(self.reject("the number of prompt tokens differs from the prefill leg"));
        }
        let first_token = spec.first_token(&self.engine.config.engine(0, self.engine.format().dialect));
        if leg.first_token.is_some_and(|reported| reported != first_token) {
            return Err(self.reject("the first token differs from first_gen_tokens"));
        }
        // Prefill engines number their requests independently.
        let transfer = match &leg.source {
            Source::Claim(address) => format!("{} of {address}", leg.key),
            Source::Push => leg.key.clone(),
        };
        if !running.begin_transfer(&transfer) {
            return Err(self.reject(&format!("transfer {} is already in progress", leg.key)));
        }
        let claim = Claim {
            prompt: fingerprint(spec),
            tokens,
            engine_id: leg.engine_id,
            rank: leg.prefill_rank,
            waits: self.board.facts.protocol.waits_for_prefill(),
            key: leg.key,
        };
        let fetched = tokio::select! {
            biased;
            () = running.aborted() => return Ok(aborted(&request, &prepared)),
            fetched = async {
                let fetched = self.fetch(&leg.source, &claim).await;
                if fetched.is_ok() {
                    sleep(transfer_time(&self.engine.config, tokens)).await;
                }
                fetched
            } => fetched,
        };
        let stage = match fetched {
            Ok(_) => Stage::Decode,
            Err(Fetch::Restarted) => self.connection.reset().await,
            Err(Fetch::Failed(TransferError::Mismatch(message))) => {
                running.end_transfer();
                return Err(self.reject(&message));
            }
            Err(Fetch::Failed(error)) => {
                running.end_transfer();
                self.board.count(|counters| counters.late_or_unknown += 1);
                let recomputes = self.board.failure == LoadFailure::Recompute;
                if !(recomputes && self.board.facts.protocol.may_recompute()) {
                    self.board.count(|counters| counters.legs_decode += 1);
                    return Err(Box::new(answer::error(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string())));
                }
                Stage::Whole
            }
        };
        self.board.count(|counters| counters.legs_decode += 1);
        let run = prepared.submit(stage, Some(running))?;
        Ok(respond(self.connection, &request.common, run).await)
    }

    /// Fetches the transfer of a decode leg.
    async fn fetch(&self, source: &Source, sent: &Claim) -> Result<Grant, Fetch> {
        match source {
            Source::Claim(address) => self.board.claim_at(address, sent).await.map_err(Fetch::Failed),
            Source::Push => match self.board.arrival(&sent.key).await {
                Ok(push) if (push.prompt, push.grant.tokens) == (sent.prompt, sent.tokens) => Ok(push.grant),
                Ok(_) => {
                    Err(Fetch::Failed(TransferError::Mismatch("the prompt differs from the prefill leg".to_owned())))
                }
                Err(NoResult::Restarted) => Err(Fetch::Restarted),
                Err(NoResult::Timeout) => {
                    let place = self.board.facts.address.to_string();
                    Err(Fetch::Failed(TransferError::Unknown(sent.key.clone(), place)))
                }
            },
        }
    }
}

/// A finished prefill.
struct Prefilled {
    head: answer::Head,
    ended: Ended,
    grant: Grant,
    /// Fingerprint of the prompt.
    prompt: u64,
    numeric_key: u64,
    push_to: Option<String>,
}

/// Errors of fetching a transfer.
enum Fetch {
    Failed(TransferError),
    Restarted,
}

/// Real duration of a transfer.
fn transfer_time(config: &MockConfig, tokens: u64) -> Duration {
    if config.time_scale <= 0.0 {
        return Duration::ZERO;
    }
    #[expect(clippy::cast_precision_loss, reason = "prompts have far fewer than 2^53 tokens")]
    let seconds = tokens as f64 * config.transfer_us_per_token / 1e6 / config.time_scale;
    Duration::from_secs_f64(seconds.min(60.0))
}

/// Number of complete blocks of a prompt.
fn blocks(engine: &Engine, spec: &RequestSpec) -> u64 {
    spec.tokens.len() as u64 / u64::from(engine.config.block_size)
}

/// Fingerprint of a prompt and its adapter, equal on all engines.
fn fingerprint(spec: &RequestSpec) -> u64 {
    let mut hash = Xxh3::new();
    spec.tokens.iter().for_each(|token| hash.update(&token.to_le_bytes()));
    hash.update(spec.lora_name.as_deref().unwrap_or_default().as_bytes());
    hash.digest()
}

/// Response of a request that was aborted before it ran.
fn aborted(request: &Incoming, prepared: &Prepared) -> Response {
    aborted_as(request, &prepared.head, Usage { prompt: prepared.spec.tokens.len() as u64, ..Usage::default() })
}

fn aborted_as(request: &Incoming, head: &answer::Head, usage: Usage) -> Response {
    if request.common.is_stream() {
        let mut chunks: Vec<_> = head.opening().into_iter().collect();
        chunks.extend([head.piece("", Some(ABORT), None), DONE]);
        return (stream_headers(), Body::from(chunks.concat())).into_response();
    }
    Json(head.whole("", Some(ABORT), usage)).into_response()
}
