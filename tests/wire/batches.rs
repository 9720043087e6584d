//! Batches with unusual parts, and events in unusual dialects.

use super::*;
use StorageTier::{Device, Disk, External, HostPinned};

fn decode(payload: &[u8]) -> (Vec<RouterEvent>, Report) {
    let mut events = Vec::new();
    let report = decoder().decode(payload, &mut events);
    (events, report)
}

fn good(name: u64) -> Msg {
    removal([name], [])
}

#[test]
fn media_names_of_all_engines_map_to_tiers() {
    let cases = [
        (Msg::Nil, Device),
        ("GPU".into(), Device),
        ("gpu".into(), Device),
        ("CPU".into(), HostPinned),
        ("cpu".into(), HostPinned),
        ("CPU_PINNED".into(), HostPinned),
        ("CPU_TIER1".into(), HostPinned),
        ("CPU_TIER2".into(), HostPinned),
        ("STORAGE".into(), Disk),
        ("DISK".into(), Disk),
        ("FS".into(), Disk),
        ("OBJ".into(), Disk),
        ("EXTERNAL".into(), External),
        ("REMOTE".into(), External),
    ];
    for (medium, tier) in cases {
        let medium = [("medium", medium)];
        let of = [store([11], Some(10), &TOKENS[..4], medium.clone()), removal([11], medium)];
        let (events, report) = next(&mut decoder(), of);
        let first = if tier == Device {
            stored(tier, Some(10), &[(11, PLAIN[0])])
        } else {
            offloaded(tier, Some(10), &[(11, Some(PLAIN[0]))])
        };
        assert_eq!(events, [first, removed(tier, &[11])]);
        assert!(report.findings.is_empty());
    }
    let (events, report) = next(&mut decoder(), [removal([11], [("medium", "TAPE".into())]), good(1)]);
    assert_eq!((events, found(&report)), (vec![removed(Device, &[1])], vec![(Finding::UnknownMedium, 1)]));
}

#[test]
fn an_invalid_event_is_skipped_alone() {
    let bad = [
        (Msg::Nil, Finding::WrongType),
        (Msg::Array(vec![]), Finding::WrongShape),
        (Msg::Map(vec![]), Finding::WrongShape),
        (Msg::named([("kind", "BlockRemoved".into())]), Finding::WrongShape),
        (Msg::from([5_u64]), Finding::WrongType),
        (Msg::from(["BlockMoved", "x"]), Finding::UnknownEvent),
        (removal([1], [("locality", "remote".into())]), Finding::NonLocal),
        (store([1], None, &TOKENS, [("lora_name", 5.into())]), Finding::WrongType),
        (store([1], None, &TOKENS, [("parent_block_hash", "x".into())]), Finding::BadHash),
        (store([1], None, &[], [("note", Msg::Raw([vec![0x91; 40], vec![0x01]].concat()))]), Finding::TooDeep),
    ];
    for (event, finding) in bad {
        let (events, report) = next(&mut decoder(), [good(1), event.clone(), good(2)]);
        assert_eq!(events, [removed(Device, &[1, 2])], "{event:?}");
        assert_eq!((found(&report), report.events, report.usable), (vec![(finding, 1)], 3, 2), "{event:?}");
        assert_eq!(report.lost_removals, None);
    }
}

