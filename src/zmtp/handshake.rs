//! Socket type of a ZMTP peer.
//!
//! After the greetings both peers send a READY command: the name with its length, then properties, each a name with a
//! length of one byte and a value with a length of four bytes. `Socket-Type` is one of them (ZeroMQ RFC 23).

use super::{COMMAND, GREETING_BYTES, LONG, MECHANISM, StreamError, check_greeting};

/// Bytes that suffice for a greeting and a READY command of usual length. Longer commands count as unknown.
pub const HANDSHAKE_BYTES_MAX: usize = GREETING_BYTES + 2 + 255;

const READY: &[u8] = b"\x05READY";
const SOCKET_TYPE: &[u8] = b"\x0bSocket-Type";

/// Socket type of a peer, from its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerSocket {
    /// Further bytes are needed.
    Incomplete,
    /// A publisher: `PUB` or `XPUB`.
    Publisher,
    /// Another socket type, or another command.
    Other,
}

/// Greeting and READY command of a subscriber.
#[must_use]
pub fn subscriber_hello() -> Vec<u8> {
    let mut hello = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0];
    hello.extend(MECHANISM);
    hello.resize(GREETING_BYTES, 0);
    // Flags, length, name, property.
    hello.extend(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB");
    hello
}

/// Socket type of the peer that sent these bytes first.
///
/// # Errors
/// The bytes are not a greeting of ZMTP 3 without security.
pub fn peer_socket(bytes: &[u8]) -> Result<PeerSocket, StreamError> {
    for (at, byte) in bytes.iter().take(GREETING_BYTES).enumerate() {
        check_greeting(at, *byte)?;
    }
    let Some((&flags, frame)) = bytes.get(GREETING_BYTES..).and_then(<[u8]>::split_first) else {
        return Ok(PeerSocket::Incomplete);
    };
    if flags & COMMAND == 0 || flags & LONG != 0 {
        return Ok(PeerSocket::Other);
    }
    let Some((&length, rest)) = frame.split_first() else { return Ok(PeerSocket::Incomplete) };
    let Some(body) = rest.get(..usize::from(length)) else { return Ok(PeerSocket::Incomplete) };
    Ok(match body.strip_prefix(READY).and_then(socket_type) {
        Some(b"PUB" | b"XPUB") => PeerSocket::Publisher,
        Some(_) | None => PeerSocket::Other,
    })
}

/// Value of the property in the properties of a READY command.
fn socket_type(mut properties: &[u8]) -> Option<&[u8]> {
    loop {
        let name_end = 1 + usize::from(*properties.first()?);
        let (name, rest) = properties.split_at_checked(name_end)?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let (value, rest) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
        if name.eq_ignore_ascii_case(SOCKET_TYPE) {
            return Some(value);
        }
        properties = rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First bytes of a peer with this socket type and an identity before it.
    fn peer(socket_type: &[u8]) -> Vec<u8> {
        let mut bytes = subscriber_hello();
        bytes.truncate(GREETING_BYTES);
        let length = u32::try_from(socket_type.len()).expect("short").to_be_bytes();
        let body = [READY, b"\x08Identity", &[0; 4], SOCKET_TYPE, &length, socket_type].concat();
        bytes.extend([COMMAND, u8::try_from(body.len()).expect("short")]);
        bytes.extend(body);
        bytes
    }

    #[test]
    fn publishers_differ_from_other_sockets() {
        for (socket_type, expected) in
            [("PUB", PeerSocket::Publisher), ("XPUB", PeerSocket::Publisher), ("ROUTER", PeerSocket::Other)]
        {
            let bytes = peer(socket_type.as_bytes());
            assert_eq!(peer_socket(&bytes), Ok(expected), "{socket_type}");
            for end in 0..bytes.len() {
                assert_eq!(peer_socket(&bytes[..end]), Ok(PeerSocket::Incomplete), "{socket_type} {end}");
            }
            assert!(bytes.len() <= HANDSHAKE_BYTES_MAX);
        }
    }

    #[test]
    fn other_protocols_and_commands_are_no_publishers() {
        assert!(peer_socket(b"HTTP/1.1 400 Bad Request").is_err());
        let mut message = peer(b"PUB");
        message[GREETING_BYTES] = 0;
        assert_eq!(peer_socket(&message), Ok(PeerSocket::Other));
        let mut cut = peer(b"PUB");
        cut[GREETING_BYTES + 1] -= 1;
        assert_eq!(peer_socket(&cut), Ok(PeerSocket::Other), "a property beyond the end of the command");
        assert_eq!(peer_socket(&subscriber_hello()), Ok(PeerSocket::Other));
    }
}
