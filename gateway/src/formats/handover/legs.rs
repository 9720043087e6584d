//! Bodies of the prefill leg and of the decode leg.

use axum::body::Bytes;

use super::ids::batch_room;
use super::object::{ObjectEdit, ObjectError, ObjectText, Positions};
use super::refusal::{self, BatchSize, NotSplit};
use super::{PrefillResponse, Protocol};
use crate::formats::json::quoted;
use crate::formats::openai::Endpoint;

/// Fields that a leg changes or that prevent a handover.
const KNOWN: &[&str] = names![
    stream stream_options max_tokens max_completion_tokens max_output_tokens min_tokens n best_of echo logprobs
    prompt_logprobs use_beam_search background previous_response_id previous_input_messages conversation prompt
    prompt_embeds prompt_token_ids kv_transfer_params disaggregated_params bootstrap_host bootstrap_port
    bootstrap_room rid routed_dp_rank disagg_prefill_dp_rank
];

/// Maximum number of prompts of a batch that are aborted one by one. Engines detect closed connections themselves, later.
const ABORTS_MAX: usize = 64;

/// Parameters of the prefill leg with the NIXL connector.
const NIXL_PREFILL: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

/// Identifiers of one transfer, chosen by the caller. Each protocol uses some of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transfer {
    /// Host of the prefill rank (SGLang).
    pub prefill_host: String,
    /// Data-parallel rank of the prefill leg, if its engine has several (SGLang).
    pub prefill_rank: Option<u32>,
    /// Number of data-parallel ranks of the prefill engine (SGLang). 0 counts as 1.
    pub prefill_dp_size: u32,
    /// Data-parallel rank of the decode leg, if its engine has several (SGLang).
    pub decode_rank: Option<u32>,
    /// Port of the prefill engine's bootstrap server (SGLang). `None` is sent as null.
    pub bootstrap_port: Option<u16>,
    /// Bootstrap room, from [`bootstrap_room`](super::bootstrap_room) (SGLang). A batch uses this room for its first
    /// prompt, and `prefill_dp_size` higher for each further prompt.
    pub room: u64,
    /// Id of the transfer, as in `xfer-UUID` (Mooncake). With SGLang it is the id of the request in both engines.
    pub transfer_id: String,
    /// URL of the prefill engine's bootstrap server, as in `http://10.0.0.1:8998` (Mooncake).
    pub bootstrap_address: String,
    /// Engine id of the prefill rank (Mooncake).
    pub engine_id: String,
}

/// A client's body from which the bodies of both legs are derived.
///
/// Values of the body remain byte for byte, and fields keep their order. Fields of the transfer replace fields of the
/// same name. Memory: the shared body and a few positions.
///
/// ```
/// use pointsman_gateway::formats::handover::{LegBodies, PrefillResponse, Protocol, Transfer};
/// use pointsman_gateway::formats::openai::Endpoint;
///
/// let protocol = Protocol::VllmNixl;
/// let body = r#"{"prompt":"x","max_tokens":9}"#;
/// let bodies = LegBodies::parse(Endpoint::Completions, protocol, body.into())?;
/// let transfer = Transfer::default();
/// assert!(bodies.prefill(&transfer).starts_with(br#"{"prompt":"x","max_tokens":1,"kv_transfer_params":"#));
///
/// let answer = r#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"remote_port":5600}}"#;
/// let answer = PrefillResponse::parse(protocol, answer.into())?;
/// let sent = r#"{"prompt":"x","max_tokens":9,"kv_transfer_params":{"remote_port":5600}}"#;
/// assert_eq!(bodies.decode(&transfer, Some(&answer)), sent);
/// // Without parameters, the decode rank computes the prompt as well.
/// assert_eq!(bodies.decode(&transfer, None), body);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct LegBodies {
    endpoint: Endpoint,
    protocol: Protocol,
    body: Bytes,
    fields: Positions,
    batch_size: BatchSize,
}

