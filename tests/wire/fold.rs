//! Engines whose blocks are parts of the pool's: SGLang with its default page size of one token, and mixed pools.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::Index as Pick;

use super::*;
use crate::effort::effort;
use StorageTier::Device;

/// A store of pages in blocks of 4 tokens.
fn pages(names: &[u64], parent: Option<u64>, tokens: &[u32], size: u64, more: Vec<(&'static str, Msg)>) -> Msg {
    let mut event = store(names.iter().copied(), parent, tokens, more);
    let Msg::Map(fields) = &mut event else { unreachable!() };
    fields[4].1 = size.into();
    event
}

/// Pages of one token whose names are the positions behind them.
fn singles(range: std::ops::Range<u64>) -> Msg {
    let names: Vec<_> = range.clone().map(|at| at + 1).collect();
    let tokens: Vec<_> = range.clone().map(|at| TOKENS[at as usize % 8]).collect();
    pages(&names, (range.start > 0).then_some(range.start), &tokens, 1, vec![])
}

#[test]
fn blocks_of_the_pools_size_end_the_folding_of_partial_ones() {
    let mut decoder = decoder();
    assert_eq!(next(&mut decoder, [singles(0..4)]).0.len(), 1);
    let whole = store([21, 22], None, &TOKENS, []);
    let (events, report) = next(&mut decoder, [whole.clone()]);
    assert_eq!(events, [tier_cleared(Device), stored(Device, None, &[(21, PLAIN[0]), (22, PLAIN[1])])]);
    assert_eq!((report.page_size, decoder.is_folding()), (None, false));
    assert_eq!(found(&next(&mut decoder, [singles(0..4)]).1), [(Finding::BlockSize, 1)], "partial blocks");
    let mut resumed = Decoder::resume(config(), &decoder.state());
    assert_eq!(found(&next(&mut resumed, [singles(0..4)]).1), [(Finding::BlockSize, 1)]);
    // Sizes that do not divide the pool's, and a second size.
    for size in [3, 8] {
        let other = pages(&[1], None, &TOKENS[..size as usize], size, vec![]);
        assert_eq!(found(&next(&mut super::decoder(), [other]).1), [(Finding::BlockSize, 1)]);
    }
    decoder.forget();
    let twos = pages(&[2], None, &TOKENS[..2], 2, vec![]);
    assert_eq!(found(&next(&mut decoder, [singles(0..4), twos]).1), [(Finding::BlockSize, 1)]);
}

#[test]
fn pages_keep_their_namespace_and_images_separate_them() {
    let mut decoder = decoder();
    let salted = |salt| requested(&TOKENS, None, Some(salt));
    let salt = || vec![("cache_salt", "s".into())];
    next(&mut decoder, [pages(&[1, 2], None, &TOKENS[..2], 1, salt())]);
    assert_eq!(hashes(&next(&mut decoder, [singles(2..8)]).0), salted("s"));
    let adapted = vec![("lora_name", "ad".into()), ("extra_keys", Msg::Array(vec![["ad", "t"].into()]))];
    let (events, _) = next(&mut decoder, [pages(&[12, 14], None, &TOKENS[..4], 2, adapted)]);
    assert_eq!(events, [], "the page size of a rank does not change");
    decoder.forget();
    let adapted = vec![("lora_name", "ad".into()), ("extra_keys", Msg::Array(vec![["ad", "t"].into(), ["ad"].into()]))];
    let (events, _) = next(&mut decoder, [pages(&[12, 14], None, &TOKENS[..4], 2, adapted)]);
    assert_eq!(hashes(&events), requested(&TOKENS[..4], Some("ad"), Some("t")));
    let image =
        vec![("extra_keys", Msg::Array(vec![Msg::Nil, Msg::Array(vec![Msg::Array(vec!["i".into(), 1.into()])])]))];
    let (events, report) = next(&mut decoder, [pages(&[22, 24], None, &TOKENS[..4], 2, image)]);
    assert_eq!(found(&report), [(Finding::UnknownNamespace, 1)]);
    assert!(hashes(&events) != PLAIN[..1]);
}

#[test]
fn copies_in_a_lower_tier_have_the_names_of_blocks() {
    let mut decoder = decoder();
    next(&mut decoder, [singles(0..8)]);
    let medium = |medium: &str| vec![("medium", medium.into())];
    let (events, _) = next(&mut decoder, [pages(&[3, 4, 5, 8, 77], Some(2), &[1; 5], 1, medium("CPU_PINNED"))]);
    let names = [(4, None), (8, None), (77, None)];
    assert_eq!(events, [offloaded(StorageTier::HostPinned, Some(2), &names)]);
    let clear = || Msg::named([("type", "AllBlocksCleared".into())]);
    assert_eq!(next(&mut decoder, [clear(), removal([4, 8], [])]).0, [cleared()]);
    assert_eq!(next(&mut decoder, [singles(0..4)]).0.len(), 1, "the pages are new");
}

#[test]
fn batches_of_another_rank_change_no_pages() {
    let of_rank =
        |rank: u64, events: Vec<Msg>| Msg::Array(vec![Msg::Float(1.0), Msg::Array(events), rank.into()]).bytes();
    let mut decoder = Decoder::new(WireConfig { ranks: 0..2, ..config() });
    let mut events = Vec::new();
    for first in [singles(0..4), store([4], None, &TOKENS[..4], [])] {
        let report = decoder.decode(&of_rank(0, vec![first]), &mut events);
        assert_eq!((report.foreign_rank, decoder.is_folding()), (Some(0), false));
    }
    decoder.decode(&of_rank(1, vec![singles(0..4)]), &mut events);
    let others = vec![removal([2], []), Msg::named([("type", "AllBlocksCleared".into())]), singles(4..8)];
    let report = decoder.decode(&of_rank(0, others), &mut events);
    assert_eq!((report.foreign_rank, report.events, found(&report)), (Some(0), 3, vec![(Finding::ForeignRank, 1)]));
    decoder.decode(&of_rank(1, vec![singles(4..8)]), &mut events);
    assert_eq!(events, [stored(Device, None, &[(4, PLAIN[0])]), stored(Device, Some(4), &[(8, PLAIN[1])])]);
}

/// Memory and work of a hostile stream are bounded: the blocks of the device are dropped.
#[test]
fn the_number_of_tokens_and_the_work_of_removals_are_bounded() {
    let limits = DecoderLimits { folded_tokens_max: 16, ..DecoderLimits::default() };
    let mut decoder = Decoder::new(WireConfig { limits, ..config() });
    let roots = |names: std::ops::Range<u64>| names.map(|name| pages(&[name], None, &[1], 1, vec![]));
    assert_eq!(next(&mut decoder, roots(0..4)).0, []);
    let (events, report) = next(&mut decoder, roots(4..5));
    assert_eq!((events, report.lost_removals), (vec![tier_cleared(Device)], Some(Finding::TooLarge)));
    assert_eq!(next(&mut decoder, roots(0..4)).0, [], "room again");
    let mut decoder = super::decoder();
    next(&mut decoder, [singles(0..3)]);
    next(&mut decoder, (0..3000).map(|n| pages(&[100 + n], Some(1), &[7], 1, vec![])));
    let (_, report) = next(&mut decoder, (0..500).flat_map(|_| [removal([1], []), singles(0..1)]));
    assert_eq!(report.lost_removals, None);
    let (_, report) = next(&mut decoder, (0..1500).flat_map(|_| [removal([1], []), singles(0..1)]));
    assert_eq!(report.lost_removals, Some(Finding::TooLarge));
}

/// EAGLE pairs contain the tokens of plain blocks: a hit may be one block too long where prompts differ behind a block.
#[test]
fn eagle_pairs_count_as_their_tokens_in_a_plain_pool() {
    let pairs: Msg = TOKENS.windows(2).map(|pair| Msg::from([u64::from(pair[0]), pair[1].into()])).collect();
    for (names, size) in [(vec![4_u64], 4), ((1..8).collect(), 1)] {
        let mut event = pages(&names, None, &[], size, vec![]);
        let Msg::Map(fields) = &mut event else { unreachable!() };
        fields[3].1 = pairs.clone();
        let (events, report) = next(&mut decoder(), [event]);
        assert_eq!((events, found(&report)), (vec![stored(Device, None, &[(4, PLAIN[0])])], vec![]));
    }
}

/// `data/pages.json` was recorded from SGLang's radix cache with its default page size. After each step: tokens, or pairs,
/// that the cache holds of the prompts so far.
#[test]
fn events_of_sglang_rebuild_its_cache() {
    let recorded = data("pages.json");
    let numbers = |list: &Value| -> Vec<u32> { serde_json::from_value(list.clone()).expect("numbers") };
    for (run, is_eagle) in [(0, false), (1, true), (1, false)] {
        let run = &recorded["runs"][run];
        let of_engine = run["is_eagle"] == true;
        let mut decoder = Decoder::new(WireConfig { is_eagle, ..config() });
        let mut index = Index::new();
        index.register(RANK, Slot(0), Generation(1));
        for (number, step) in run["steps"].as_array().expect("steps").iter().enumerate() {
            let mut events = Vec::new();
            if !step["payload"].is_null() {
                let report = decoder.decode(&unhex(&step["payload"]), &mut events);
                assert_eq!((found(&report), report.usable), (vec![], report.events));
            }
            for event in &events {
                let Applied { unknown_parents, unknown_removals, waiting, .. } = index.apply(event);
                assert_eq!((unknown_parents, unknown_removals, waiting), (0, 0, 0));
            }
            for (prompt, held) in run["prompts"].as_array().expect("prompts").iter().zip(numbers(&step["held"])) {
                let scheme = HashScheme { is_eagle, ..HashScheme::new(config().block_size) };
                let hashes = BlockHasher::new(scheme).block_hashes(&numbers(prompt), &MmBlocks::NONE);
                let mut overlaps = Overlaps::default();
                index.overlaps(&hashes, &mut overlaps);
                let blocks = overlaps.hits().first().map_or(0, |hit| hit.device_blocks);
                // Without the token behind it, a block of pairs counts also for prompts that differ there.
                let longest = if of_engine && !is_eagle { (held + 1) / 4 } else { held / 4 };
                assert!((held / 4..=longest).contains(&blocks), "step {number}: {blocks} of {held} tokens of {prompt}");
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// Stores a prompt of a salt from a page on whose predecessor is held.
    Store {
        tokens: Vec<u32>,
        salt: bool,
        from: Pick,
    },
    /// Removes one copy of some held pages.
    Remove {
        which: Vec<Pick>,
    },
    Clear,
    /// Begins another batch.
    Send,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let tokens = prop::collection::vec(1..3_u32, 1..14);
    let op = prop_oneof![
        6 => (tokens, any::<bool>(), any::<Pick>()).prop_map(|(tokens, salt, from)| Op::Store { tokens, salt, from }),
        4 => prop::collection::vec(any::<Pick>(), 1..5).prop_map(|which| Op::Remove { which }),
        1 => Just(Op::Clear),
        4 => Just(Op::Send),
    ];
    prop::collection::vec(op, 1..60)
}

/// A page as the tokens that determine it, behind those of its salt.
type Page = (bool, Vec<u32>);

/// The cache of the engine: copies by page.
struct Engine {
    size: usize,
    is_eagle: bool,
    held: BTreeMap<Page, u32>,
}

impl Engine {
    fn page(&self, tokens: &[u32], salt: bool, at: usize) -> Page {
        (salt, tokens[..(at + 1) * self.size + usize::from(self.is_eagle)].to_vec())
    }

    fn pages(&self, tokens: &[u32]) -> usize {
        tokens.len().saturating_sub(usize::from(self.is_eagle)) / self.size
    }

    fn name((salt, tokens): &Page) -> u64 {
        let mix = |name: u64, token: u64| (name ^ token).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        tokens.iter().fold(u64::from(*salt) + 7, |name, token| mix(name, (*token).into()))
    }

    fn apply(&mut self, op: &Op) -> Option<Msg> {
        match op {
            Op::Store { tokens, salt, from } => {
                let starts = (0..self.pages(tokens))
                    .filter(|at| *at == 0 || self.held.contains_key(&self.page(tokens, *salt, at - 1)));
                let starts: Vec<_> = starts.collect();
                let start = *starts.get(from.index(starts.len().max(1)))?;
                let stored: Vec<_> = (start..self.pages(tokens)).map(|at| self.page(tokens, *salt, at)).collect();
                let names: Vec<_> = stored.iter().map(Self::name).collect();
                let parent = (start > 0).then(|| Self::name(&self.page(tokens, *salt, start - 1)));
                for page in stored {
                    let copies = self.held.entry(page).or_default();
                    *copies = if start > 0 { *copies + 1 } else { (*copies).max(1) };
                }
                let tokens = &tokens[start * self.size..self.pages(tokens) * self.size + usize::from(self.is_eagle)];
                let more = if *salt { vec![("cache_salt", "s".into())] } else { vec![] };
                let mut event = pages(&names, parent, tokens, self.size as u64, more);
                if let (Msg::Map(fields), true) = (&mut event, self.is_eagle) {
                    let pair = |pair: &[u32]| Msg::from([u64::from(pair[0]), pair[1].into()]);
                    fields[3].1 = tokens.windows(2).map(pair).collect();
                }
                Some(event)
            }
            Op::Remove { which } => {
                let mut names = Vec::new();
                for pick in which {
                    let held: Vec<_> = self.held.keys().cloned().collect();
                    let Some(page) = held.get(pick.index(held.len().max(1))) else { continue };
                    names.push(Self::name(page));
                    let copies = self.held.get_mut(page).expect("held");
                    *copies -= 1;
                    if *copies == 0 {
                        self.held.remove(page);
                    }
                }
                (!names.is_empty()).then(|| removal(names, []))
            }
            Op::Clear => {
                self.held.clear();
                Some(Msg::named([("type", "AllBlocksCleared".into())]))
            }
            Op::Send => None,
        }
    }

    /// Leading blocks of 4 tokens whose pages are all held.
    fn hit(&self, tokens: &[u32], salt: bool) -> usize {
        let pages = (0..self.pages(tokens)).take_while(|at| self.held.contains_key(&self.page(tokens, salt, *at)));
        pages.count() * self.size / 4
    }
}

proptest! {
    #![proptest_config(effort(300, "tests/wire_fold.proptest-regressions"))]

    #[test]
    fn folded_pages_equal_the_engine(ops in ops(), size in 0..2_usize, is_eagle: bool) {
        let mut engine = Engine { size: [1, 2][size], is_eagle, held: BTreeMap::new() };
        let wire = WireConfig { is_eagle, ..config() };
        let mut decoder = Decoder::new(wire.clone());
        let mut index = Index::new();
        index.register(RANK, Slot(0), Generation(1));
        let (mut batch, mut prompts) = (Vec::new(), Vec::new());
        for op in ops.iter().chain([&Op::Send]) {
            batch.extend(engine.apply(op));
            if let Op::Store { tokens, .. } = op {
                prompts.push(tokens.clone());
            }
            if !matches!(op, Op::Send) {
                continue;
            }
            let (events, report) = next(&mut decoder, batch.drain(..));
            prop_assert_eq!((found(&report), report.mismatch), (vec![], None));
            for event in &events {
                let applied = index.apply(event);
                prop_assert_eq!((applied.copies, applied.duplicates, applied.unknown_removals), (0, 0, 0));
                index.check_invariants();
            }
            for (tokens, salt) in prompts.iter().flat_map(|tokens| [(tokens, false), (tokens, true)]) {
                let scheme = HashScheme {
                    cache_salt: salt.then_some("s"), is_eagle, ..HashScheme::new(wire.block_size)
                };
                let hashes = BlockHasher::new(scheme).block_hashes(tokens, &MmBlocks::NONE);
                let mut overlaps = Overlaps::default();
                index.overlaps(&hashes, &mut overlaps);
                let found = overlaps.hits().first().map_or(0, |hit| hit.device_blocks as usize);
                prop_assert_eq!(found, engine.hit(tokens, salt), "{:?} {}", tokens, salt);
            }
        }
        let gone: Vec<_> = engine.held.iter().flat_map(|(page, copies)| vec![Engine::name(page); *copies as usize]).collect();
        let (events, _) = next(&mut decoder, [removal(gone, [])]);
        events.iter().for_each(|event| _ = index.apply(event));
        prop_assert_eq!((index.held_blocks(), index.names_of(RANK).len()), (0, 0));
    }
}
