#![no_main]

libfuzzer_sys::fuzz_target!(init: pointsman_fuzz::write_seeds("kv_events"), |bytes: &[u8]| {
    pointsman::test_support::hostile::kv_events(bytes);
});
