//! The policy `latency` during minutes of traffic: output limits, ranks that were slow or hang, and sequential prompts.
//!
//! Time is paused. An engine is modeled by its time to the first token and its time to completion.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use pointsman::policy::Policy;
use pointsman::protocol::{RouterEvent, WorkerId};
use pointsman::test_support::rank;
use pointsman::{Constraints, Placement, Prompt, RequestOptions, RouteRequest, Router, RouterConfig};

use crate::common::{cleared, config, router, stored_in_blocks};

const BLOCK_SIZE: u32 = 64;

fn with(policy: Policy) -> RouterConfig {
    RouterConfig { block_size: Some(BLOCK_SIZE), policy: policy.into(), ..config() }
}

/// A prompt whose content is a function of `seed`. Prompts with equal seeds share a prefix.
fn prompt(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|n| seed.wrapping_mul(0x9e37_79b9) ^ n).collect()
}

/// Next event of a request in flight.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Next {
    FirstToken,
    End,
}

/// Requests in flight. A request without a first token hangs.
struct Traffic {
    router: Router,
    now_ms: u64,
    sent: u32,
    live: BTreeMap<u32, Placement>,
    next: BinaryHeap<Reverse<(u64, Next, u32)>>,
}

impl Traffic {
    async fn new(policy: Policy, ranks: u64) -> Self {
        let router = router(with(policy), ranks).await;
        Self { router, now_ms: 0, sent: 0, live: BTreeMap::new(), next: BinaryHeap::new() }
    }

    /// Advances the clock and processes all due events.
    async fn pass(&mut self, ms: u64) {
        let until = self.now_ms + ms;
        while let Some(Reverse((at, next, request))) = self.next.peek().copied().filter(|next| next.0.0 <= until) {
            self.next.pop();
            tokio::time::advance(Duration::from_millis(at - self.now_ms)).await;
            self.now_ms = at;
            match next {
                Next::FirstToken => self.live[&request].prefill_completed(),
                Next::End => drop(self.live.remove(&request)),
            }
        }
        tokio::time::advance(Duration::from_millis(until - self.now_ms)).await;
        self.now_ms = until;
    }

    async fn apply(&self, event: RouterEvent) {
        self.router.apply_events(vec![event]).await.expect("up");
        self.router.flush().await.expect("up");
    }

    /// Sends a prompt. Its first token arrives after the rank's `ttft_ms`, and it completes a second later.
    async fn send(&mut self, tokens: &[u32], only: Option<u64>, ttft_ms: impl Fn(u64) -> Option<u64>) -> u64 {
        let allowed_workers = only.map(|worker| [WorkerId(worker)].into());
        let constraints = Constraints { allowed_workers, ..Constraints::default() };
        let id = self.sent.to_string();
        let request = RouteRequest {
            options: RequestOptions { constraints, ..RequestOptions::default() },
            ..RouteRequest::new(&id, Prompt::Tokens(tokens))
        };
        let placed = self.router.route(request).await.expect("placed");
        let worker = placed.rank().worker.0;
        if let Some(ttft_ms) = ttft_ms(worker) {
            self.next.push(Reverse((self.now_ms + ttft_ms, Next::FirstToken, self.sent)));
            self.next.push(Reverse((self.now_ms + ttft_ms + 1_000, Next::End, self.sent)));
        }
        self.live.insert(self.sent, placed);
        self.sent += 1;
        worker
    }
}

/// A rank has 30 prefills of 20 s and then becomes as fast as the three others: within two minutes it regains its
/// share.
#[tokio::test(start_paused = true)]
async fn a_recovered_rank_regains_its_share_within_two_minutes() {
    for gap_ms in [400, 50] {
        let mut traffic = Traffic::new(Policy::Latency, 4).await;
        let slow = |worker| Some(if worker == 3 { 20_000 } else { 200 });
        for n in 0..30 {
            traffic.send(&prompt(n, 4_000), Some(3), slow).await;
            for other in 0..3 {
                traffic.send(&prompt(1_000 + 3 * n + other, 4_000), Some(u64::from(other)), slow).await;
            }
            traffic.pass(21_000).await;
        }
        let mut counts = [0_u32; 4];
        let recovered = traffic.now_ms;
        while traffic.now_ms < recovered + 240_000 {
            let worker = traffic.send(&prompt(10_000 + traffic.sent, 4_000), None, |_| Some(200)).await;
            if traffic.now_ms >= recovered + 120_000 {
                counts[worker as usize] += 1;
            }
            traffic.pass(gap_ms).await;
        }
        let share = f64::from(counts[3]) / f64::from(counts.iter().sum::<u32>());
        assert!(share >= 0.8 * 0.25, "a request every {gap_ms} ms: {counts:?} in minutes 3 and 4");
    }
}

