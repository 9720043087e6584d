//! Blocks that answers prove, for an index that has missed the beginning of an engine's events.
//!
//! The model is the cache of [`crate::index_copies`]. Each block has a content of its own, so that a content names its
//! prefix; equal contents of different prefixes are an example.

use std::time::Duration;

use pointsman::internals::index::{Applied, BlockDigest, Index};
use pointsman::internals::protocol::{Generation, Slot};
use pointsman::protocol::{BlockHash, EngineHash, KvEvent, StorageTier, Timestamp};
use proptest::prelude::*;

use crate::effort::effort;
use crate::index_copies::{Cache, Mode, Op, RANK, apply, event, held, registered, removed, stored};

fn hashes(prompt: &[u64]) -> Vec<BlockHash> {
    prompt.iter().copied().map(BlockHash).collect()
}

fn seconds(seconds: u64) -> Timestamp {
    Timestamp::default() + Duration::from_secs(seconds)
}

fn prove(index: &mut Index, prompt: &[u64], blocks: u32, is_cold: bool, now: Timestamp) -> Applied {
    let applied = index.prove(RANK, &hashes(prompt), blocks, is_cold, now);
    index.check_invariants();
    applied
}

/// Two old conversations with a common beginning of two blocks, of which the index has the last turns.
fn late() -> Index {
    let mut index = registered();
    for prompt in [[1, 2, 3, 4, 5], [1, 2, 13, 14, 15]] {
        assert_eq!(apply(&mut index, stored(&prompt, 3)).waiting, 2);
    }
    apply(&mut index, stored(&[1, 2, 23], 2));
    index
}

#[test]
fn old_conversations_are_found_at_their_second_turn() {
    let mut index = late();
    assert_eq!(held(&index, &[1, 2, 3, 4, 5]), 0);
    let proven = prove(&mut index, &[1, 2, 3, 4], 3, false, seconds(0));
    assert_eq!((proven.proven, proven.adopted, proven.stored), (3, 2, 0));
    assert_eq!(held(&index, &[1, 2, 3, 4, 5, 6]), 5, "the answer's blocks, and the output behind them");
    assert_eq!(held(&index, &[1, 2, 23]), 2, "of another conversation, only the common beginning");
    apply(&mut index, stored(&[1, 2, 3, 4, 5, 6], 5));
    assert_eq!(held(&index, &[1, 2, 3, 4, 5, 6]), 6);
    // The engine's names end with their removals.
    apply(&mut index, removed(&[1, 2, 3, 4, 5]));
    assert_eq!(held(&index, &[1, 2, 3, 4, 5, 6]), 4);
    assert_eq!(apply(&mut index, removed(&[1, 2, 3])).removed, 1, "the name of the unknown parent is known now");
    assert_eq!(held(&index, &[1, 2, 3, 4]), 2);
    // The others have their time.
    index.expire_proven(seconds(59));
    assert_eq!(held(&index, &[1, 2, 3, 4]), 2);
    index.expire_proven(seconds(120));
    index.check_invariants();
    assert_eq!(held(&index, &[1, 2, 3, 4]), 0);
    // A conversation of the rank is found again: blocks behind the missing ones are evidence.
    assert_eq!(prove(&mut index, &[1, 2, 3, 4, 5, 6], 4, false, seconds(121)).proven, 3);
    assert_eq!(held(&index, &[1, 2, 3, 4]), 4);
}

#[test]
fn repeated_proofs_renew_blocks() {
    let mut index = late();
    prove(&mut index, &[1, 2, 3, 4], 3, false, seconds(0));
    for turn in 1..10 {
        prove(&mut index, &[1, 2, 13, 14], 2, false, seconds(turn * 50));
        index.expire_proven(seconds(turn * 50));
        assert_eq!(held(&index, &[1, 2]), 2);
    }
    index.expire_proven(seconds(450 + 120));
    assert_eq!(held(&index, &[1, 2]), 0);
}

