#![no_main]

libfuzzer_sys::fuzz_target!(init: pointsman_fuzz::write_seeds("snapshot"), |bytes: &[u8]| {
    pointsman::test_support::hostile::snapshot(bytes);
});
