use clap::Parser;

use super::*;

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    events: Events,
}

/// Arguments for a fast test, with caches small enough for evictions.
fn small() -> Events {
    let line = "test --ranks 2 --limit 40 --kv-blocks 256 --output-tokens 70 --repeat 2";
    Arguments::parse_from(line.split_whitespace()).events
}

#[test]
fn both_layouts_contain_the_same_blocks() {
    let map = small().run().expect("maps are read and applied");
    let array = Events { dialect: Dialect::VllmArray, ..small() }.run().expect("arrays are read and applied");
    assert!(map.removed_blocks > 100 && map.stored_blocks > map.removed_blocks, "{map:?}");
    assert_eq!((map.stored_blocks, map.removed_blocks), (array.stored_blocks, array.removed_blocks));
    assert_eq!((map.requests, map.messages), (40, array.messages));
    assert!(map.bytes > array.bytes && array.bytes > 64 * array.stored_blocks);
}

#[test]
fn equal_arguments_give_equal_recordings() {
    let options = Events { limit: Some(12), ..small() };
    let record = |options: &Events| {
        recording::record(options, &options.prompts().expect("generated")).expect("an engine serves the request")
    };
    let recording = record(&options);
    assert_eq!(recording, record(&options));
    assert_ne!(recording, record(&Events { seed: 2, ..options }));
    assert_eq!(recording.tokens.len() as u64, 64 * recording.stored_blocks);
    assert!((0..2).all(|engine| recording.messages.iter().any(|message| message.engine == engine)));
}

#[test]
fn invalid_fleets_are_rejected_by_name() {
    for (flag, value) in [("--ranks", "0"), ("--repeat", "0"), ("--block-size", "0"), ("--dialect", "xml")] {
        let error = Arguments::try_parse_from(["test", flag, value]).err().expect("refused").to_string();
        assert!(error.contains(flag) && error.contains(value), "{error}");
    }
    let error = Events { kv_blocks: 9, ..small() }.run().expect_err("no prompt fits").to_string();
    assert!(error.contains("kv_blocks 9"), "{error}");
}
