#![no_main]

libfuzzer_sys::fuzz_target!(init: pointsman_fuzz::write_seeds("replica_messages"), |bytes: &[u8]| {
    pointsman::test_support::hostile::replica_messages(bytes);
});
