//! Envelope of every message on NATS: sender, sequence number, time, and with a shared key a tag.
//!
//! Layout, integers little-endian: version (1 byte), replica id, incarnation, sequence number, sending time in Unix
//! milliseconds (8 bytes each), the content, and with a key HMAC-SHA256 over subject and all before it (32 bytes). A
//! message of another subject, a changed one, and one sent long ago are refused; [`Sequences`] refuses repeated ones.

use std::cmp::Ordering::{Equal, Greater, Less};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use pointsman::{ReplicaId, ReplicaLife};
use ring::hmac;
use tokio::time::Instant;

use crate::replicas::lives::Lives;
use crate::replicas::meters::RefusalReason;
use crate::settings::Secret;

/// Version of subjects and envelopes.
const VERSION: u8 = 1;

const HEAD_BYTES: usize = 33;
const TAG_BYTES: usize = 32;

/// Length that an envelope adds to its content, in bytes.
pub(super) const OVERHEAD_BYTES: usize = HEAD_BYTES + TAG_BYTES;

/// With a key, messages sent longer ago are refused, so the clocks of replicas may differ by half a minute.
const AGE_MAX_MS: u64 = 30_000;

/// Silence after which an earlier life may return: no message of it that could be repeated is valid any longer.
const FORGET_AFTER: Duration = Duration::from_millis(2 * AGE_MAX_MS);

/// Replicas and subjects whose sequence numbers are kept.
const REPLICAS_MAX: usize = 256;
const SUBJECTS_MAX: usize = 1_024;

/// A refused message: reason and detail.
pub(super) type Refused = (RefusalReason, &'static str);

/// A received message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Envelope {
    pub(super) from: ReplicaLife,
    pub(super) sequence: u64,
    pub(super) content: Bytes,
}

/// Creates and checks envelopes.
pub(super) struct Sealer {
    life: ReplicaLife,
    key: Option<hmac::Key>,
    next: AtomicU64,
}

impl Sealer {
    pub(super) fn new(life: ReplicaLife, key: Option<&Secret>) -> Self {
        let key = key.map(|key| hmac::Key::new(hmac::HMAC_SHA256, key.as_bytes()));
        Self { life, key, next: AtomicU64::new(1) }
    }

    /// The next message on `subject`.
    pub(super) fn seal(&self, subject: &str, content: &[u8], now_ms: u64) -> Bytes {
        let sequence = self.next.fetch_add(1, Ordering::Relaxed);
        let mut message = Vec::with_capacity(content.len() + OVERHEAD_BYTES);
        message.push(VERSION);
        for number in [self.life.replica.0, self.life.incarnation, sequence, now_ms] {
            message.extend_from_slice(&number.to_le_bytes());
        }
        message.extend_from_slice(content);
        if let Some(key) = &self.key {
            let tag = tag(key, subject, &message);
            message.extend_from_slice(tag.as_ref());
        }
        message.into()
    }

    /// The envelope of a message received on `subject`.
    pub(super) fn open(&self, subject: &str, message: &Bytes, now_ms: u64) -> Result<Envelope, Refused> {
        let (sent_ms, envelope) = self.read(subject, message)?;
        if self.key.is_some() && sent_ms.abs_diff(now_ms) > AGE_MAX_MS {
            return Err((RefusalReason::Stale, "sent more than 30 s ago, or the clocks differ"));
        }
        Ok(envelope)
    }

    /// The envelope of a message that was stored as `name`, at any time.
    pub(super) fn open_stored(&self, name: &str, message: &Bytes) -> Result<Envelope, Refused> {
        self.read(name, message).map(|(_, envelope)| envelope)
    }

    /// Sending time and envelope of an authentic message.
    fn read(&self, subject: &str, message: &Bytes) -> Result<(u64, Envelope), Refused> {
        let tag_bytes = if self.key.is_some() { TAG_BYTES } else { 0 };
        match message.first() {
            Some(&VERSION) if message.len() >= HEAD_BYTES + tag_bytes => {}
            Some(&VERSION) | None => return Err((RefusalReason::Malformed, "incomplete envelope")),
            Some(_) => return Err((RefusalReason::Version, "another version of the envelope")),
        }
        let (signed, shown) = message.split_at(message.len() - tag_bytes);
        if let Some(key) = &self.key {
            // Both are signed once more, because only `ring` compares in constant time.
            let expected = tag(key, subject, signed);
            if hmac::verify(key, shown, hmac::sign(key, expected.as_ref()).as_ref()).is_err() {
                return Err((RefusalReason::Authentication, "the tag is invalid"));
            }
        }
        let number = |n: usize| {
            let bytes = &message[1 + 8 * n..9 + 8 * n];
            bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
        };
        let from = ReplicaLife { replica: ReplicaId(number(0)), incarnation: number(1) };
        let content = message.slice(HEAD_BYTES..signed.len());
        Ok((number(3), Envelope { from, sequence: number(2), content }))
    }
}

fn tag(key: &hmac::Key, subject: &str, message: &[u8]) -> hmac::Tag {
    let mut context = hmac::Context::with_key(key);
    context.update(b"pointsman replicas v1 nats ");
    context.update(subject.as_bytes());
    context.update(&[0]);
    context.update(message);
    context.sign()
}

/// Last sequence numbers of other replicas, by subject.
#[derive(Default)]
pub(super) struct Sequences(BTreeMap<ReplicaId, SenderSequences>);

