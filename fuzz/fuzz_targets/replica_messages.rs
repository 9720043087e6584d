#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pointsman::test_support::hostile::replica_messages(bytes));