/// The events of the blocks may follow, or the blocks may have been removed since.
#[test]
fn answers_prove_nothing_without_a_loss() {
    let mut index = registered();
    apply(&mut index, stored(&[1, 2], 0));
    let before = index.dump();
    assert_eq!(prove(&mut index, &[1, 2, 3, 4], 4, false, seconds(0)), Applied::default());
    assert_eq!(index.dump(), before);
    // Another block with this content waits, but the next block of the prompt does not wait behind it.
    apply(&mut index, stored(&[7, 3, 9], 1));
    assert_eq!(prove(&mut index, &[1, 2, 3, 4], 2, false, seconds(0)), Applied::default());
    assert_eq!(prove(&mut index, &[1, 2, 3, 4], 4, false, seconds(0)), Applied::default());
    // Two waiting blocks with the content.
    let mut index = late();
    apply(&mut index, stored(&[31, 32, 33, 4], 3));
    assert_eq!(prove(&mut index, &[1, 2, 3, 4], 3, false, seconds(0)), Applied::default());
    assert_eq!((held(&index, &[1, 2, 3]), index.names_of(RANK).len()), (0, 6));
    // A waiting block behind a waiting block does not name the answer's blocks.
    let mut index = registered();
    apply(&mut index, stored(&[1, 2, 3, 4, 5], 3));
    assert_eq!(prove(&mut index, &[1, 2, 3, 14, 5], 4, false, seconds(0)), Applied::default());
}

#[test]
fn cold_ranks_need_no_waiting_block() {
    let mut index = registered();
    let prompt = [1, 2, 3, 4];
    assert_eq!(prove(&mut index, &prompt, 3, true, seconds(0)).proven, 3);
    assert_eq!(held(&index, &prompt), 3);
    // Blocks in flight: the engine's own names replace those of the index.
    apply(&mut index, stored(&prompt[..2], 0));
    apply(&mut index, removed(&prompt[..2]));
    assert_eq!((held(&index, &prompt[..2]), held(&index, &prompt)), (1, 1));
    index.apply(&event(KvEvent::Cleared));
    assert_eq!(index.held_blocks(), 0);
    // Clearing the tier ends them as well.
    prove(&mut index, &prompt, 3, true, seconds(0));
    apply(&mut index, KvEvent::TierCleared);
    assert_eq!((index.held_blocks(), prove(&mut index, &prompt, 3, false, seconds(0))), (0, Applied::default()));
}

#[test]
fn audits_and_dumps_contain_the_engine_s_names_only() {
    let mut index = late();
    let digest = |index: &Index| index.digest_of(RANK).expect("registered");
    let mut names = index.names_of(RANK);
    prove(&mut index, &[1, 2, 3, 4], 3, false, seconds(0));
    prove(&mut index, &[41, 42], 2, true, seconds(0));
    names.push((StorageTier::Device, EngineHash(crate::index_copies::name(&[1, 2, 3]).0)));
    names.sort_unstable();
    let mut found = index.names_of(RANK);
    found.sort_unstable();
    assert_eq!((&found, digest(&index)), (&names, names.iter().copied().collect::<BlockDigest>()));
    let mut restored = registered();
    index.dump().iter().for_each(|event| _ = restored.apply(event));
    restored.check_invariants();
    assert_eq!((digest(&restored), held(&restored, &[1, 2, 3, 4]), held(&restored, &[41])), (digest(&index), 0, 0));
    assert_eq!(prove(&mut restored, &[1, 2, 3, 4], 3, true, seconds(0)).proven, 2);
    assert_eq!(held(&restored, &[1, 2, 3, 4, 5]), 5);
}

#[test]
fn ranks_with_evicted_blocks_or_cache_groups_have_no_proven_blocks() {
    let mut index = late();
    index.set_budget(Some(1));
    index.set_budget(Some(1 << 20));
    assert_eq!(prove(&mut index, &[1, 2, 3, 4], 3, true, seconds(0)), Applied::default());
    let mut index = late();
    let (window_blocks, starts_prompt, blocks) = (std::num::NonZeroU32::MIN, true, vec![EngineHash(1)]);
    apply(&mut index, KvEvent::GroupStored { group: 1, window_blocks, starts_prompt, blocks });
    assert_eq!(prove(&mut index, &[1, 2, 3, 4], 3, true, seconds(0)), Applied::default());
    assert!(index.register(RANK, Slot(0), Generation(2)));
    assert_eq!(prove(&mut index, &[1, 2, 3, 4], 3, true, seconds(0)).proven, 3, "another rank in the slot");
}

#[test]
fn a_budget_holds_with_proven_blocks() {
    let mut index = registered();
    index.set_budget(Some(1 << 20));
    for conversation in 0..200_u64 {
        let prompt: Vec<_> = (0..300).map(|block| conversation << 32 | block).collect();
        prove(&mut index, &prompt, 300, true, seconds(conversation));
        index.expire_proven(seconds(conversation));
        index.check_invariants();
        assert!(index.bytes_used() <= 1 << 20);
        if index.evicted_blocks_of(Slot(0)) > 0 {
            return;
        }
    }
    panic!("{} blocks within the budget", index.held_blocks());
}

