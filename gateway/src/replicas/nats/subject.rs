//! Subjects: `pointsman.v1.POOL.TOPIC` for messages, `pointsman.v1.fetch.REPLICA.snapshot` for requests.

use std::fmt::Write as _;

use pointsman::{ReplicaId, ReplicaTopic};

/// Subjects of all messages.
pub(super) const MESSAGES: &str = "pointsman.v1.*.*";

/// Subject of a message.
pub(super) fn message(pool: &str, topic: ReplicaTopic) -> String {
    format!("pointsman.v1.{}.{}", encode(pool), topic.name())
}

/// Pool and topic of a message.
pub(super) fn pool_and_topic(subject: &str) -> Option<(String, ReplicaTopic)> {
    let (pool, topic) = subject.strip_prefix("pointsman.v1.")?.split_once('.')?;
    let topic = ReplicaTopic::ALL.into_iter().find(|known| known.name() == topic)?;
    Some((decode(pool)?, topic))
}

/// Subject of requests for snapshots of a replica.
pub(super) fn fetch(replica: ReplicaId) -> String {
    format!("pointsman.v1.fetch.{replica}.snapshot")
}

/// One token of a subject: letters, digits, `-` and `_` stay, other bytes become `=` and two hexadecimal digits. The
/// empty name is `=`.
pub(super) fn encode(pool: &str) -> String {
    if pool.is_empty() {
        return "=".to_owned();
    }
    let mut token = String::with_capacity(pool.len());
    for byte in pool.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_".contains(&byte) {
            token.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(token, "={byte:02x}");
        }
    }
    token
}

fn decode(token: &str) -> Option<String> {
    if token == "=" {
        return Some(String::new());
    }
    let (mut bytes, mut rest) = (Vec::with_capacity(token.len()), token.bytes());
    while let Some(byte) = rest.next() {
        if byte == b'=' {
            let digits = [rest.next()?, rest.next()?];
            bytes.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_are_single_tokens_and_return_unchanged() {
        for pool in ["llama", "org/model-7b_x", "a.b *>=ü", "", "fetch", "="] {
            for topic in ReplicaTopic::ALL {
                let subject = message(pool, topic);
                assert_eq!(subject.split('.').count(), 4, "{subject}");
                assert!(subject.bytes().all(|byte| byte.is_ascii_graphic() && !b"*>".contains(&byte)), "{subject}");
                assert_eq!(pool_and_topic(&subject), Some((pool.to_owned(), topic)));
            }
        }
    }

    #[test]
    fn other_subjects_are_refused() {
        for subject in ["pointsman.v1.a", "pointsman.v2.a.load", "pointsman.v1.a.other", "pointsman.v1.=f.load"] {
            assert_eq!(pool_and_topic(subject), None, "{subject}");
        }
        assert_eq!(pool_and_topic(&fetch(ReplicaId(1))), None);
    }
}
