//! Comparison of the decisions of both routers over one fleet.
//!
//! Requests are processed one at a time. Before each decision both routers have applied every event and every end of a
//! request. Both are queried for their decision, and both book the request on Pointsman's choice. Each decision of
//! either router is thus made in the same state, independently of earlier decisions, and a difference is due to that
//! decision alone.
//!
//! A request is in prefill first: it adds load to its rank and has no blocks in the cache. At the end of its prefill
//! the rank's [`Engine`] holds its blocks and both routers receive the events; later the request ends. The seed
//! determines which request advances next, so requests do not end in the order of their arrival.

use std::num::NonZeroU32;

use clap::Args;
use pointsman::internals::select::Draw;
use pointsman::protocol::{BlockHash, StoredBlock, WorkerRank};
use pointsman::{AddRequest, Prompt, RouteRequest};
use pointsman_bench::Failed;
use pointsman_bench::engine::{Change, Engine, name_blocks};
use pointsman_bench::fleet::Fleet;
use pointsman_bench::replay::{Common, Replay};
use pointsman_bench::targets::{Call, Embedded, Target};
use pointsman_versus::columns::print;

use crate::dynamo::DynamoRouter;
use crate::tally::{self, Decision, Facts, Tally, View};

/// A comparison of decisions.
#[derive(Args, Debug)]
pub(crate) struct Parity {
    #[command(flatten)]
    common: Common,
    /// Number of simulated workers, one or several values
    #[arg(
        long,
        value_delimiter = ',',
        default_values_t = [8, 64],
        value_parser = clap::value_parser!(u32).range(1..=65_536)
    )]
    workers: Vec<u32>,
    /// Number of requests in prefill among those in flight; the others decode
    #[arg(long, default_value_t = 64)]
    prefilling: usize,
    /// Number of runtime threads
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    threads: u32,
    /// Minimum share of untied decisions that must agree, in %
    #[arg(long, default_value_t = 99.0)]
    agreement_min: f64,
    /// Print pairs of ranks and counts as one JSON array; the table is printed on standard error
    #[arg(long)]
    json: bool,
}

impl Parity {
    /// Runs every fleet and prints the table.
    pub(crate) fn run(&self) -> Result<(), Failed> {
        if self.common.take_turns {
            return Err("--take-turns: a parity run has a single client".into());
        }
        let prompts = self.common.prompts()?;
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(self.threads as usize).enable_all().build()?;
        let mut fleets = Vec::new();
        for &workers in &self.workers {
            let tally = runtime.block_on(self.replay(workers, &prompts))?;
            fleets.push((workers * self.common.dp_size, tally));
        }
        print(&tally::markdown(&fleets), &fleets, self.json)?;
        for (ranks, tally) in &fleets {
            let agreement =
                tally.agreement_percent().ok_or_else(|| format!("{ranks} ranks: every decision is tied"))?;
            if agreement < self.agreement_min {
                return Err(format!("{ranks} ranks: {agreement:.3} % agree, under {} %", self.agreement_min).into());
            }
        }
        Ok(())
    }

    /// Replays `prompts` on both routers with a new fleet.
    async fn replay(&self, workers: u32, prompts: &[pointsman_trial::workload::Prompt]) -> Result<Tally, Failed> {
        let setup = Replay {
            common: self.common.clone(),
            workers,
            clients: 1,
            threads: self.threads as usize,
            rate: None,
            repeat: None,
            json: false,
        }
        .setup();
        let ours = Embedded::start(&setup).await?;
        let theirs = DynamoRouter::start(&setup, true).await?;
        let mut pair = RouterPair::new(ours, theirs, setup.fleet, self.common.kv_blocks);
        let mut draws = Draws { seed: self.common.seed, drawn: 0 };
        let (mut tally, mut prefilling, mut decoding) = (Tally::default(), Vec::new(), Vec::new());

        for (number, tokens) in prompts.iter().enumerate() {
            let decision = pair.decide(tokens).await?;
            let verdict = decision.verdict();
            tally.count(&decision, &verdict);

            let blocks = name_blocks(&hashed(tokens, self.common.block_size)?);
            prefilling.push(pair.book(format!("request-{number}"), tokens, decision.ours.chosen, blocks).await?);
            if prefilling.len() > self.prefilling.min(self.common.inflight) {
                let next = prefilling.swap_remove(draws.below(prefilling.len()));
                decoding.push(pair.complete_prefill(next).await?);
            }
            if prefilling.len() + decoding.len() > self.common.inflight {
                pair.free(decoding.swap_remove(draws.below(decoding.len()))).await?;
            }
        }
        for booked in prefilling.into_iter().chain(decoding) {
            pair.free(booked).await?;
        }
        pair.ours.shutdown().await;
        pair.theirs.shutdown().await;
        Ok(tally)
    }
}

