//! The legs of a disaggregated request.

use serde_json::{Map, Value};

/// Kind of a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Leg {
    /// A request for one engine.
    Plain,
    Prefill(PrefillLeg),
    Decode(DecodeLeg),
}

/// A prefill leg.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct PrefillLeg {
    /// Name of the transfer; none if the engine chooses it.
    pub(crate) key: Option<String>,
    /// Address that the blocks are pushed to.
    pub(crate) push_to: Option<String>,
    /// Default of the data-parallel rank.
    pub(crate) rank: Option<u16>,
}

/// A decode leg.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct DecodeLeg {
    /// Name of the transfer.
    pub(crate) key: String,
    pub(crate) source: Source,
    /// Engine id that the router sent.
    pub(crate) engine_id: Option<String>,
    /// Rank of the prefill that the router sent.
    pub(crate) prefill_rank: Option<u16>,
    /// Number of prompt tokens that the prefill engine reported.
    pub(crate) tokens: Option<u64>,
    /// First output token that the prefill engine reported.
    pub(crate) first_token: Option<u32>,
    /// Prompt in place of the messages of a chat.
    pub(crate) prompt: Option<Vec<u32>>,
}

/// Origin of the blocks of a decode leg.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) enum Source {
    /// The decode engine claims them at this address.
    Claim(String),
    /// The prefill engine pushes them.
    #[default]
    Push,
}

pub(crate) fn text(params: &Map<String, Value>, name: &str) -> Result<String, String> {
    let value = params.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
    value.map(str::to_owned).ok_or_else(|| format!("{name} is missing or not a string"))
}

/// An integer that fits the type.
pub(crate) fn number<T: TryFrom<u64>>(value: &Value) -> Option<T> {
    value.as_u64().and_then(|number| T::try_from(number).ok())
}
