//! Models with a prefill pool and a decode pool, over mock engines that check the rules of each protocol.

use pointsman_gateway::handover::Protocol;

use pools::{BLOCK_SIZE, Pools, Size, alone, completion};

mod drill;
mod failures;
mod leaving;
mod pools;
mod requests;
mod roles;
mod sglang;

const SMALL: Size = Size { prefills: 2, decodes: 2, ranks: 1 };

/// Ranks of one engine that a protocol can address.
fn ranks(protocol: Protocol) -> u16 {
    if protocol == Protocol::VllmP2pNccl { 1 } else { 2 }
}

fn prompt(seed: u32, blocks: u32) -> Vec<u32> {
    (0..blocks * BLOCK_SIZE + 3)
        .map(|n| 1 + (n.wrapping_mul(2_654_435_761).wrapping_add(seed * 7_919)) % 30_000)
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_protocol_serves_in_two_legs() {
    let prompts: Vec<_> = (0..12).map(|seed| prompt(seed, 4 + seed % 5)).collect();
    let expected = alone(&prompts, 9).await;
    for protocol in Protocol::ALL {
        let pools = Pools::start(protocol, Size { ranks: ranks(protocol), ..SMALL }, |_| {}).await;
        for (n, prompt) in prompts.iter().enumerate() {
            let answer = pools.complete(prompt, 9, n % 2 == 0).await;
            assert_eq!(answer.status, 200, "{protocol}: {}", answer.text());
            assert_eq!(answer.header("x-pointsman-prefill"), Some("remote"), "{protocol}");
            let (text, cached) = completion(&answer);
            assert_eq!((&text, cached), (&expected[&n], Some(0)), "{protocol}: transferred blocks are not cached ones");
        }
        pools.at_rest().await;
        let count = prompts.len() as u64;
        assert_eq!(Pools::sum(&pools.prefills, |sums| sums.legs_prefill), count, "{protocol}");
        assert_eq!(Pools::sum(&pools.decodes, |sums| sums.legs_decode), count, "{protocol}");
        for engines in [&pools.prefills, &pools.decodes] {
            assert_eq!(Pools::sum(engines, |sums| sums.rejected + sums.aggregated + sums.late_or_unknown), 0);
        }
        let held = Pools::sum(&pools.prefills, |sums| sums.blocks_held_total);
        let claimed = Pools::sum(&pools.prefills, |sums| sums.blocks_claimed_total);
        assert!(held > 0 && held == claimed, "{protocol}: {claimed} of {held} blocks claimed");
        assert_eq!(pools.prefills("remote").await, count, "{protocol}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_prefill_pool_is_chosen_by_its_caches_and_reports_them() {
    for protocol in Protocol::ALL {
        let pools = Pools::start(protocol, Size { ranks: ranks(protocol), ..SMALL }, |_| {}).await;
        let prompt = prompt(1, 20);
        let first = pools.complete(&prompt, 5, true).await;
        assert_eq!(completion(&first).1, Some(0), "{protocol}");
        pools.until_indexed("mock-prefill", &prompt, 20).await;
        let second = pools.complete(&prompt, 5, true).await;
        assert_eq!(completion(&second).1, Some(u64::from(20 * BLOCK_SIZE)), "{protocol}: same prefill rank");
        pools.at_rest().await;
    }
}
