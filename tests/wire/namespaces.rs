//! Namespaces of blocks: adapters, salts, multimodal objects, and keys of unknown meaning.

use super::*;

fn keys(entries: Vec<Msg>) -> [(&'static str, Msg); 1] {
    [("extra_keys", Msg::Array(entries))]
}

#[test]
fn namespaces_last_until_the_last_copy_of_their_block() {
    let child = || store([12], Some(11), &TOKENS[..4], []);
    let root = |medium: &str| store([11], None, &TOKENS[..4], [("cache_salt", "s".into()), ("medium", medium.into())]);
    let gone = |medium: &str| removal([11], [("medium", medium.into())]);
    let salted = requested(&TOKENS[..4], None, Some("s"));
    let mut decoder = decoder();
    next(&mut decoder, [root("GPU"), root("CPU"), gone("GPU")]);
    assert_eq!(hashes(&next(&mut decoder, [child()]).0), salted);
    next(&mut decoder, [gone("CPU")]);
    assert_eq!(hashes(&next(&mut decoder, [child()]).0), PLAIN[..1]);
    next(&mut decoder, [root("GPU"), Msg::named([("type", "AllBlocksCleared".into())])]);
    assert_eq!(hashes(&next(&mut decoder, [child()]).0), PLAIN[..1]);
    next(&mut decoder, [root("GPU")]);
    decoder.forget();
    assert_eq!((hashes(&next(&mut decoder, [child()]).0), decoder.namespaces()), (PLAIN[..1].to_vec(), 0));
}

#[test]
fn an_adapter_without_a_name_has_its_own_blocks() {
    let numbered = |id: u64| hashes_of(store([11], None, &TOKENS[..4], [("lora_id", id.into())]));
    assert_eq!(numbered(0), (PLAIN[..1].to_vec(), vec![]), "no adapter has the number 0");
    let (first, findings) = numbered(1);
    assert_eq!(findings, [(Finding::UnnamedLora, 1)]);
    let (second, _) = numbered(2);
    assert!(first != second && first != PLAIN[..1] && first != requested(&TOKENS[..4], Some("1"), None));
}

#[test]
fn objects_are_distinguished_from_salts() {
    let mm = |ids: [&[&str]; 2]| {
        MmBlocks::listed(ids.map(|ids| ids.iter().filter_map(|id| MmSpan::hash_of_id(id)).collect::<Vec<_>>()))
    };
    let image = || Msg::Array(vec!["img-1".into(), 2.into()]);
    let with = |first: Vec<Msg>, second: Vec<Msg>| {
        hashes_of(store([11, 12], None, &TOKENS, keys(vec![Msg::Array(first), Msg::Array(second)])))
    };
    let expected = |salt, ids| (requested_with(&TOKENS, None, salt, &mm(ids)), vec![]);
    assert_eq!(with(vec![image()], vec!["img-2".into()]), expected(None, [&["img-1"], &["img-2"]]));
    assert_eq!(with(vec![image(), "t".into()], vec![image(), image()]), expected(Some("t"), [&["img-1"], &["img-1"]]));
    assert_eq!(with(vec![], vec!["b".into(), "a".into()]), expected(None, [&[], &["a", "b"]]));
}

/// vllm#48352: each block of an adapter has a second plain key, the identity of its weights.
#[test]
fn the_identity_of_an_adapter_is_no_salt() {
    let adapted = |salt| requested(&TOKENS, Some("ad"), salt);
    let with = |decoder: &mut Decoder, names: &[u64], entries: &[&[&str]]| {
        let entries = entries.iter().map(|keys| keys.iter().copied().map(Msg::from).collect::<Msg>()).collect();
        let [(field, keys)] = keys(entries);
        let tokens = &TOKENS[..4 * names.len()];
        let (events, report) =
            next(decoder, [store(names.iter().copied(), None, tokens, [(field, keys), ("lora_name", "ad".into())])]);
        assert_eq!(found(&report), []);
        hashes(&events)
    };
    let mut fresh = decoder();
    // One block proves nothing: the key may be a salt.
    assert_eq!(with(&mut fresh, &[11], &[&["ad", "4f"]]), adapted(Some("4f"))[..1]);
    assert_eq!(with(&mut fresh, &[12, 13], &[&["ad", "4f"], &["ad", "4f"]]), adapted(None));
    assert_eq!(with(&mut fresh, &[14], &[&["ad", "4f"]]), adapted(None)[..1], "known from here on");
    let mut restored = Decoder::resume(config(), &fresh.state());
    assert_eq!(with(&mut restored, &[14], &[&["ad", "4f"]]), adapted(None)[..1], "also after a restart of the router");
    for salt in ["s", "4f", "ad"] {
        assert_eq!(with(&mut fresh, &[15], &[&["ad", "4f", salt]]), adapted(Some(salt))[..1], "{salt}");
        assert_eq!(with(&mut fresh, &[16, 17], &[&["ad", "4f", salt], &["ad", "4f"]]), adapted(Some(salt)), "{salt}");
    }
    assert_eq!(with(&mut fresh, &[18], &[&["ad", "5e"]]), adapted(Some("5e"))[..1], "other weights prove it again");
    let child =
        store([19], Some(12), &TOKENS[..4], [keys(vec![["ad", "4f"].into()])[0].clone(), ("lora_name", "ad".into())]);
    assert_eq!(hashes(&next(&mut fresh, [child]).0), adapted(None)[..1]);
    // Salts of engines without identities stay salts.
    for names in [&[21, 22][..], &[23]] {
        let entries: [&[&str]; 2] = [&["ad", "4f"], &["ad"]];
        assert_eq!(with(&mut fresh, names, &entries[..names.len()]), adapted(Some("4f"))[..names.len()]);
    }
}

#[test]
fn unknown_keys_form_a_separate_namespace() {
    let cases = [
        (Msg::from(["x", "y"]), Finding::AmbiguousNamespace),
        (["y", "x"].into(), Finding::AmbiguousNamespace),
        ([5_u64].into(), Finding::UnknownNamespace),
        (Msg::Array(vec![Msg::Bin(vec![5])]), Finding::UnknownNamespace),
        (Msg::Array(vec![Msg::named([("salt", "x".into())])]), Finding::UnknownNamespace),
        (Msg::Array(vec![Msg::from(["x", "y", "z"])]), Finding::UnknownNamespace),
        ("x".into(), Finding::UnknownNamespace),
        (6.into(), Finding::UnknownNamespace),
    ];
    let mut seen = vec![requested(&TOKENS, None, None), requested(&TOKENS, None, Some("x"))];
    for (entry, finding) in cases {
        let (hashes, findings) = hashes_of(store([11, 12], None, &TOKENS, keys(vec![entry.clone(), Msg::Nil])));
        assert_eq!(findings, [(finding, 1)], "{entry:?}");
        assert!(seen.iter().all(|other| other[0] != hashes[0] && other[1] != hashes[1]), "{entry:?}");
        seen.push(hashes);
    }
    // A list of another form does not put the blocks into the default namespace either.
    for (odd, n) in [(Msg::Bool(true), 1), (Msg::from("x"), 1)] {
        let (hashes, findings) = hashes_of(store([11, 12], None, &TOKENS, [("extra_keys", odd.clone())]));
        assert_eq!(findings, [(Finding::UnknownNamespace, n)], "{odd:?}");
        assert!(hashes[0] != PLAIN[0] && hashes[1] != PLAIN[1]);
    }
}

#[test]
fn further_keys_combine_with_the_inherited_namespace() {
    let child = |parent| store([20], Some(parent), &TOKENS[..4], keys(vec![[7_u64].into()]));
    let mut decoder = decoder();
    let root = |name, salt: &str| store([name], None, &TOKENS[..4], keys(vec![[salt].into()]));
    next(&mut decoder, [root(11, "s"), root(12, "t"), store([13], None, &TOKENS[..4], [])]);
    let (events, report) = next(&mut decoder, [child(11), child(12), child(13), child(11)]);
    assert_eq!(found(&report), [(Finding::UnknownNamespace, 4)]);
    let of = |at: usize| hashes(&events[at..=at]);
    assert!(of(0) != of(1) && of(0) != of(2) && of(1) != of(2) && of(0) == of(3));
    // Within one store the keys apply from their block on.
    let (mixed, _) = hashes_of(store([11, 12], None, &TOKENS, keys(vec![Msg::Nil, [7_u64].into()])));
    assert!(mixed[0] == PLAIN[0] && mixed[1] != PLAIN[1]);
    // TensorRT-LLM's images beside numeric tokens.
    let image = Msg::Array(vec![Msg::named([("type", "mm_key".into()), ("hash", "ab".into())])]);
    let images = Msg::Array(vec![Msg::Array(vec![]), image]);
    let (mixed, findings) = hashes_of(store([11, 12], None, &TOKENS, [("mm_keys", images)]));
    assert!(mixed[0] == PLAIN[0] && mixed[1] != PLAIN[1] && findings == [(Finding::UnknownNamespace, 1)]);
}

#[test]
fn stores_above_the_limit_are_rejected_alone() {
    let limits = DecoderLimits { namespaces_max: 2, ..DecoderLimits::default() };
    let mut decoder = Decoder::new(WireConfig { limits, ..config() });
    let salted = |names: [u64; 2]| store(names, None, &TOKENS, [("cache_salt", "s".into())]);
    let (events, report) =
        next(&mut decoder, [salted([1, 2]), salted([2, 3]), salted([1, 2]), store([9, 8], None, &TOKENS, [])]);
    assert_eq!((events.len(), report.usable, decoder.namespaces()), (3, 3, 2));
    assert_eq!(found(&report), [(Finding::NamespacesFull, 1)]);
    assert_eq!(hashes(&events), PLAIN);
}

/// Cause: connectors without removals filled the map, and salted stores on the device were refused.
#[test]
fn copies_of_a_connector_give_way_to_stores_on_the_device() {
    let limits = DecoderLimits { namespaces_max: 4, ..DecoderLimits::default() };
    let mut decoder = Decoder::new(WireConfig { limits, ..config() });
    let salted = |names: [u64; 2], medium: &str| {
        store(names, None, &TOKENS, [("cache_salt", "s".into()), ("medium", medium.into())])
    };
    next(&mut decoder, [salted([1, 2], "GPU"), salted([1, 2], "FS"), salted([3, 4], "FS"), salted([1, 4], "CPU")]);
    let (events, report) = next(&mut decoder, [removal([2], []), salted([5, 6], "GPU"), salted([7, 8], "GPU")]);
    let tiers = [StorageTier::Disk, StorageTier::HostPinned].map(tier_cleared);
    assert_eq!((&events[1..2], &events[3..4]), (&tiers[..1], &tiers[1..]));
    assert_eq!((events.len(), decoder.namespaces()), (4, 3), "1, 5 and 6: those on the device");
    assert_eq!(found(&report), [(Finding::NamespacesFull, 1)], "nothing is left to drop");
    assert_eq!(hashes(&events[2..3]), requested(&TOKENS, None, Some("s")));
}