/// A step of a rank's engine, and the seconds until the next one.
#[derive(Clone, Debug)]
enum Step {
    Begin(Vec<bool>, bool),
    Generate(prop::sample::Index, bool),
    End(prop::sample::Index),
}

fn steps() -> impl Strategy<Value = Vec<(Step, u64)>> {
    let which = any::<prop::sample::Index>();
    let step = prop_oneof![
        8 => (prop::collection::vec(any::<bool>(), 1..6), any::<bool>()).prop_map(|(bits, is_partial)| Step::Begin(bits, is_partial)),
        3 => (which.clone(), any::<bool>()).prop_map(|(which, bit)| Step::Generate(which, bit)),
        8 => which.prop_map(Step::End),
    ];
    prop::collection::vec((step, 0..50_u64), 1..120)
}

/// Blocks of a prompt. Each number contains those before it.
fn prompt(bits: &[bool]) -> Vec<u64> {
    let next = |code: &mut u64, bit: &bool| {
        *code = 2 * *code + u64::from(*bit);
        Some(*code)
    };
    bits.iter().scan(1, next).collect()
}

proptest! {
    #![proptest_config(effort(150, "tests/index_proofs.proptest-regressions"))]

    /// A block that the engine has evicted stands only if an answer has proven it within the documented time. All names
    /// are the engine's, before and after.
    #[test]
    fn proven_blocks_end_in_time(slots in 6..16_usize, late in 0..60_usize, is_cold in any::<bool>(), steps in steps()) {
        let (mut cache, mut index) = (Cache::new(slots), registered());
        let (mut running, mut answers, mut now) = (Vec::new(), Vec::new(), seconds(0));
        let all: Vec<_> = (1..=5).flat_map(|len| (0..1_u32 << len).map(move |bits| {
            prompt(&(0..len).map(|at| bits >> at & 1 == 1).collect::<Vec<_>>())
        })).collect();
        for (n, (step, pause)) in steps.iter().enumerate() {
            let mut answer = None;
            match step {
                Step::Begin(bits, is_partial) => {
                    let prompt = prompt(bits);
                    let hit = cache.hit(&prompt[..prompt.len() - usize::from(!is_partial)]);
                    let before = cache.running.len();
                    cache.run(&Op::Begin { prompt: prompt.clone(), is_partial: *is_partial, mode: Mode::Plain });
                    running.extend((cache.running.len() > before).then_some((prompt, hit)));
                }
                Step::Generate(which, bit) if !running.is_empty() => {
                    let last = *cache.running[which.index(running.len())].0.last().expect("a block");
                    if last < 32 && !cache.free.is_empty() {
                        cache.run(&Op::Generate { which: *which, block: 2 * last + u64::from(*bit) });
                        let moved = running.swap_remove(which.index(running.len()));
                        running.push(moved);
                    }
                }
                Step::End(which) if !running.is_empty() => {
                    cache.run(&Op::End { which: *which });
                    let (prompt, hit) = running.swap_remove(which.index(running.len()));
                    answer = Some((prompt, hit, now)).filter(|_| n >= late);
                }
                Step::Generate(..) | Step::End(_) => {}
            }
            let events: Vec<_> = cache.events.drain(..).filter(|_| n >= late).map(event).collect();
            events.iter().for_each(|event| _ = index.apply(event));
            index.expire_proven(now);
            if let Some((prompt, hit, _)) = &answer {
                prove(&mut index, prompt, *hit as u32, is_cold, now);
                prop_assert!(!is_cold || held(&index, prompt) >= *hit);
            }
            answers.extend(answer);
            index.check_invariants();
            for (_, name) in index.names_of(RANK) {
                prop_assert!(cache.held.keys().any(|prefix| crate::index_copies::name(prefix) == name), "{step:?}");
            }
            for prompt in &all {
                let (found, hit) = (held(&index, prompt), cache.hit(prompt));
                let is_proven = |(proven, blocks, at): &(Vec<u64>, usize, Timestamp)| {
                    proven.len().min(*blocks) > hit && proven[..=hit] == prompt[..=hit] && now.since(*at) <= Index::PROVEN_FOR
                };
                prop_assert!(found <= hit || answers.iter().any(is_proven), "{found} of {hit} of {prompt:?} after {step:?}");
            }
            now = now + Duration::from_secs(*pause);
        }
        index.expire_proven(now + Index::PROVEN_FOR);
        for prompt in &all {
            prop_assert!(held(&index, prompt) <= cache.hit(prompt));
        }
    }
}