impl LegBodies {
    /// Parses a body. [`RequestBody`](crate::formats::openai::RequestBody) has checked it and applied the gateway's edits.
    ///
    /// # Errors
    /// The reason why the request cannot be handed over. One decode rank then serves the unchanged body.
    pub fn parse(endpoint: Endpoint, protocol: Protocol, body: Bytes) -> Result<Self, NotSplit> {
        let text = std::str::from_utf8(&body).map_err(|_| NotSplit::NotAnObject)?;
        let fields = Positions::find(text, KNOWN).map_err(|error| match error {
            ObjectError::Json(_) => NotSplit::NotAnObject,
            ObjectError::Repeated(name) => NotSplit::Repeated(name),
        })?;
        let batch_size = refusal::check(endpoint, protocol, &ObjectText::scanned(text, fields.clone()))?;
        Ok(Self { endpoint, protocol, body, fields, batch_size })
    }

    /// Body of the prefill leg. With vLLM and TensorRT-LLM, the response is not streamed.
    pub fn prefill(&self, leg: &Transfer) -> Bytes {
        let object = self.object();
        let edit = object.edit();
        let edit = match self.protocol {
            Protocol::VllmNixl => self.one_token(&object, edit).set("kv_transfer_params", NIXL_PREFILL),
            Protocol::VllmMooncake => {
                let id = quoted(&leg.transfer_id);
                let parameters = format!(r#"{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":{id}}}"#);
                self.one_token(&object, edit).set("kv_transfer_params", parameters)
            }
            Protocol::VllmP2pNccl => self.one_token(&object, edit),
            Protocol::Sglang => self.bootstrap(edit, leg, leg.prefill_rank),
            Protocol::TensorrtLlm => unstreamed(edit).set("disaggregated_params", r#"{"request_type":"context_only"}"#),
        };
        edit.finish().into()
    }

    /// Body of the decode leg.
    ///
    /// NIXL and TensorRT-LLM require parameters of the prefill response. Without them, the result is the client's body,
    /// and the decode rank computes the prompt as well.
    pub fn decode(&self, leg: &Transfer, prefill: Option<&PrefillResponse>) -> Bytes {
        let object = self.object();
        let edit = object.edit();
        let parameters = prefill.and_then(|prefill| text_of(&prefill.parameters));
        let edit = match (self.protocol, parameters) {
            (Protocol::VllmP2pNccl, _) | (Protocol::VllmNixl, None) => return self.body.clone(),
            (Protocol::VllmNixl, Some(parameters)) => edit.set("kv_transfer_params", parameters),
            (Protocol::VllmMooncake, _) => {
                let [id, address, engine] =
                    [&leg.transfer_id, &leg.bootstrap_address, &leg.engine_id].map(|text| quoted(text));
                let parameters = format!(
                    r#"{{"do_remote_prefill":true,"do_remote_decode":false,"transfer_id":{id},"remote_bootstrap_addr":{address},"remote_engine_id":{engine}}}"#
                );
                edit.set("kv_transfer_params", parameters)
            }
            (Protocol::Sglang, _) => {
                let edit = self.bootstrap(edit, leg, leg.decode_rank);
                match leg.prefill_rank {
                    Some(rank) => edit.set("disagg_prefill_dp_rank", rank.to_string()),
                    None => edit,
                }
            }
            // A client must not choose the state that the rank loads.
            (Protocol::TensorrtLlm, None) if object.json("disaggregated_params").is_some() => {
                edit.set("disaggregated_params", "null")
            }
            (Protocol::TensorrtLlm, None) => return self.body.clone(),
            (Protocol::TensorrtLlm, Some(parameters)) => {
                let edit = match prefill.and_then(|prefill| text_of(&prefill.prompt_token_ids)) {
                    Some(ids) if self.endpoint == Endpoint::Completions => edit.set("prompt", ids),
                    Some(ids) => edit.set("prompt_token_ids", ids),
                    None => edit,
                };
                edit.set("disaggregated_params", generation_only(parameters))
            }
        };
        edit.finish().into()
    }

    /// Ids with which both engines can abort the request (SGLang). Empty if the client has chosen an id: SGLang aborts
    /// every request whose id begins with the given one. SGLang appends the number of the prompt to the id of a batch.
    pub fn abort_ids(&self, leg: &Transfer) -> Vec<String> {
        if self.protocol != Protocol::Sglang || self.object().json("rid").is_some() {
            return Vec::new();
        }
        let of_prompts =
            (0..self.batch_size.unwrap_or_default().min(ABORTS_MAX)).map(|n| format!("{}_{n}", leg.transfer_id));
        std::iter::once(leg.transfer_id.clone()).chain(of_prompts).collect()
    }

    fn object(&self) -> ObjectText<'_> {
        let text = std::str::from_utf8(&self.body).expect("the body is UTF-8, because it was parsed");
        ObjectText::scanned(text, self.fields.clone())
    }

    /// Limits the output to one token, not streamed.
    fn one_token<'o, 'a>(&self, object: &ObjectText<'_>, edit: ObjectEdit<'o, 'a>) -> ObjectEdit<'o, 'a> {
        let spellings: &[&'static str] = match self.endpoint {
            Endpoint::Chat => &["max_completion_tokens", "max_tokens"],
            Endpoint::Responses => &["max_output_tokens"],
            _ => &["max_tokens"],
        };
        let edit = unstreamed(edit).remove("min_tokens").set_present("n", "1");
        let mut given = spellings.iter().filter(|name| object.json(name).is_some()).peekable();
        if given.peek().is_some() {
            return given.fold(edit, |edit, name| edit.set(name, "1"));
        }
        // Null is a spelling without a value. Chat rejects two spellings with values.
        let name = spellings.iter().find(|name| object.raw(name).is_some()).unwrap_or(&spellings[0]);
        edit.set(name, "1")
    }

    /// Adds the bootstrap fields and the rank of one leg.
    fn bootstrap<'o, 'a>(&self, edit: ObjectEdit<'o, 'a>, leg: &Transfer, rank: Option<u32>) -> ObjectEdit<'o, 'a> {
        let host = quoted(&leg.prefill_host);
        let port = leg.bootstrap_port.map_or_else(|| "null".to_owned(), |port| port.to_string());
        let room = |prompt_idx| batch_room(leg.room, leg.prefill_dp_size, prompt_idx).to_string();
        let edit = match self.batch_size {
            None => edit.set("bootstrap_host", host).set("bootstrap_port", port).set("bootstrap_room", room(0)),
            Some(n_prompts) => edit
                .set("bootstrap_host", list(&vec![host; n_prompts]))
                .set("bootstrap_port", list(&vec![port; n_prompts]))
                .set("bootstrap_room", list(&(0..n_prompts).map(room).collect::<Vec<_>>())),
        };
        let edit = match self.object().json("rid") {
            Some(_) => edit,
            None => edit.set("rid", quoted(&leg.transfer_id)),
        };
        match rank {
            Some(rank) => edit.set("routed_dp_rank", rank.to_string()),
            None => edit,
        }
    }
}

/// Disables streaming. Engines reject `stream_options` without it.
fn unstreamed<'o, 'a>(edit: ObjectEdit<'o, 'a>) -> ObjectEdit<'o, 'a> {
    edit.set_present("stream", "false").remove("stream_options")
}

fn text_of(json: &Option<Bytes>) -> Option<&str> {
    json.as_ref().and_then(|json| std::str::from_utf8(json).ok())
}

/// Parameters of the context phase for the generation phase. All other bytes remain.
fn generation_only(parameters: &str) -> String {
    match ObjectText::parse(parameters, &["request_type"]) {
        Ok(object) => object.edit().set("request_type", r#""generation_only""#).finish(),
        // Not reached: the response was checked. Unchanged parameters are rejected by the engine.
        Err(_) => parameters.to_owned(),
    }
}

fn list(elements: &[String]) -> String {
    format!("[{}]", elements.join(","))
}
