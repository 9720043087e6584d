//! Failures of prefill and decode ranks: other ranks, then the decode rank alone.

use pointsman_gateway::formats::handover::Protocol;
use pointsman_trial::mock::{Faults, Scope};

use super::pools::{Pools, Size, alone, completion};
use super::{SMALL, prompt, ranks};

fn failing(status_share: f64) -> Faults {
    Faults { status: 500, status_share, scope: Scope::Generation, ..Faults::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_rank_is_replaced_by_another() {
    let prompts: Vec<_> = (0..8).map(|seed| prompt(100 + seed, 5)).collect();
    let expected = alone(&prompts, 6).await;
    for (protocol, decodes) in Protocol::ALL.into_iter().flat_map(|protocol| [(protocol, false), (protocol, true)]) {
        let pools = Pools::start(protocol, Size { ranks: ranks(protocol), ..SMALL }, |_| {}).await;
        let failed = if decodes { &pools.decodes[1] } else { &pools.prefills[0] };
        failed.set_faults(failing(1.0)).expect("valid");
        for (n, prompt) in prompts.iter().enumerate() {
            let answer = pools.complete(prompt, 6, n % 2 == 0).await;
            assert_eq!(answer.status, 200, "{protocol}: {}", answer.text());
            assert!(decodes || answer.header("x-pointsman-prefill") == Some("remote"), "{protocol}");
            assert_eq!(completion(&answer).0, expected[&n], "{protocol}");
        }
        pools.at_rest().await;
        let sums = failed.handover();
        assert_eq!(if decodes { sums.legs_decode } else { sums.legs_prefill }, 0, "{protocol}");
        assert!(decodes || pools.prefills[1].handover().legs_prefill == prompts.len() as u64, "{protocol}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_working_prefill_rank_the_decode_rank_serves_or_the_error_is_named() {
    for protocol in Protocol::ALL {
        let mut pools = Pools::start(protocol, Size { ranks: ranks(protocol), ..SMALL }, |_| {}).await;
        for engine in &pools.prefills {
            engine.set_faults(failing(1.0)).expect("valid");
        }
        let faulty = pools.complete(&prompt(200, 5), 4, true).await;
        for engine in pools.prefills.drain(..) {
            engine.shutdown().await;
        }
        let dead = pools.complete(&prompt(201, 5), 4, true).await;
        for answer in [faulty, dead] {
            let prefill = answer.header("x-pointsman-prefill");
            if protocol.decode_prefills() {
                assert_eq!((answer.status, prefill), (200, Some("fallback")), "{protocol}: {}", answer.text());
            } else {
                assert!(answer.status >= 500 && prefill.is_none(), "{protocol}: {}", answer.text());
            }
        }
        pools.at_rest().await;
        assert_eq!(pools.prefills("fallback").await, if protocol.decode_prefills() { 2 } else { 0 }, "{protocol}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarted_prefill_engines_serve_again() {
    for protocol in Protocol::ALL {
        let pools = Pools::start(protocol, Size { prefills: 1, decodes: 1, ranks: ranks(protocol) }, |_| {}).await;
        assert_eq!(pools.complete(&prompt(400, 5), 4, true).await.header("x-pointsman-prefill"), Some("remote"));
        let format = pools.prefills[0].config().events();
        pools.prefills[0].restart(format).await.expect("restarts");
        let answer = pools.complete(&prompt(401, 5), 4, true).await;
        let prefill = answer.header("x-pointsman-prefill").map(str::to_owned);
        assert_eq!((answer.status, prefill.as_deref()), (200, Some("remote")), "{protocol}: {}", answer.text());
        pools.at_rest().await;
        assert_eq!(Pools::sum(&pools.decodes, |sums| sums.late_or_unknown), 0, "{protocol}");
    }
}