/// Block hashes of `tokens`. Both routers must agree on them, because the same engine events are sent to both.
fn hashed(tokens: &[u32], block_size: NonZeroU32) -> Result<Vec<BlockHash>, Failed> {
    let hashes = Embedded::hash(tokens, block_size);
    if hashes == DynamoRouter::hash(tokens, block_size) {
        Ok(hashes)
    } else {
        Err("the routers hash blocks differently".into())
    }
}

/// A stream of pseudo-random positions, determined by its seed.
struct Draws {
    seed: u64,
    drawn: u64,
}

impl Draws {
    fn below(&mut self, count: usize) -> usize {
        self.drawn += 1;
        let position = Draw { seed: self.seed, request: self.drawn }.unit() * count as f64;
        (position as usize).min(count.saturating_sub(1))
    }
}

/// A request that both routers have booked.
struct Booked {
    id: String,
    rank: WorkerRank,
    blocks: Box<[StoredBlock]>,
}

/// Both routers with their common engines.
struct RouterPair {
    ours: Embedded,
    theirs: DynamoRouter,
    fleet: Fleet,
    engines: Vec<Engine>,
    change: Change,
}

impl RouterPair {
    fn new(ours: Embedded, theirs: DynamoRouter, fleet: Fleet, kv_blocks: usize) -> Self {
        let engines = (0..fleet.ranks()).map(|_| Engine::new(kv_blocks)).collect();
        Self { ours, theirs, fleet, engines, change: Change::default() }
    }

    /// Decisions of both routers for `tokens`, after all pending input has been applied.
    async fn decide(&self, tokens: &[u32]) -> Result<Decision, Failed> {
        let router = self.ours.router();
        router.flush().await?;
        self.theirs.flush().await?;
        let request = RouteRequest::query(Prompt::Tokens(tokens));
        // The explanation queries every rank, so it includes all ends and prefills. The decision of `route`, with its
        // shortlist, follows.
        let explanation = router.explain(request.clone()).await?;
        let chosen = router.find_best_match(request).await?.rank();
        let ranks = explanation.ranks.iter().map(|row| {
            if !row.exact {
                return Err(format!("{} was explained by bounds", row.facts.rank).into());
            }
            Ok(Facts {
                rank: row.facts.rank,
                overlap_blocks: row.facts.overlap.device_blocks.into(),
                potential_blocks: row.facts.potential_blocks,
                prefill_tokens: row.facts.prefill_tokens,
                active_requests: row.facts.active_requests.into(),
                cost: row.cost_max,
            })
        });
        let ours = View { chosen, ranks: ranks.collect::<Result<_, Failed>>()? };
        let theirs = self.theirs.view(tokens).await?;
        if ours.ranks.iter().map(|row| row.rank).ne(theirs.ranks.iter().map(|row| row.rank)) {
            return Err("the routers have different ranks".into());
        }
        Ok(Decision { ours, theirs })
    }

    /// Books the request on `rank` in both routers.
    async fn book(
        &self,
        id: String,
        tokens: &[u32],
        rank: WorkerRank,
        blocks: Box<[StoredBlock]>,
    ) -> Result<Booked, Failed> {
        self.ours.router().add_request(AddRequest::new(&id, rank, Prompt::Tokens(tokens))).await?;
        let id = self.theirs.reserve_on(Call { id, tokens: tokens.to_vec(), session: None }, rank).await?;
        Ok(Booked { id, rank, blocks })
    }

    /// Lets the engine serve the request, then reports its blocks and its first token to both routers.
    async fn complete_prefill(&mut self, mut booked: Booked) -> Result<Booked, Failed> {
        let Booked { id, rank, blocks } = &mut booked;
        let index = self.fleet.index(*rank).ok_or("the rank is not in the fleet")?;
        self.engines[index].serve(blocks, &mut self.change);
        let (mut events, mut their_events) = (Vec::new(), Vec::new());
        self.ours.encode(*rank, blocks, &self.change, &mut events);
        self.theirs.encode(*rank, blocks, &self.change, &mut their_events);
        self.ours.apply_events(events).await?;
        self.theirs.apply_events(their_events).await?;
        self.ours.router().mark_prefill_completed(id)?;
        self.theirs.prefill_completed(id).await?;
        Ok(booked)
    }

    async fn free(&self, booked: Booked) -> Result<(), Failed> {
        self.ours.router().free(&booked.id)?;
        self.theirs.free(booked.id).await
    }
}
