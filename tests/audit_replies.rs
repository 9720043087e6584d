//! Audits behind incomplete replies: gaps, missing ends, single findings, and changes during an audit.
//!
//! The engine publishes 301 messages: 299 stores of one block each, a removal of 60 blocks, and a store.

use std::collections::BTreeSet;
use std::time::Duration;

use pointsman::EngineContents;
use pointsman::internals::index::BlockDigest;
use pointsman::internals::ingest::{
    Audit, AuditCause, AuditResult, AuditStep, BlockName, DIGEST_REQUEST, Difference, Heal, NAMES_REQUEST,
};
use pointsman::protocol::{BlockHash, EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, Timestamp};
use pointsman::test_support::{mix, rank};

const INTERVAL: Duration = Duration::from_secs(60);
const MESSAGES: u64 = 301;

fn event(data: KvEvent) -> RouterEvent {
    RouterEvent { rank: rank(1), tier: StorageTier::Device, data }
}

fn stored(name: u64) -> RouterEvent {
    let block = StoredBlock { engine_hash: EngineHash(name), block_hash: BlockHash(mix(name)) };
    event(KvEvent::Stored { parent: None, blocks: vec![block] })
}

fn removed(names: impl IntoIterator<Item = u64>) -> RouterEvent {
    event(KvEvent::Removed { blocks: names.into_iter().map(EngineHash).collect() })
}

fn message(sequence: u64) -> RouterEvent {
    match sequence {
        299 => removed(1..=60),
        300 => stored(1000),
        _ => stored(sequence + 1),
    }
}

fn name(name: u64) -> BlockName {
    (StorageTier::Device, EngineHash(name))
}

/// The blocks of the engine after all messages.
fn held() -> BTreeSet<BlockName> {
    (61..=299).chain([1000]).map(name).collect()
}

fn inconclusive(cause: AuditCause) -> AuditResult {
    AuditResult::Inconclusive(cause)
}

/// Audits of an index, with replies of the engine.
struct Audits {
    audit: Audit,
    now: Timestamp,
    index: BTreeSet<BlockName>,
    requests: Vec<u64>,
}

impl Audits {
    fn new(index: BTreeSet<BlockName>) -> Self {
        let now = Timestamp::default();
        Self { audit: Audit::new(INTERVAL, now), now, index, requests: Vec::new() }
    }

    /// An audit when it is due. Each request receives the messages of the buffer for which `arrives(from, sequence)`;
    /// [`u64::MAX`] is the end mark. `during` runs before the comparison.
    fn audit_with(&mut self, arrives: impl Fn(u64, u64) -> bool, during: impl FnOnce(&mut Self)) -> AuditResult {
        self.now = self.audit.due().expect("enabled").max(self.now);
        self.requests.clear();
        assert_eq!(self.audit.begin(self.now, MESSAGES, BlockDigest::default()), AuditStep::Request(DIGEST_REQUEST));
        let mut step = self.audit.unsupported(self.now, MESSAGES);
        loop {
            match step {
                AuditStep::Request(from) => {
                    self.requests.push(from);
                    for sequence in (from..MESSAGES).filter(|sequence| arrives(from, *sequence)) {
                        self.audit.ring_message(self.now, sequence, || Some(vec![message(sequence)]));
                    }
                    if arrives(from, u64::MAX) {
                        self.audit.ring_ended();
                    }
                }
                AuditStep::Wait => self.now = self.audit.due().expect("running"),
                AuditStep::QueryNames => {
                    during(self);
                    return self.audit.compare(self.now, &self.index);
                }
                AuditStep::Ended(result) => return result,
            }
            step = self.audit.step(self.now, MESSAGES);
        }
    }

    fn audit(&mut self, arrives: impl Fn(u64, u64) -> bool) -> AuditResult {
        self.audit_with(arrives, |_| {})
    }
}

fn is_dropped(sequence: u64) -> bool {
    (100..140).contains(&sequence) || sequence == 299
}

#[test]
fn the_rest_of_a_reply_with_a_gap_is_requested() {
    let mut audits = Audits::new(held());
    // A ROUTER socket at its high-water mark drops messages in the middle, and sends the end mark.
    assert_eq!(audits.audit(|from, sequence| from > 0 || !is_dropped(sequence)), AuditResult::Equal);
    assert_eq!(audits.requests, [0, 100]);
    // Or it drops the end mark with all messages before it.
    assert_eq!(audits.audit(|from, sequence| sequence < from + 120), AuditResult::Equal);
    assert_eq!(audits.requests, [0, 120, 240]);
    // The end comes early.
    let is_cut = |from: u64, sequence: u64| (from == 0 && sequence >= 298) && sequence != u64::MAX;
    assert_eq!(audits.audit(|from, sequence| !is_cut(from, sequence)), AuditResult::Equal);
    assert_eq!(audits.requests, [0, 298]);
}

