//! Clients that leave in each phase: both legs end, and nothing stays booked or held.

use pointsman_gateway::formats::handover::Protocol;
use pointsman_trial::mock::MockConfig;

use super::pools::{Pools, Size, body};
use super::{SMALL, prompt, ranks};
use crate::common::proxy::{send, until};

/// Slow enough that prompts of many blocks take a while.
fn slow(config: &mut MockConfig) {
    config.time_scale = 1.0;
}

/// Starts a streamed request and returns its connection.
async fn begin(pools: &Pools, seed: u32, blocks: u32, output: u32) -> tokio::net::TcpStream {
    let body = body(&prompt(seed, blocks), output, true).to_string();
    send(pools.gateway.address(), "POST", "/v1/completions", "", body.as_bytes()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_leave_during_the_prefill_end_both_legs() {
    for protocol in Protocol::ALL {
        let size = Size { ranks: ranks(protocol), ..SMALL };
        let pools = Pools::start_with(protocol, size, slow, |_| {}).await;
        let clients = [begin(&pools, 500, 800, 50).await, begin(&pools, 501, 800, 50).await];
        until("prefill legs run", || Pools::sum(&pools.prefills, |sums| sums.running_now) == 2).await;
        drop(clients);
        pools.at_rest().await;
        let sums = |counter: fn(&pointsman_trial::mock::HandoverCounters) -> u64| Pools::sum(&pools.prefills, counter);
        assert_eq!(sums(|sums| sums.holding_now), 0, "{protocol}");
        let ended = sums(|sums| sums.blocks_claimed_total + sums.blocks_lost_total);
        assert_eq!(ended, sums(|sums| sums.blocks_held_total), "{protocol}");
        if protocol == Protocol::Sglang {
            assert_eq!(Pools::sum(&pools.decodes, |sums| sums.torn), 0, "a hand-over in progress ends first");
            until("both decode legs are aborted", || Pools::sum(&pools.decodes, |sums| sums.abort_requests) >= 2).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_leave_during_the_output_end_the_decode_leg() {
    for protocol in Protocol::ALL {
        let size = Size { ranks: ranks(protocol), ..SMALL };
        let pools = Pools::start_with(protocol, size, slow, |_| {}).await;
        let router = pools.gateway.router("mock").expect("the model exists");
        let client = begin(&pools, 502, 4, 100_000).await;
        let claimed = || Pools::sum(&pools.prefills, |sums| sums.blocks_claimed_total) > 0;
        until("the decode leg runs", || claimed() && Pools::sum(&pools.decodes, |sums| sums.running_now) == 1).await;
        assert_eq!(router.health().leases, 1, "{protocol}");
        let prefill = pools.gateway.router("mock-prefill").expect("the model exists");
        until("the booking of the prefill has ended", || prefill.health().leases == 0).await;
        drop(client);
        pools.at_rest().await;
        assert_eq!(Pools::sum(&pools.prefills, |sums| sums.holding_now), 0, "{protocol}");
        if protocol == Protocol::Sglang {
            until("the decode leg is aborted", || Pools::sum(&pools.decodes, |sums| sums.abort_requests) > 0).await;
            assert_eq!(Pools::sum(&pools.prefills, |sums| sums.abort_requests), 0, "the prefill leg has ended");
        }
    }
}