struct SenderSequences {
    lives: Lives,
    last: BTreeMap<String, u64>,
    /// Time of the last accepted message.
    heard_at: Instant,
}

impl Sequences {
    /// Accepts a message if it is later than all accepted ones of its sender and subject.
    pub(super) fn accept(&mut self, subject: &str, envelope: &Envelope) -> Result<(), Refused> {
        let ReplicaLife { replica, incarnation } = envelope.from;
        if self.0.len() >= REPLICAS_MAX && !self.0.contains_key(&replica) {
            return Err((RefusalReason::Connections, "more than 256 replicas"));
        }
        let new = |lives| SenderSequences { lives, last: BTreeMap::new(), heard_at: Instant::now() };
        let sender = self.0.entry(replica).or_insert_with(|| new(Lives::new(incarnation)));
        match sender.lives.order(incarnation) {
            // While the later life sends, and as long as messages of the earlier one can be repeated.
            Less if sender.heard_at.elapsed() < FORGET_AFTER => {
                return Err((RefusalReason::Stale, "an earlier life of the replica"));
            }
            Equal => {}
            Less | Greater => {
                sender.lives.replace(incarnation);
                *sender = new(sender.lives.clone());
            }
        }
        sender.heard_at = Instant::now();
        let subjects = sender.last.len();
        match sender.last.get_mut(subject) {
            Some(last) if *last >= envelope.sequence => Err((RefusalReason::Authentication, "a repeated message")),
            Some(last) => {
                *last = envelope.sequence;
                Ok(())
            }
            None if subjects >= SUBJECTS_MAX => Err((RefusalReason::Connections, "more than 1,024 subjects")),
            None => {
                sender.last.insert(subject.to_owned(), envelope.sequence);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_MS: u64 = 1_700_000_000_000;

    fn sealer(id: u64, incarnation: u64, key: Option<&str>) -> Sealer {
        let life = ReplicaLife { replica: ReplicaId(id), incarnation };
        Sealer::new(life, key.map(Secret::new).as_ref())
    }

    fn reason<T>(result: Result<T, Refused>) -> Option<RefusalReason> {
        result.err().map(|(reason, _)| reason)
    }

    #[test]
    fn changed_moved_and_old_messages_are_refused() {
        let (one, two) = (sealer(1, 7, Some("0123456789abcdef")), sealer(2, 7, Some("0123456789abcdef")));
        let message = one.seal("subject", b"content", NOW_MS);
        for n in 1..message.len() {
            let mut changed = message.to_vec();
            changed[n] ^= 1;
            let opened = two.open("subject", &changed.into(), NOW_MS);
            assert_eq!(reason(opened), Some(RefusalReason::Authentication), "byte {n}");
        }
        assert_eq!(reason(two.open("other", &message, NOW_MS)), Some(RefusalReason::Authentication));
        assert_eq!(two.open_stored("subject", &message).map(|envelope| envelope.content), Ok("content".into()));
        assert_eq!(reason(two.open_stored("other", &message)), Some(RefusalReason::Authentication));
        for now_ms in [NOW_MS + AGE_MAX_MS + 1, NOW_MS - AGE_MAX_MS - 1] {
            assert_eq!(reason(two.open("subject", &message, now_ms)), Some(RefusalReason::Stale));
        }
        assert_eq!(reason(two.open("subject", &message, NOW_MS + AGE_MAX_MS)), None);
        let stranger = sealer(2, 7, Some("another key of 16"));
        assert_eq!(reason(stranger.open("subject", &message, NOW_MS)), Some(RefusalReason::Authentication));
    }

    #[test]
    fn other_versions_and_incomplete_messages_are_refused() {
        let two = sealer(2, 7, None);
        assert_eq!(reason(two.open("s", &Bytes::new(), NOW_MS)), Some(RefusalReason::Malformed));
        assert_eq!(reason(two.open("s", &vec![VERSION; 32].into(), NOW_MS)), Some(RefusalReason::Malformed));
        assert_eq!(reason(two.open("s", &vec![VERSION + 1; 99].into(), NOW_MS)), Some(RefusalReason::Version));
    }

    #[tokio::test(start_paused = true)]
    async fn repeated_messages_and_earlier_lives_are_refused() {
        let (old, new) = (sealer(1, 7, None), sealer(1, 6, None)); // the clock has gone back
        let envelope = |sealer: &Sealer| sealer.open("s", &sealer.seal("s", b"", NOW_MS), NOW_MS).expect("valid");
        let (first, second, of_new) = (envelope(&old), envelope(&old), envelope(&new));
        let mut sequences = Sequences::default();
        assert_eq!(sequences.accept("s", &second), Ok(()));
        for repeated in [&first, &second] {
            assert_eq!(reason(sequences.accept("s", repeated)), Some(RefusalReason::Authentication));
        }
        assert_eq!(sequences.accept("t", &first), Ok(()), "another subject");
        assert_eq!(sequences.accept("s", &of_new), Ok(()), "sequence numbers of a later life start again");
        assert_eq!(reason(sequences.accept("s", &second)), Some(RefusalReason::Stale));
        tokio::time::advance(FORGET_AFTER).await;
        assert_eq!(sequences.accept("s", &second), Ok(()), "it is alone");
        assert_eq!(reason(sequences.accept("s", &of_new)), Some(RefusalReason::Stale));
    }
}
