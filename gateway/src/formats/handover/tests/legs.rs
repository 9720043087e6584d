//! Byte-exact bodies of both legs, by protocol.

use super::{Protocol, Transfer, decode, parse, prefill, text, transfer};
use crate::formats::handover::NotSplit;
use crate::formats::openai::Endpoint;

const NIXL_PREFILL: &str = r#""kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;
const NIXL_ANSWER: &str = r#"{"id":"a","choices":[{"finish_reason":"length"}],"kv_transfer_params": { "do_remote_prefill" : true,"do_remote_decode":false,"remote_block_ids":[[1,2],[3]],"remote_num_tokens":1e5,"remote_blocks_expiry_time":1.50,"new":{"a":[null,"\u00e9\n"]},"transfer_mode":"pull" } ,"usage":null}"#;
const NIXL_PARAMETERS: &str = r#"{ "do_remote_prefill" : true,"do_remote_decode":false,"remote_block_ids":[[1,2],[3]],"remote_num_tokens":1e5,"remote_blocks_expiry_time":1.50,"new":{"a":[null,"\u00e9\n"]},"transfer_mode":"pull" }"#;
const CONTEXT_ANSWER: &str = r#"{"choices":[{"index":0,"finish_reason":"not_finished","disaggregated_params":{ "first_gen_tokens":[7], "request_type" : "context_only" ,"ctx_request_id":18446744073709551615,"encoded_opaque_state":"a\/b==","new":1e5}}],"prompt_token_ids": [1, 2,3]}"#;
const GENERATION_PARAMETERS: &str = r#"{ "first_gen_tokens":[7], "request_type" : "generation_only" ,"ctx_request_id":18446744073709551615,"encoded_opaque_state":"a\/b==","new":1e5}"#;
const UNTYPED_ANSWER: &str = r#"{"choices":[{"disaggregated_params":{"a":1 }}]}"#;

/// Cases of `legs.txt`.
#[test]
fn legs_of_each_protocol_are_byte_exact() {
    let mut lines = include_str!("legs.txt").lines().filter(|line| !line.starts_with("# "));
    let mut compared = 0;
    while let Some(head) = lines.next() {
        let (client, expected) = (lines.next().expect("a body"), lines.next().expect("the body of the leg"));
        let fills = [
            ("$NIXL_PREFILL", NIXL_PREFILL),
            ("$NIXL_PARAMETERS", NIXL_PARAMETERS),
            ("$GENERATION_PARAMETERS", GENERATION_PARAMETERS),
        ];
        let expected = fills.iter().fold(expected.to_owned(), |text, (name, value)| text.replace(name, value));
        let [protocol, leg, endpoint, answer] = head.split(' ').collect::<Vec<_>>()[..] else { panic!("{head}") };
        let protocol = Protocol::ALL.into_iter().find(|known| known.name() == protocol).expect("a protocol");
        let endpoint = Endpoint::ALL.iter().copied().find(|known| known.name() == endpoint).expect("an endpoint");
        let answers = [("nixl", NIXL_ANSWER), ("context", CONTEXT_ANSWER), ("untyped", UNTYPED_ANSWER)];
        let answer = answers.iter().find(|(name, _)| *name == answer).map(|(_, answer)| *answer);
        let sent = match leg {
            "prefill" => prefill(endpoint, protocol, client),
            _ => decode(endpoint, protocol, client, answer),
        };
        assert_eq!(sent, expected, "{head} {client}");
        compared += 1;
    }
    assert_eq!(compared, 32);
}

