//! Properties of bodies, responses and identifiers over arbitrary input.

use axum::body::Bytes;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::{Protocol, response, text, transfer};
use crate::formats::handover::{LegBodies, PrefillResponse, Transfer, bootstrap_room, p2p_request_id};
use crate::formats::json::tests::json_value;
use crate::formats::openai::Endpoint;

const NAMES: [&str; 14] = [
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "n",
    "prompt",
    "prompt_token_ids",
    "kv_transfer_params",
    "disaggregated_params",
    "bootstrap_room",
    "routed_dp_rank",
    "unknown",
];

/// Objects with known and unknown names, in any order and with any spaces.
fn object() -> impl Strategy<Value = (Vec<(String, Value)>, String)> {
    let name = prop_oneof![3 => proptest::sample::select(&NAMES[..]).prop_map(str::to_owned), 1 => ".{0,6}"];
    let space = prop_oneof![Just(""), Just(" "), Just("\n\t")];
    let fields = proptest::collection::btree_map(name, json_value(), 0..10);
    (fields.prop_map(Vec::from_iter).prop_shuffle(), space).prop_map(|(fields, space)| {
        let entry = |(name, value): &(String, Value)| format!("{space}{}{space}:{space}{value}{space}", json!(name));
        let text = format!("{space}{{{}}}{space}", fields.iter().map(entry).collect::<Vec<_>>().join(","));
        (fields, text)
    })
}

proptest! {
    #[test]
    fn legs_of_every_protocol_are_objects_without_repeated_fields(
        (fields, body) in object(),
        endpoint in proptest::sample::select(&Endpoint::ALL[..]),
        protocol in proptest::sample::select(&Protocol::ALL[..]),
        room: u64,
        prefill_dp_size: u32,
        rank in proptest::option::of(any::<u32>()),
        name in ".{0,6}",
    ) {
        let Ok(legs) = LegBodies::parse(endpoint, protocol, body.into()) else { return Ok(()) };
        let leg = Transfer {
            prefill_host: name.clone(), transfer_id: name.clone(), engine_id: name,
            prefill_rank: rank, decode_rank: rank, room, prefill_dp_size, ..transfer()
        };
        let answer = r#"{"choices":[{"disaggregated_params":{}}],"kv_transfer_params":{},"prompt_token_ids":[1]}"#;
        let answer = response(protocol, answer);
        for sent in [legs.prefill(&leg), legs.decode(&leg, None), legs.decode(&leg, Some(&answer))] {
            let parsed: Map<String, Value> = serde_json::from_slice(&sent).unwrap();
            // Another scan rejects repeated known fields; `echo` and others remain unset.
            prop_assert!(LegBodies::parse(endpoint, protocol, sent).is_ok());
            for (name, value) in &fields {
                if !NAMES.contains(&name.as_str()) || name == "unknown" {
                    prop_assert_eq!(parsed.get(name), Some(value));
                }
            }
        }
    }

    #[test]
    fn arbitrary_responses_are_parsed_or_rejected(
        fields in proptest::collection::btree_map(
            proptest::sample::select(&["choices", "usage", "status", "kv_transfer_params", "prompt_token_ids"][..]),
            prop_oneof![json_value(), json_value().prop_map(|value| json!([{ "message": value, "finish_reason": "stop" }]))],
            0..5,
        ),
        protocol in proptest::sample::select(&Protocol::ALL[..]),
        endpoint in proptest::sample::select(&Endpoint::ALL[..]),
    ) {
        let body = Bytes::from(json!(fields).to_string());
        let Ok(answer) = PrefillResponse::parse(protocol, body) else { return Ok(()) };
        let whole: Value = serde_json::from_slice(&answer.complete_response(endpoint, false, false)).unwrap();
        prop_assert!(whole.is_object());
        for include_usage in [false, true] {
            let events = text(&answer.complete_response(endpoint, true, include_usage));
            let events: Vec<&str> = events.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap()).collect();
            prop_assert_eq!(events.last(), Some(&"[DONE]"));
            for event in &events[..events.len() - 1] {
                prop_assert!(serde_json::from_str::<Value>(event).unwrap().is_object());
            }
        }
        let legs = LegBodies::parse(Endpoint::Completions, protocol, Bytes::from_static(b"{\"prompt\":\"x\"}")).unwrap();
        let sent: Value = serde_json::from_slice(&legs.decode(&transfer(), Some(&answer))).unwrap();
        prop_assert!(sent.is_object());
    }

    #[test]
    fn rooms_of_a_batch_are_distinct_and_belong_to_the_rank(
        room: u64,
        dp_size in prop_oneof![1_u32..9, 1_u32..],
        n_prompts in 1_usize..9,
    ) {
        let prompts = vec!["x"; n_prompts];
        let body = json!({ "prompt": prompts }).to_string();
        let legs = LegBodies::parse(Endpoint::Completions, Protocol::Sglang, body.into()).unwrap();
        let sent: Value = serde_json::from_slice(&legs.prefill(&Transfer { room, prefill_dp_size: dp_size, ..transfer() })).unwrap();
        let mut rooms: Vec<u64> = serde_json::from_value(sent["bootstrap_room"].clone()).unwrap();
        for room_of_prompt in &rooms {
            prop_assert!(*room_of_prompt < 1 << 63);
            prop_assert_eq!(room_of_prompt % u64::from(dp_size), room % u64::from(dp_size));
        }
        rooms.sort_unstable();
        rooms.dedup();
        prop_assert_eq!(rooms.len(), n_prompts);
    }
}

#[test]
fn protocols_have_one_name() {
    for protocol in Protocol::ALL {
        assert_eq!(json!(protocol), json!(protocol.name()));
        assert_eq!(serde_json::from_value::<Protocol>(json!(protocol.name())).unwrap(), protocol);
        assert_eq!(protocol.to_string(), protocol.name());
    }
    let concurrent = Protocol::ALL.into_iter().filter(|protocol| protocol.is_concurrent());
    assert_eq!(concurrent.collect::<Vec<_>>(), [Protocol::VllmMooncake, Protocol::Sglang]);
}

#[test]
fn p2p_request_ids_name_both_addresses() {
    assert_eq!(p2p_request_id("p:1", "d:2", "u"), "___prefill_addr_p:1___decode_addr_d:2_u");
}

#[test]
fn bootstrap_rooms_accept_a_missing_rank_count() {
    assert!(bootstrap_room(u64::MAX, 0, 7) < 1 << 63);
    assert_eq!(bootstrap_room(0, 4, 7), 3);
}