#[test]
fn messages_that_never_arrive_make_audits_inconclusive() {
    for (first, last) in [(100, 139), (299, 299), (299, 300), (1, 300), (0, 300)] {
        let mut audits = Audits::new(held());
        for n in 1..=4 {
            let result = audits.audit(|_, sequence| !(first..=last).contains(&sequence));
            assert_eq!(result, inconclusive(AuditCause::IncompleteReply), "{first} to {last}");
            assert!(audits.requests.len() <= 2, "{first} to {last}: {:?}", audits.requests);
            assert_eq!(audits.audit.is_notice_due(), n == 3, "{first} to {last}: reported once");
        }
        assert_eq!(audits.audit(|_, _| true), AuditResult::Equal);
        assert!(!audits.audit.is_notice_due());
    }
    let mut audits = Audits::new(held());
    assert_eq!(audits.audit(|_, _| false), inconclusive(AuditCause::NoReply));
    // Requests end, although every reply has a new message.
    assert_eq!(audits.audit(|from, sequence| sequence < from + 2), inconclusive(AuditCause::IncompleteReply));
    assert_eq!(audits.requests.len(), 16);
}

#[test]
fn a_correction_requires_two_equal_findings() {
    let mut index = held();
    index.extend([name(1), name(2)]);
    index.remove(&name(200));
    let mut audits = Audits::new(index);
    assert_eq!(audits.audit(|_, _| true), inconclusive(AuditCause::Unconfirmed));
    let found_at = audits.now;
    // The index learns that block 2 is gone, and loses block 1000.
    audits.index.remove(&name(2));
    audits.index.remove(&name(1000));
    let confirmed = Difference { stale: vec![name(1)], missing: vec![name(200)], since: None };
    assert_eq!(audits.audit(|_, _| true), AuditResult::Different(confirmed.clone()));
    assert_eq!(audits.now, found_at + Duration::from_secs(1));
    let heal = audits.audit.heal(audits.now, &confirmed, audits.index.len());
    assert_eq!(heal, Heal::Forget(vec![name(1)]));
    // Two findings without a common block are no evidence, and more of them keep the interval.
    let mut audits = Audits::new(held());
    for stale in 1..=6 {
        audits.index = held();
        audits.index.insert(name(stale));
        let before = audits.now;
        assert_eq!(audits.audit(|_, _| true), inconclusive(AuditCause::Unconfirmed), "block {stale}");
        assert_eq!(audits.now.since(before) > Duration::from_secs(1), stale == 1 || stale > 3, "block {stale}");
    }
    // Equal contents between them disprove a finding.
    audits.index = held();
    assert_eq!(audits.audit(|_, _| true), AuditResult::Equal);
    audits.index.insert(name(6));
    assert_eq!(audits.audit(|_, _| true), inconclusive(AuditCause::Unconfirmed));
}

#[test]
fn a_correction_spares_blocks_that_changed_during_the_audit() {
    let mut index = held();
    index.insert(name(1));
    index.remove(&name(200));
    let mut audits = Audits::new(index);
    assert_eq!(audits.audit(|_, _| true), inconclusive(AuditCause::Unconfirmed));
    let change = |audits: &mut Audits| {
        let (next, events) = (MESSAGES + 1, [stored(1), removed([200]), stored(2000), removed([300])]);
        audits.audit.applied(next, &events, None);
        audits.index.insert(name(2000));
    };
    assert_eq!(audits.audit_with(|_, _| true, change), AuditResult::Equal);
    let clear = |audits: &mut Audits| {
        audits.audit.applied(MESSAGES + 1, &[event(KvEvent::Cleared)], None);
        audits.index.clear();
    };
    assert_eq!(audits.audit_with(|_, _| true, clear), inconclusive(AuditCause::Changed));
}

#[test]
fn unreadable_events_and_broken_replies_have_a_cause() {
    let mut audit = Audit::new(INTERVAL, Timestamp::default());
    let now = Timestamp::default();
    audit.begin(now, 2, BlockDigest::default());
    audit.unsupported(now, 2);
    audit.ring_message(now, 0, || Some(vec![stored(1)]));
    audit.ring_message(now, 1, || None);
    assert_eq!(audit.step(now, 2), AuditStep::Ended(inconclusive(AuditCause::RejectedEvents)));
    audit.begin(now, 2, BlockDigest::default());
    audit.fail(AuditCause::BrokenReply);
    assert_eq!(audit.step(now, 2), AuditStep::Ended(inconclusive(AuditCause::BrokenReply)));
    assert_eq!(audit.step(now, 2), AuditStep::Wait);
    // Names at a position before the request are those of another life of the engine.
    audit.begin(now, 2, BlockDigest { sum: 1, blocks: 1 });
    audit.replied(2, EngineContents::Digest(BlockDigest { sum: 2, blocks: 1 }));
    assert_eq!(audit.step(now, 2), AuditStep::Request(NAMES_REQUEST));
    audit.replied(1, EngineContents::Names([name(1)].into()));
    assert_eq!(audit.step(now, 2), AuditStep::Ended(inconclusive(AuditCause::IncompleteReply)));
}

#[test]
fn malformed_replies_are_rejected() {
    let names = EngineContents::Names([(StorageTier::Disk, EngineHash(9))].into());
    for contents in [names, EngineContents::Digest(BlockDigest { sum: 1, blocks: 2 })] {
        let payload = contents.encode();
        assert_eq!(EngineContents::decode(&payload), Some(contents));
        let is_rejected =
            |len: usize| len == 4 && payload.starts_with(b"KVN1") || EngineContents::decode(&payload[..len]).is_none();
        assert!((0..payload.len()).all(is_rejected));
    }
    assert_eq!(EngineContents::decode(b"KVN1\x04\0\0\0\0\0\0\0\0"), None, "there are four tiers");
}