/// Chats of six turns with eight system prompts, ten requests a second. A rank loses its cache: one or two minutes later
/// it has its share of the requests and of the hits, by its lower load alone.
#[tokio::test(start_paused = true)]
async fn an_emptied_rank_fills_again() {
    for (us_per_token, after) in [(160, 600), (40, 1_200)] {
        let (mut traffic, mut cached) = (Traffic::new(Policy::Latency, 4).await, BTreeMap::new());
        let (mut free_at_us, mut sent, mut hits) = ([0; 4], [0; 4], [0; 4]);
        for n in 0..1_000 + after + 600 {
            if n == 1_000 {
                cached.retain(|(worker, _), _| *worker != 3);
                traffic.apply(cleared(rank(3))).await;
            }
            let (slot, turn) = (n % 40, n / 40 + n % 40 % 6);
            let (system, chat) = (slot % 8, 1_000 + slot + 40 * (turn / 6));
            let tokens = [prompt(system, 960), prompt(chat, 384 * (turn % 6 + 1))].concat();
            let (length, now_us) = (tokens.len() as u64, traffic.now_ms * 1_000);
            let hit = |worker| [system, chat].iter().filter_map(|part| cached.get(&(worker, *part))).sum::<u64>();
            let end = |worker: u64| free_at_us[worker as usize].max(now_us) + us_per_token * (length - hit(worker));
            let worker = traffic.send(&tokens, None, |worker| Some((end(worker) - now_us) / 1_000)).await;
            let is_counted = u64::from(n >= 1_000 + after);
            sent[worker as usize] += is_counted;
            hits[worker as usize] += is_counted * hit(worker) * 1_000 / length;
            free_at_us[worker as usize] = end(worker);
            cached.extend([((worker, system), 960), ((worker, chat), length - 960)]);
            traffic.apply(stored_in_blocks(rank(worker), &tokens, BLOCK_SIZE)).await;
            traffic.pass(100).await;
        }
        let rate = |from: usize, to| hits[from..to].iter().sum::<u64>() / sent[from..to].iter().sum::<u64>();
        assert!(sent[3] >= 120 && rate(3, 4) >= rate(0, 3) * 9 / 10, "{us_per_token} us: {sent:?}, {hits:?}");
    }
}

/// New prompts one at a time, with nothing else in flight: no rank receives more than 1.05 times its share,
/// even if each is slightly slower than the previous one.
#[tokio::test(start_paused = true)]
async fn paced_prompts_spread_over_an_idle_pool() {
    for slower_ms in [0, 1] {
        let mut traffic = Traffic::new(Policy::Latency, 8).await;
        let mut counts = [0_u32; 8];
        for n in 0..800 {
            let worker = traffic.send(&prompt(n, 4_000), None, |worker| Some(200 + worker * slower_ms)).await;
            counts[worker as usize] += 1;
            traffic.pass(1_300).await;
        }
        assert!(counts.iter().all(|count| (95..=105).contains(count)), "{slower_ms} ms slower: {counts:?}");
    }
}

/// Sessions without anything else in flight: 56 sessions of 8 turns, two seconds apart, 7 at a time. Every rank receives
/// at most 1.3 times its share, and every turn goes to the rank with the session's cache.
#[tokio::test(start_paused = true)]
async fn paced_sessions_spread_over_an_idle_pool() {
    let mut traffic = Traffic::new(Policy::Latency, 8).await;
    let (mut counts, mut moved) = ([0_u32; 8], 0);
    for group in 0..8 {
        let mut homes = [None; 7];
        for turn in 1..=8 {
            for (session, home) in (0..).zip(&mut homes) {
                let tokens = prompt(1_000 + group * 7 + session, 640 * turn);
                let worker = traffic.send(&tokens, None, |_| Some(50)).await;
                counts[worker as usize] += 1;
                moved += u32::from(home.replace(worker).is_some_and(|home| home != worker));
                traffic.apply(stored_in_blocks(rank(worker), &tokens, BLOCK_SIZE)).await;
                traffic.pass(2_000).await;
            }
        }
    }
    assert_eq!(moved, 0, "no hit is lost");
    assert!(counts.iter().all(|count| f64::from(*count) <= 1.3 * 448.0 / 8.0), "{counts:?}");
}

/// Counts the requests that a hung rank accepts and never answers during 50 s at 20 requests a second. With
/// `conversations`, 40 conversations are cached, ten of them on the hung rank.
async fn lost_to_a_hung_rank(policy: Policy, conversations: bool) -> usize {
    let mut traffic = Traffic::new(policy, 4).await;
    let prefixes: Vec<Vec<u32>> = (0..40).map(|n| prompt(50_000 + n, 6_400)).collect();
    if conversations {
        for (n, prefix) in prefixes.iter().enumerate() {
            traffic.apply(stored_in_blocks(rank(n as u64 % 4), prefix, BLOCK_SIZE)).await;
        }
    }
    let mut lost = 0;
    for n in 0..1_400_u32 {
        let is_hung = n >= 400;
        let asked = if conversations {
            let mut asked = prefixes[n as usize % 40].clone();
            asked.extend(prompt(90_000 + n, 200));
            asked
        } else {
            prompt(1_000 + n, 2_000)
        };
        let worker = traffic.send(&asked, None, |worker| (!is_hung || worker != 3).then_some(150)).await;
        lost += usize::from(is_hung && worker == 3);
        traffic.pass(50).await;
    }
    lost
}

#[tokio::test(start_paused = true)]
async fn hanging_engines_keep_their_load() {
    for conversations in [true, false] {
        let latency = lost_to_a_hung_rank(Policy::Latency, conversations).await;
        let kv = lost_to_a_hung_rank(Policy::Kv, conversations).await;
        assert!(latency <= kv.max(12), "{latency} of 1,000 requests lost, under kv {kv}");
    }
}