/// Stale blocks would be found for ever.
#[test]
fn the_tier_of_an_unreadable_removal_is_cleared() {
    let cleared = |tiers: &[StorageTier]| tiers.iter().map(|tier| tier_cleared(*tier)).collect::<Vec<_>>();
    let deep = || ("note", Msg::Raw([vec![0x91; 40], vec![0x01]].concat()));
    let cpu = || ("medium", Msg::from("CPU"));
    let cases = [
        (removal([1], [("medium", 5.into())]), Finding::WrongType, cleared(&StorageTier::ALL)),
        (removal([1], [deep()]), Finding::TooDeep, cleared(&[Device])),
        (removal([1], [deep(), cpu()]), Finding::TooDeep, cleared(&[HostPinned])),
        (Msg::Array(vec!["BlockRemoved".into(), 5.into()]), Finding::WrongType, cleared(&[Device])),
        (Msg::Array(vec!["BlockRemoved".into(), 5.into(), "CPU".into()]), Finding::WrongType, cleared(&[HostPinned])),
        (Msg::from(["BlockRemoved"]), Finding::WrongShape, cleared(&[Device])),
        (Msg::named([("type", "AllBlocksCleared".into()), deep()]), Finding::TooDeep, cleared(&StorageTier::ALL)),
        (removal([1], [deep(), ("group_idx", 1.into())]), Finding::TooDeep, vec![]),
        (removal([1], [deep(), ("locality", "remote".into())]), Finding::TooDeep, vec![]),
        (removal([1], [deep(), ("medium", "TAPE".into())]), Finding::TooDeep, vec![]),
    ];
    for (event, finding, cleared) in cases {
        let mut decoder = decoder();
        let salted = store([11], None, &TOKENS[..4], [("cache_salt", "s".into())]);
        let (events, report) = next(&mut decoder, [salted, event.clone(), good(2)]);
        let [_, rest @ .., last] = &events[..] else { panic!("{events:?}") };
        assert_eq!((rest, last), (&cleared[..], &removed(Device, &[2])), "{event:?}");
        assert_eq!(report.lost_removals, (!cleared.is_empty()).then_some(finding), "{event:?}");
        assert_eq!((found(&report), report.usable), (vec![(finding, 1)], 2), "{event:?}");
        assert_eq!(decoder.namespaces(), usize::from(!cleared.contains(&tier_cleared(Device))), "{event:?}");
    }
    let whole = batch([store([11], None, &TOKENS[..4], []), good(1)]);
    let (events, report) = decode(&whole[..whole.len() - 3]);
    assert_eq!(events[1..], cleared(&StorageTier::ALL));
    assert_eq!(report.lost_removals, Some(Finding::Truncated));
    let many = removal(0..600_000, [cpu()]);
    let (events, report) = next(&mut decoder(), [many]);
    assert_eq!((events[0].data.block_count(), report.lost_removals), (600_000, None), "LMCache's resynchronization");
}

#[test]
fn unknown_additional_fields_are_ignored() {
    let more = [
        ("ownership", Msg::from([5_u64])),
        ("session_id", "s".into()),
        ("lookahead_token_ids", [7_u64].into()),
        ("locality", "LOCAL".into()),
        ("future", Msg::named([("x", Msg::Bool(true))])),
    ];
    let late_type = Msg::Map(vec![
        (Msg::from([1_u64]), Msg::Nil),
        ("block_hashes".into(), [3_u64].into()),
        ("type".into(), "BlockRemoved".into()),
    ]);
    let long: Msg = [Msg::from("BlockRemoved"), [4_u64].into(), "CPU".into(), 0.into(), Msg::Nil, Msg::Nil]
        .into_iter()
        .chain([Msg::from("local"), Msg::Nil, 17.into()])
        .collect();
    let ignored = Msg::from(["Ignored", "x"]);
    let of = [store([11], None, &TOKENS[..4], more.clone()), removal([2], more), late_type, long, ignored];
    let (events, report) = next(&mut decoder(), of);
    let expected = [stored(Device, None, &[(11, PLAIN[0])]), removed(Device, &[2, 3]), removed(HostPinned, &[4])];
    assert_eq!((&events[..], found(&report), report.usable), (&expected[..], vec![], 5));
}

#[test]
fn trailing_array_fields_may_differ_by_release() {
    let with = |tail: Vec<Msg>| {
        let least = [
            Msg::from("BlockStored"),
            [11_u64].into(),
            Msg::Nil,
            [1_u64, 2, 3, 4].into(),
            4.into(),
            Msg::Nil,
            "GPU".into(),
        ];
        hashes_of(least.into_iter().chain(tail).collect())
    };
    let salted = requested(&TOKENS[..4], Some("a"), Some("t"));
    let full = vec!["a".into(), [["a", "t"]].into(), 0.into(), "full_attention".into(), Msg::Nil, "local".into()];
    assert_eq!(with(full), (salted, vec![]));
    let odd = vec![Msg::Nil, Msg::Nil, "?".into(), 5.into(), "?".into(), Msg::Array(vec![])];
    assert_eq!(with(odd), (PLAIN[..1].to_vec(), vec![(Finding::WrongType, 4)]));
    // A value in the position of adapters and salts always changes the namespace.
    for tail in [vec![5.into()], vec![Msg::named([("salt", "s".into())])], vec![Msg::Nil, Msg::Bool(true)]] {
        let (hashes, findings) = with(tail);
        assert!(hashes[0] != PLAIN[0] && findings == [(Finding::UnknownNamespace, 1)]);
    }
}

