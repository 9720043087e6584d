//! Authentication of connections and frames with a shared key.
//!
//! Both sides prove the key over the two hellos, whose nonces make every connection unique. Each direction of a
//! connection has a key derived from the same bytes, and the tag of a frame covers its number. A forged, repeated,
//! omitted or reordered frame therefore has a wrong tag.

use ring::hmac;

use crate::settings::Secret;

/// Length of a proof and of a tag, in bytes.
pub(super) const TAG_BYTES: usize = 32;

/// Side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// The side that connects and publishes.
    Dialling,
    /// The side that listens and receives messages.
    Accepting,
}

impl Side {
    pub(super) fn other(self) -> Self {
        match self {
            Self::Dialling => Self::Accepting,
            Self::Accepting => Self::Dialling,
        }
    }
}

/// The shared key of a deployment.
pub(super) struct DeploymentKey(hmac::Key);

impl DeploymentKey {
    pub(super) fn new(secret: &Secret) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes()))
    }

    /// Proof of the key by one side of a connection with these hellos.
    pub(super) fn proof(&self, side: Side, hellos: &[u8]) -> hmac::Tag {
        let label = match side {
            Side::Dialling => b"pointsman replicas v1 proof of dialling  ",
            Side::Accepting => b"pointsman replicas v1 proof of accepting ",
        };
        hmac::sign(&self.0, &[label, hellos].concat())
    }

    /// Whether the other side has the key. Compares in constant time.
    pub(super) fn is_proof(&self, side: Side, hellos: &[u8], shown: &[u8]) -> bool {
        is_equal(&self.0, self.proof(side, hellos), shown)
    }

    /// The tags of the frames that `side` sends.
    pub(super) fn seal(&self, side: Side, hellos: &[u8]) -> Seal {
        let label = match side {
            Side::Dialling => b"pointsman replicas v1 frames of dialling ",
            Side::Accepting => b"pointsman replicas v1 frames of accepting",
        };
        let derived = hmac::sign(&self.0, &[label, hellos].concat());
        Seal { key: hmac::Key::new(hmac::HMAC_SHA256, derived.as_ref()), frames: 0 }
    }
}

/// Tags of the frames of one direction.
pub(super) struct Seal {
    key: hmac::Key,
    /// Number of frames so far.
    frames: u64,
}

impl Seal {
    /// Tag of the next frame.
    pub(super) fn tag(&mut self, body: &[u8]) -> hmac::Tag {
        let mut context = hmac::Context::with_key(&self.key);
        context.update(&self.frames.to_le_bytes());
        context.update(body);
        self.frames += 1;
        context.sign()
    }

    /// Whether `tag` is that of the next frame. Compares in constant time.
    pub(super) fn accepts(&mut self, body: &[u8], tag: &[u8]) -> bool {
        let expected = self.tag(body);
        is_equal(&self.key, expected, tag)
    }
}

/// Compares in constant time, by comparing the tags of both.
fn is_equal(key: &hmac::Key, expected: hmac::Tag, shown: &[u8]) -> bool {
    hmac::verify(key, shown, hmac::sign(key, expected.as_ref()).as_ref()).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(content: &str) -> DeploymentKey {
        DeploymentKey::new(&Secret::new(content))
    }

    #[test]
    fn proofs_depend_on_key_side_and_hellos() {
        let (one, other) = (key("0123456789abcdef"), key("0123456789abcdeF"));
        let proof = one.proof(Side::Dialling, b"hellos");
        assert!(one.is_proof(Side::Dialling, b"hellos", proof.as_ref()));
        assert!(!one.is_proof(Side::Accepting, b"hellos", proof.as_ref()), "a reflected proof");
        assert!(!one.is_proof(Side::Dialling, b"others", proof.as_ref()), "a replayed proof");
        assert!(!other.is_proof(Side::Dialling, b"hellos", proof.as_ref()), "another key");
        assert!(!one.is_proof(Side::Dialling, b"hellos", &[]), "no proof");
    }
}