#[test]
fn parameters_of_the_client_are_replaced_in_place() {
    let body = r#"{"kv_transfer_params":{"remote_host":"h"},"prompt":"x","max_tokens":9}"#;
    let sent = prefill(Endpoint::Completions, Protocol::VllmNixl, body);
    assert_eq!(sent, format!(r#"{{{NIXL_PREFILL},"prompt":"x","max_tokens":1}}"#));
    let sent = decode(Endpoint::Completions, Protocol::VllmNixl, body, Some(NIXL_ANSWER));
    assert_eq!(sent, format!(r#"{{"kv_transfer_params":{NIXL_PARAMETERS},"prompt":"x","max_tokens":9}}"#));
    // An escaped name is the same field.
    let body = r#"{"kv_transfer_param\u0073":{},"max\u005ftokens":5,"prompt":"x"}"#;
    let sent = prefill(Endpoint::Completions, Protocol::VllmNixl, body);
    assert_eq!(sent.matches("kv_transfer_param").count(), 1);
    assert!(sent.contains(r#""max\u005ftokens":1,"#), "{sent}");
}

/// The prompt is shorter than a block, or the prefill was aborted and its blocks are freed.
#[test]
fn nixl_decode_legs_without_parameters_are_the_client_body() {
    let body = "{ \"prompt\" : \"x\" ,\n\"max_tokens\":9}\n";
    for answer in [
        None,
        Some(r#"{"choices":[{"finish_reason":"length"}]}"#),
        Some(r#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":null}"#),
        Some(r#"{"choices":[{"finish_reason":"abort"}],"kv_transfer_params":{"remote_port":1}}"#),
        Some(r#"{"choices":[{"finish_reason":"error"}],"kv_transfer_params":{"remote_port":1}}"#),
        Some(r#"{"object":"response","status":"failed","kv_transfer_params":{"remote_port":1}}"#),
        Some(r#"{"status":"incomplete","incomplete_details":{"reason":"content_filter"},"kv_transfer_params":{}}"#),
    ] {
        assert_eq!(decode(Endpoint::Completions, Protocol::VllmNixl, body, answer), body, "{answer:?}");
    }
    for answer in [
        r#"{"choices":[{"finish_reason":"stop"}],"kv_transfer_params":{"remote_port":1}}"#,
        r#"{"choices":[{"finish_reason":"tool_calls"}],"kv_transfer_params":{"remote_port":1}}"#,
        r#"{"choices":[{"finish_reason":null}],"kv_transfer_params":{"remote_port":1}}"#,
        r#"{"status":"completed","kv_transfer_params":{"remote_port":1}}"#,
        r#"{"status":"incomplete","incomplete_details":{"reason":"max_output_tokens"},"kv_transfer_params":{"remote_port":1}}"#,
    ] {
        let sent = decode(Endpoint::Completions, Protocol::VllmNixl, r#"{"prompt":"x"}"#, Some(answer));
        assert_eq!(sent, r#"{"prompt":"x","kv_transfer_params":{"remote_port":1}}"#, "{answer}");
    }
}

#[test]
fn sglang_legs_name_their_ranks() {
    let legs = parse(Endpoint::Chat, Protocol::Sglang, r#"{"messages":[]}"#).unwrap();
    let leg = Transfer { prefill_rank: Some(3), decode_rank: Some(5), bootstrap_port: None, ..transfer() };
    let shared =
        r#"{"messages":[],"bootstrap_host":"10.0.0.1","bootstrap_port":null,"bootstrap_room":77,"rid":"xfer-5f0c""#;
    assert_eq!(text(&legs.prefill(&leg)), format!(r#"{shared},"routed_dp_rank":3}}"#));
    let expected = format!(r#"{shared},"routed_dp_rank":5,"disagg_prefill_dp_rank":3}}"#);
    assert_eq!(text(&legs.decode(&leg, None)), expected);
}

#[test]
fn sglang_fields_of_the_client_are_replaced_in_place() {
    let body = r#"{"bootstrap_room":5,"routed_dp_rank":1,"bootstrap_host":"h","disagg_prefill_dp_rank":0,"bootstrap_port":1,"rid":null,"messages":[]}"#;
    let legs = parse(Endpoint::Chat, Protocol::Sglang, body).unwrap();
    let leg = Transfer { prefill_rank: Some(3), decode_rank: Some(5), ..transfer() };
    let expected = r#"{"bootstrap_room":77,"routed_dp_rank":5,"bootstrap_host":"10.0.0.1","disagg_prefill_dp_rank":3,"bootstrap_port":8998,"rid":"xfer-5f0c","messages":[]}"#;
    assert_eq!(text(&legs.decode(&leg, None)), expected);
    let expected = r#"{"bootstrap_room":77,"routed_dp_rank":3,"bootstrap_host":"10.0.0.1","disagg_prefill_dp_rank":null,"bootstrap_port":8998,"rid":"xfer-5f0c","messages":[]}"#;
    assert_eq!(text(&legs.prefill(&leg)), expected);
}

#[test]
fn sglang_batches_have_one_room_for_each_prompt_on_the_same_rank() {
    let leg = Transfer { room: 13, prefill_dp_size: 4, ..transfer() };
    for (prompt, expected) in [
        (
            r#"["a", "b","c"]"#,
            r#""bootstrap_host":["10.0.0.1","10.0.0.1","10.0.0.1"],"bootstrap_port":[8998,8998,8998],"bootstrap_room":[13,17,21]"#,
        ),
        (
            "[ [1,2] ,[3]]",
            r#""bootstrap_host":["10.0.0.1","10.0.0.1"],"bootstrap_port":[8998,8998],"bootstrap_room":[13,17]"#,
        ),
        (r#"["a"]"#, r#""bootstrap_host":["10.0.0.1"],"bootstrap_port":[8998],"bootstrap_room":[13]"#),
    ] {
        let legs = parse(Endpoint::Completions, Protocol::Sglang, &format!(r#"{{"prompt":{prompt}}}"#)).unwrap();
        let expected = format!(r#"{{"prompt":{prompt},{expected},"rid":"xfer-5f0c"}}"#);
        assert_eq!(text(&legs.prefill(&leg)), expected);
        assert_eq!(text(&legs.decode(&leg, None)), expected);
    }
}

#[test]
fn sglang_legs_are_aborted_by_ids_that_the_gateway_has_chosen() {
    let ids = |endpoint, protocol, body| parse(endpoint, protocol, body).unwrap().abort_ids(&transfer());
    let of_batch = r#"{"prompt":["a","b"]}"#;
    assert_eq!(ids(Endpoint::Chat, Protocol::Sglang, r#"{"messages":[]}"#), ["xfer-5f0c"]);
    let expected = ["xfer-5f0c", "xfer-5f0c_0", "xfer-5f0c_1"];
    assert_eq!(ids(Endpoint::Completions, Protocol::Sglang, of_batch), expected);
    // SGLang aborts all requests whose id begins with the given one.
    let of_client = r#"{"messages":[],"rid":"x"}"#;
    assert!(ids(Endpoint::Chat, Protocol::Sglang, of_client).is_empty());
    let sent = prefill(Endpoint::Chat, Protocol::Sglang, of_client);
    assert!(sent.starts_with(r#"{"messages":[],"rid":"x","#) && sent.matches("rid").count() == 1, "{sent}");
    for protocol in Protocol::ALL.into_iter().filter(|protocol| *protocol != Protocol::Sglang) {
        assert!(ids(Endpoint::Chat, protocol, r#"{"messages":[]}"#).is_empty(), "{protocol}");
    }
}

#[test]
fn requests_that_need_one_rank_are_not_split() {
    let (chat, completions, responses) = (Endpoint::Chat, Endpoint::Completions, Endpoint::Responses);
    let several_choices = [
        (chat, r#"{"messages":[],"n":2}"#),
        (chat, r#"{"messages":[],"n":0}"#),
        (completions, r#"{"prompt":"x","best_of":3,"n":1}"#),
    ];
    let cases = [
        (completions, r#"{"prompt":["x"],"n":2}"#, NotSplit::Choices),
        (completions, r#"{"prompt":"x","prompt_logprobs":0}"#, NotSplit::PromptLogprobs),
        (completions, r#"{"prompt":"x","use_beam_search":true}"#, NotSplit::BeamSearch),
        (completions, r#"{"prompt":"x","prompt_embeds":"AA"}"#, NotSplit::PromptEmbeds),
        (completions, r#"{"prompt":"x","min_tokens":1,"min_tokens":2}"#, NotSplit::Repeated("min_tokens")),
        (Endpoint::Embeddings, r#"{"input":"x"}"#, NotSplit::Endpoint),
    ];
    for protocol in Protocol::ALL {
        for (endpoint, body, reason) in cases {
            assert_eq!(parse(endpoint, protocol, body).err(), Some(reason), "{protocol} {body}");
        }
        for (endpoint, body) in [
            (chat, r#"{"messages":[],"n":null,"logprobs":true,"top_logprobs":3}"#),
            (completions, r#"{"prompt":"x","best_of":1,"n":1,"echo":false,"prompt_logprobs":null}"#),
            (completions, r#"{"prompt":["x"]}"#),
        ] {
            assert!(parse(endpoint, protocol, body).is_ok(), "{protocol} {body}");
        }
        let is_sglang = protocol == Protocol::Sglang;
        for (endpoint, body) in several_choices {
            let expected = (!is_sglang).then_some(NotSplit::Choices);
            assert_eq!(parse(endpoint, protocol, body).err(), expected, "{protocol} {body}");
        }
        for body in [r#"{"prompt":["x","y"]}"#, r#"{"prompt":[[1],[2]]}"#] {
            let expected = (!is_sglang).then_some(NotSplit::Batch);
            assert_eq!(parse(completions, protocol, body).err(), expected, "{protocol} {body}");
        }
        let expected = (!is_sglang).then_some(NotSplit::Echo);
        assert_eq!(parse(completions, protocol, r#"{"prompt":"x","echo":true}"#).err(), expected, "{protocol}");
        let probabilities = parse(completions, protocol, r#"{"prompt":"x","echo":true,"logprobs":0}"#);
        assert_eq!(probabilities.err(), Some(NotSplit::Echo), "{protocol}");
        let long = format!(r#"{{"prompt":[{}"x"]}}"#, r#""x","#.repeat(4096));
        assert_eq!(parse(completions, protocol, &long).err(), Some(NotSplit::Batch), "{protocol}");
        let expected = (protocol != Protocol::VllmNixl).then_some(NotSplit::Endpoint);
        assert_eq!(parse(responses, protocol, r#"{"input":"x"}"#).err(), expected, "{protocol}");
    }
    let stored = r#"{"input":"x","previous_response_id":"r"}"#;
    assert_eq!(parse(responses, Protocol::VllmNixl, stored).err(), Some(NotSplit::Stored));
    let background = r#"{"input":"x","background":true}"#;
    assert_eq!(parse(responses, Protocol::VllmNixl, background).err(), Some(NotSplit::Background));
}