#[test]
fn batches_of_another_rank_are_ignored() {
    let salted = |name| store([name], None, &TOKENS[..4], [("cache_salt", "s".into())]);
    let clear = || Msg::named([("type", "AllBlocksCleared".into())]);
    let of_rank = |rank: Msg, events: Vec<Msg>| Msg::Array(vec![Msg::Float(1.0), Msg::Array(events), rank]).bytes();
    let mut decoder = Decoder::new(WireConfig { ranks: 0..2, ..config() });
    let mut events = Vec::new();
    for rank in [Msg::Nil, 1.into()] {
        let report = decoder.decode(&of_rank(rank, vec![salted(11), salted(12)]), &mut events);
        assert_eq!((report.foreign_rank, report.usable), (None, 2));
    }
    assert_eq!((events.len(), decoder.namespaces()), (4, 2));
    let trace = vec![
        salted(13),
        removal([11], []),
        store([12], None, &TOKENS, []),
        clear(),
        salted(14),
        removal([12], [("group_idx", 1.into()), ("kv_cache_spec_kind", "full_attention".into())]),
    ];
    for (rank, told) in [(Msg::Uint(0), 0), (257.into(), 257), (u64::MAX.into(), u32::MAX), (Msg::Int(-1), u32::MAX)] {
        let report = decoder.decode(&of_rank(rank, trace.clone()), &mut events);
        assert_eq!((report.foreign_rank, report.events, report.usable, report.cleared), (Some(told), 6, 0, false));
        assert_eq!((events.len(), found(&report)), (4, vec![(Finding::ForeignRank, 1)]));
        assert_eq!(decoder.namespaces(), 2);
    }
    let child = |parent| store([20], Some(parent), &TOKENS[..4], []);
    let group = removal([1], [("group_idx", 1.into())]);
    let report = decoder.decode(&of_rank(Msg::Nil, vec![child(11), child(12), group]), &mut events);
    assert_eq!(found(&report), [(Finding::NotMainAttention, 1)]);
    let salted = requested(&TOKENS[..4], None, Some("s"));
    assert!(hashes(&events[4..5]) == salted && hashes(&events[5..6]) == salted);
    // A worker with one rank may use any rank number.
    let mut decoder = Decoder::new(config());
    let report = decoder.decode(&of_rank(9.into(), vec![good(1)]), &mut events);
    assert_eq!((report.foreign_rank, report.usable), (None, 1));
}

#[test]
fn unusual_batch_fields_are_tolerated() {
    let events = || Msg::Array(vec![good(1)]);
    let batch = |items: Vec<Msg>| decode(&Msg::Array(items).bytes());
    let cases = [
        (batch(vec![Msg::Float(f64::NAN), events()]), vec![(Finding::NotFinite, 1)]),
        (batch(vec![5.into(), events(), Msg::Nil, "more".into()]), vec![]),
        (batch(vec!["now".into(), events(), "rank".into()]), vec![(Finding::WrongType, 2)]),
        (decode(&[super::batch([good(1)]), vec![0]].concat()), vec![(Finding::TrailingBytes, 1)]),
    ];
    for ((events, report), findings) in cases {
        assert_eq!((events, found(&report)), (vec![removed(Device, &[1])], findings));
    }
    let none = [
        (decode(&[]), Finding::Truncated),
        (decode(&[0xc1]), Finding::Malformed),
        (decode(b"\x80"), Finding::WrongType),
        (batch(vec![Msg::Float(1.0)]), Finding::WrongShape),
        (batch(vec![Msg::Float(1.0), 5.into()]), Finding::WrongType),
    ];
    for ((events, report), finding) in none {
        assert_eq!(events, StorageTier::ALL.map(tier_cleared));
        assert_eq!((report.usable, found(&report)), (0, vec![(finding, 1)]));
    }
}

#[test]
fn limits_drop_only_the_excess() {
    let limits = DecoderLimits {
        payload_bytes_max: 400,
        events_max: 3,
        hashes_max: 2,
        tokens_max: 8,
        ..DecoderLimits::default()
    };
    let mut decoder = Decoder::new(WireConfig { limits, ..config() });
    let many = removal(1..=3, []);
    let long = store([1], None, &[1; 9], []);
    let (events, report) = next(&mut decoder, [many, long, good(1), good(2), good(3)]);
    let all = StorageTier::ALL.map(tier_cleared);
    assert_eq!(events[..2], [tier_cleared(Device), removed(Device, &[1])]);
    assert_eq!(events[2..], all, "the events behind the last one that is decoded may be removals");
    assert_eq!((found(&report), report.events, report.usable), (vec![(Finding::TooLarge, 3)], 5, 1));
    let (events, report) = next(&mut decoder, (0..20).map(good));
    assert_eq!((&events[..], report.events, found(&report)), (&all[..], 0, vec![(Finding::TooLarge, 1)]));
}
