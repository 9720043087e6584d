//! Body edits compared with a reference parser.

use axum::body::Bytes;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::formats::json::tests::json_value;
use crate::formats::openai::{Edits, Endpoint, RequestBody};

fn parse(body: &str) -> RequestBody {
    RequestBody::parse(Endpoint::Completions, Bytes::copy_from_slice(body.as_bytes())).unwrap()
}

#[test]
fn unchanged_bodies_share_their_memory() {
    let parsed = parse("{ \"prompt\" : \"x\" , \"model\":\"m\",\"cache_salt\":\"s\",\"routed_dp_rank\":null}\n");
    let body = parsed.body(Edits::default());
    let same = parsed.body(Edits { model: Some("m"), cache_salt: Some("s"), ..Edits::default() });
    assert_eq!(body.as_ptr(), same.as_ptr());
    assert_eq!(body.len(), same.len());
}

#[test]
fn values_are_replaced_in_place_or_inserted_first() {
    let edits = |model, cache_salt| Edits { model, cache_salt, ..Edits::default() };
    let (escaped, sent) =
        (r#"{"\u006dodel":"a","prompt":"\"model\":1"}"#, r#"{"\u006dodel":"b","prompt":"\"model\":1"}"#);
    let (salted, resalted) = (r#"{"cache_salt":null,"prompt":"x"}"#, r#"{"cache_salt":"s","prompt":"x"}"#);
    let cases = [(escaped, edits(Some("b"), None), sent), (salted, edits(None, Some("s")), resalted)];
    for (body, edits, expected) in cases {
        assert_eq!(parse(body).body(edits), expected);
    }
}

const PLACES: [&str; 4] = ["routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "kv_transfer_params"];

fn name() -> impl Strategy<Value = Option<String>> {
    proptest::option::of("[a-c\"\\\\é\n]{1,3}")
}

/// Distinct fields in the order of the body.
fn fields() -> impl Strategy<Value = Vec<(String, Value)>> {
    let known = (name(), name(), proptest::collection::vec(proptest::option::of(json_value()), PLACES.len()));
    let unknown = proptest::collection::btree_map("x[a-z]{0,3}", json_value(), 0..5);
    (known, unknown, ".{0,8}")
        .prop_map(|((model, salt, places), unknown, prompt)| {
            let mut fields = vec![("prompt".to_owned(), Value::from(prompt))];
            fields.extend(model.map(|model| ("model".to_owned(), model.into())));
            fields.extend(salt.map(|salt| ("cache_salt".to_owned(), salt.into())));
            fields.extend(PLACES.iter().zip(places).filter_map(|(name, value)| Some(((*name).to_owned(), value?))));
            fields.extend(unknown);
            fields
        })
        .prop_shuffle()
}

proptest! {
    #[test]
    fn edits_change_nothing_else(
        fields in fields(),
        space in "[ \n\t]{0,2}",
        model in name(),
        salt in name(),
    ) {
        let written: Vec<_> = fields.iter().map(|(key, value)| format!("{space}{}{space}:{space}{value}{space}", json!(key))).collect();
        let body = format!("{space}{{{}}}{space}", written.join(","));
        let edited = parse(&body).body(Edits { model: model.as_deref(), cache_salt: salt.as_deref(), ..Edits::default() });

        // Field by field in order: inserted fields first, replaced fields in place.
        let changed = |key: &str, value: &Value| match key {
            "model" => model.clone().map_or(value.clone(), Value::from),
            "cache_salt" => salt.clone().map_or(value.clone(), Value::from),
            _ if PLACES.contains(&key) => Value::Null,
            _ => value.clone(),
        };
        let absent = |key: &str| fields.iter().all(|(there, _)| there != key);
        let mut expected = String::new();
        for (key, given) in [("model", &model), ("cache_salt", &salt)] {
            if let Some(given) = given.as_ref().filter(|_| absent(key)) {
                expected.push_str(&format!("{}:{},", json!(key), json!(given)));
            }
        }
        let written: Vec<_> = fields
            .iter()
            .map(|(key, value)| format!("{space}{}{space}:{space}{}{space}", json!(key), changed(key, value)))
            .collect();
        let expected = format!("{space}{{{expected}{}}}{space}", written.join(","));
        prop_assert_eq!(std::str::from_utf8(&edited).unwrap(), expected);

        let again = RequestBody::parse(Endpoint::Completions, edited.clone()).unwrap();
        let kept = |new: &Option<String>, key: &str| {
            let old = fields.iter().find(|(there, _)| there == key).and_then(|(_, value)| value.as_str());
            new.as_deref().or(old).map(str::to_owned)
        };
        prop_assert_eq!(&again.model, &kept(&model, "model"));
        prop_assert_eq!(&again.cache_salt, &kept(&salt, "cache_salt"));
        prop_assert_eq!(again.body(Edits::default()), edited);
    }
}

#[test]
fn an_empty_body_receives_a_salt_without_a_comma() {
    let parsed = RequestBody::parse(Endpoint::Rerank, " { }".into()).expect("an object");
    let edits = Edits { cache_salt: Some("s"), ..Edits::default() };
    assert_eq!(parsed.body(edits), r#" {"cache_salt":"s" }"#);
}
