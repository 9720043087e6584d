#![no_main]

libfuzzer_sys::fuzz_target!(init: pointsman_fuzz::write_seeds("zmtp_frames"), |bytes: &[u8]| {
    pointsman::test_support::hostile::zmtp_frames(bytes);
});
