//! KV events of the embedder into the index, and dumps of its contents.

use std::collections::BTreeSet;

use tokio::sync::{oneshot, watch};

use super::router::Router;
use crate::actors::radix::RadixMsg;
use crate::actors::views::kv_source::KvSourceStatus;
use crate::actors::views::status::RouterState;
use crate::error::{Down, FlushError, RouteError};
use crate::protocol::{KvEvent, RouterEvent, WorkerRank};
use crate::request::RouteRequest;
use crate::schedule::Rejection;
use crate::shell::shard::shard_of;

impl Router {
    /// Applies KV events. The order per rank is kept, also across calls that are awaited one after the other.
    ///
    /// Waits while a shard has `events.blocks_max` queued blocks of events. Without an index it has no effect; with
    /// `events.mode` `off` only [`KvEvent::Cleared`] has one, and the others are counted. Irregular events are counted by
    /// `pointsman_kv_events_refused_total` and are no error.
    ///
    /// # Errors
    /// When the router is down.
    pub async fn apply_events(&self, events: Vec<RouterEvent>) -> Result<(), Down> {
        self.views().status.up()?;
        let (n_all, mut events) = (events.len(), events);
        if !self.edge().config.events.mode.reads_events() {
            events.retain(|event| matches!(event.data, KvEvent::Cleared));
            self.edge().meters.unused_events.increment((n_all - events.len()) as u64);
        }
        match self.strands().shards.len() {
            _ if events.is_empty() => Ok(()),
            0 => Ok(()),
            1 => self.apply_to(0, events).await,
            shards => {
                let mut by_shard: Vec<Vec<RouterEvent>> = vec![Vec::new(); shards];
                for event in events {
                    by_shard[shard_of(event.rank, shards)].push(event);
                }
                for (shard, events) in by_shard.into_iter().enumerate().filter(|(_, events)| !events.is_empty()) {
                    self.apply_to(shard, events).await?;
                }
                Ok(())
            }
        }
    }

    async fn apply_to(&self, shard: usize, events: Vec<RouterEvent>) -> Result<(), Down> {
        let blocks = events.iter().map(|event| event.data.block_count()).sum();
        let permit = self.strands().shards.admit(shard, blocks, &self.views().status).await?;
        self.strands().shards.strand(shard).tell(RadixMsg::Apply { events, only: None, permit });
        Ok(())
    }

    /// Records that the embedder has sent a prompt to a rank without a booking. If decisions create speculative entries
    /// (`events.mode` is `off`, or `auto` and the rank publishes no events, or `index.speculative.with_events_ttl_ms`
    /// is set), the prompt is assumed to be cached there, as after a routing decision now. Repeated calls refresh the
    /// entry. Otherwise the call has no effect. Bookings record their decisions themselves.
    ///
    /// Waits while the shard of the rank has `events.blocks_max` queued blocks.
    ///
    /// # Errors
    /// An unknown rank, a prompt that cannot be hashed, or a router that is down.
    pub async fn record_routing_decision(&self, request: RouteRequest<'_>, rank: WorkerRank) -> Result<(), RouteError> {
        self.views().status.up()?;
        if !self.workers().iter().any(|worker| worker.ranks.contains(&rank)) {
            return Err(Rejection::UnknownRank(rank).into());
        }
        let Some(speculative_prompt) = self.prepare(&request)?.speculative_prompt else { return Ok(()) };
        let shard = self.strands().shards.number_of(rank);
        let permit = self.strands().shards.admit(shard, speculative_prompt.hashes.len(), &self.views().status).await?;
        self.strands().shards.strand(shard).tell(RadixMsg::Recorded {
            rank,
            speculative_prompt,
            is_remote: false,
            permit,
        });
        Ok(())
    }

    /// Ranks whose index contents were lost with a shard, as a watch. For each of them, send a `Cleared` event and then
    /// everything that the rank holds. From the `Cleared` event on, the index of the rank counts as complete.
    #[must_use]
    pub fn resyncs(&self) -> watch::Receiver<BTreeSet<WorkerRank>> {
        self.views().cold.subscribe()
    }

    /// State of the KV event stream of each rank that the router reads itself
    /// ([`WorkerConfig::kv_events`](crate::protocol::WorkerConfig::kv_events)), in rank order.
    #[must_use]
    pub fn kv_sources(&self) -> Vec<KvSourceStatus> {
        let mut sources: Vec<KvSourceStatus> =
            self.views().ranks.all().iter().filter_map(|entry| entry.source.status()).collect();
        sources.sort_by_key(|source| source.rank);
        sources
    }

    /// Waits until every event accepted before this call has been applied.
    ///
    /// # Errors
    /// When the router is down, or a shard was lost with accepted events.
    pub async fn flush(&self) -> Result<(), FlushError> {
        self.views().status.up()?;
        let since = self.views().status.state();
        let replies: Vec<_> = self.strands().shards.iter().map(|shard| shard.ask(|_| ())).collect();
        for reply in replies {
            self.reply_of_shard(reply, since).await?;
        }
        Ok(())
    }

    /// Contents of the index as events that rebuild it, parents first. Includes every event accepted before this call.
    ///
    /// A shard dumps one rank at a time and serves other messages between two ranks, so that no step takes long.
    ///
    /// # Errors
    /// When the router is down, or a shard was lost before the end of the dump.
    pub async fn dump_events(&self) -> Result<Vec<RouterEvent>, FlushError> {
        self.views().status.up()?;
        let (since, shards) = (self.views().status.state(), &self.strands().shards);
        let mut ranks: Vec<WorkerRank> = self.views().ranks.all().iter().map(|entry| entry.rank).collect();
        ranks.sort_unstable();
        ranks.dedup(); // of a rank that is removed and registered again, both entries may exist
        let incarnations: Vec<u32> = (0..shards.len()).map(|shard| shards.incarnation(shard).get()).collect();
        let mut events = Vec::new();
        for rank in ranks {
            let Some(shard) = shards.of(rank) else { continue };
            let reply = shard.ask(move |shard| shard.shell.dump(rank));
            events.extend(self.reply_of_shard(reply, since).await?);
        }
        // The remaining ranks of a shard that was lost between two ranks were dumped without their contents.
        let is_present = |(shard, incarnation): (usize, &u32)| shards.incarnation(shard).is(*incarnation);
        if incarnations.iter().enumerate().all(is_present) { Ok(events) } else { Err(FlushError::Lost) }
    }

    async fn reply_of_shard<T>(&self, reply: oneshot::Receiver<T>, since: RouterState) -> Result<T, FlushError> {
        let status = &self.views().status;
        let reply = status.reply_of(reply, since).await;
        reply.ok_or_else(|| status.up().err().map_or(FlushError::Lost, FlushError::Down))
    }
}
