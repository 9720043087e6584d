//! Sharing of routed prompts: publishes own decisions from which speculative entries follow, and forwards those of other
//! replicas to the index shards.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

use super::bus::ReplicaBus;
use crate::actors::radix::RadixMsg;
use crate::actors::radix::shards::Shards;
use crate::config::RouterConfig;
use crate::predict::{SpeculationModel, SpeculativePrompt};
use crate::replica::{ReplicaLayout, ReplicaTopic, RoutedPrompt, encode_routed};

/// Maximum number of blocks per interval, over all shards: 32 KiB.
const BLOCKS_MAX: usize = 4_096;

/// Decisions of a shard, and the number of dropped ones.
type Taken = (Vec<RoutedPrompt>, u64);

pub(super) struct RoutedSharing {
    bus: Arc<dyn ReplicaBus>,
    pool: Arc<str>,
    layout: ReplicaLayout,
    shards: Arc<Shards>,
    /// Outstanding reply of each shard.
    answers: Vec<Option<oneshot::Receiver<Taken>>>,
}

impl RoutedSharing {
    /// `None` if the router derives no speculative entries from its decisions.
    pub(super) fn of(
        config: &RouterConfig,
        bus: &Arc<dyn ReplicaBus>,
        pool: &Arc<str>,
        layout: ReplicaLayout,
        shards: &Arc<Shards>,
    ) -> Option<Self> {
        SpeculationModel::of(config)?;
        let answers = shards.iter().map(|_| None).collect();
        Some(Self { bus: Arc::clone(bus), pool: Arc::clone(pool), layout, shards: Arc::clone(shards), answers })
    }

    /// Publishes own decisions. Returns the number of those dropped because of their number.
    pub(super) fn on_tick(&mut self) -> u64 {
        let blocks_max = (BLOCKS_MAX / self.answers.len().max(1)).max(1);
        let mut all_dropped = 0;
        for (shard, answer) in self.shards.iter().zip(&mut self.answers) {
            let receiver = answer.get_or_insert_with(|| shard.ask(move |shard| shard.shell.take_routed(blocks_max)));
            // An idle shard has replied already. The reply of a busy one is published after the next interval.
            match receiver.try_recv() {
                Ok((prompts, dropped)) => {
                    *answer = None;
                    all_dropped += dropped;
                    if !prompts.is_empty() {
                        let message = encode_routed(self.layout, &prompts);
                        self.bus.publish(&self.pool, ReplicaTopic::Speculative, message.into());
                    }
                }
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Closed) => *answer = None,
            }
        }
        all_dropped
    }

    /// Forwards decisions of another replica. Returns the number of those dropped because their shard is behind.
    pub(super) fn receive(&self, prompts: Vec<RoutedPrompt>) -> u64 {
        let mut dropped = 0;
        for RoutedPrompt { rank, hashes } in prompts {
            let shard = self.shards.number_of(rank);
            match self.shards.try_admit(shard, hashes.len()) {
                Some(permit) => self.shards.strand(shard).tell(RadixMsg::Recorded {
                    rank,
                    speculative_prompt: SpeculativePrompt { hashes, private_blocks: 0 },
                    is_remote: true,
                    permit,
                }),
                None => dropped += 1,
            }
        }
        dropped
    }
}
