//! Target of the ZMTP frame check and the handshake.

use crate::zmtp::{Caps, FrameCheck, HANDSHAKE_BYTES_MAX, live, peer_socket, replayed, subscriber_hello};

const CAPS: Caps = Caps { frame_bytes_max: 1_000, message_bytes_max: 1_500, message_frames_max: 3 };

/// Result independent of the split of the bytes, frames within the caps, and no panic in handshake and parts.
pub fn zmtp_frames(bytes: &[u8]) {
    let whole = FrameCheck::new(CAPS).pass(bytes);
    let cut = bytes.first().map_or(1, |byte| usize::from(*byte) % 64 + 1);
    let mut check = FrameCheck::new(CAPS);
    let pieces = bytes.chunks(cut).try_for_each(|piece| check.pass(piece));
    assert_eq!(whole, pieces, "the result depends on the split");
    // The prefix of an accepted stream is accepted.
    if whole.is_ok() {
        assert_eq!(FrameCheck::new(CAPS).pass(&bytes[..bytes.len() / 2]), Ok(()), "a prefix is rejected");
    }
    let _ = peer_socket(&bytes[..bytes.len().min(HANDSHAKE_BYTES_MAX)]);
    let parts: Vec<&[u8]> = bytes.splitn(5, |byte| *byte == 0).collect();
    let _ = (live(&parts), replayed(&parts));
}

pub(super) fn seeds() -> Vec<Vec<u8>> {
    let hello = subscriber_hello();
    let greeting = hello[..64].to_vec();
    let message = [&[1, 9][..], b"kv-events", &[1, 8, 0, 0, 0, 0, 0, 0, 0, 7, 0, 7], b"payload"].concat();
    let long = [&[2, 0, 0, 0, 0, 0, 0, 3, 0xe8][..], &[7; 1_000]].concat();
    vec![
        [&hello[..], &message, &message].concat(),
        [&greeting[..], &message].concat(),
        [&greeting[..], &long].concat(),
        hello,
    ]
}
