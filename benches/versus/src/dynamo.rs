//! dynamo-kv-router as a target of the closed loop: its selection core, embedded as its documentation describes for a
//! host. Also the additional queries of a parity run.
//!
//! All settings are dynamo-kv-router's defaults, except those that the loop determines (block size, fleet). A host with
//! its own event transport feeds the index itself, and so does this module. With the default transport, one socket per
//! rank would continuously reconnect to engines that do not exist, and that cost would count as dynamo-kv-router's.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use dynamo_kv_router::identity::RoutingPartitionId;
use dynamo_kv_router::plugins::RouterPluginRegistry;
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, RouterEvent, RoutingConstraints, StorageTier, WorkerWithDpRank,
    compute_block_hash_for_seq,
};
use dynamo_kv_router::services::indexer::backend::Indexer;
use dynamo_kv_router::services::indexer::registry::WorkerRegistry;
use dynamo_kv_router::services::selection::{
    DEFAULT_MODEL_NAME, KvEventIngress, KvIndexSource, OverlapScoresRequest, PotentialLoadsRequest, PromptRequest,
    SelectAndReserveRequest, SelectRequest, SelectionService, SelectionServiceBuilder, WorkerRequest,
};
use dynamo_kv_router::{DEFAULT_ROUTING_GROUP, KvRouterConfig, WorkerSelectionPolicy, WorkerType};
use pointsman::protocol::{BlockHash, KvEvent, StoredBlock, WorkerId, WorkerRank};
use pointsman_bench::Failed;
use pointsman_bench::fleet::Setup;
use pointsman_bench::targets::{Call, Routed, Target};
use pointsman_trial::engine::EngineConfig;

use crate::tally::{Facts, View};

/// Timeout for all workers to become schedulable.
const READY_MAX: Duration = Duration::from_secs(30);

/// A running dynamo-kv-router.
pub struct DynamoRouter {
    service: SelectionService,
    indexer: Indexer,
    /// Sequence number of the next event, as from an engine.
    next_event: AtomicU64,
    /// Whether events were applied since the last flush.
    is_unsettled: AtomicBool,
    /// Whether output blocks are reported to it.
    with_output: bool,
}

impl DynamoRouter {
    /// Starts dynamo-kv-router with its own policy over the fleet of `setup`, with `event_threads` event threads or its
    /// own default. It is told of output blocks if `with_output`.
    ///
    /// # Errors
    /// It rejects its configuration or a worker, or is not ready in time.
    pub async fn start(setup: &Setup, with_output: bool) -> Result<Self, Failed> {
        let config = KvRouterConfig::default();
        let event_threads = config.router_event_threads as usize;
        let service = SelectionServiceBuilder::new(config, WorkerType::Aggregated, RouterPluginRegistry::default())
            .worker_selection_policy_factory(Arc::new(|config, role, _| {
                WorkerSelectionPolicy::reference(config.clone(), role.default_selector_label())
            }))
            .indexer_threads(event_threads)
            .kv_index(KvIndexSource::Owned(Arc::new(HostFed)))
            .build()
            .await?;

        let core = service.core();
        let request = |(worker, engine): (WorkerId, &EngineConfig)| WorkerRequest {
            worker_id: worker.0,
            endpoint: Some(format!("http://worker-{worker}:8000")),
            block_size: Some(engine.block_size),
            data_parallel_size: Some(setup.fleet.dp_size),
            max_num_batched_tokens: Some(engine.step_tokens_max.into()),
            ..WorkerRequest::default()
        };
        let requests = setup.fleet.worker_ids().zip(&setup.engines).map(request).collect();
        for upserted in core.upsert_workers(requests).await {
            upserted?;
        }
        let key = RoutingPartitionId::new(DEFAULT_MODEL_NAME, DEFAULT_ROUTING_GROUP);
        let indexer = core.partition(&key).ok_or("no partition for the workers")?.indexer().clone();
        let (next_event, is_unsettled) = (AtomicU64::new(1), AtomicBool::new(false));
        let dynamo = Self { service, indexer, next_event, is_unsettled, with_output };
        dynamo.wait_until_schedulable(setup.fleet.workers as usize).await?;
        Ok(dynamo)
    }

    /// Waits for all workers. They reach the scheduler on a separate task; until then it rejects requests.
    async fn wait_until_schedulable(&self, workers: usize) -> Result<(), Failed> {
        let routable = async {
            let mut attempt = 0;
            loop {
                let ready = self.service.ready().schedulable_workers;
                let call = Call { id: format!("probe-{attempt}"), tokens: vec![0; 64], session: None };
                if ready == workers
                    && let Ok(routed) = self.route(call).await
                {
                    return self.free(routed.handle).await;
                }
                attempt += 1;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(READY_MAX, routable)
            .await
            .map_err(|_| format!("not all of {workers} workers schedulable after {READY_MAX:?}"))?
    }
}

/// Selection and booking.
impl DynamoRouter {
    /// Books on `pinned`, or on the best rank.
    async fn reserve(&self, call: Call, pinned: Option<WorkerRank>) -> Result<Routed<String>, Failed> {
        let prompt_tokens = call.tokens.len();
        let request = SelectAndReserveRequest {
            model_name: DEFAULT_MODEL_NAME.to_owned(),
            routing_group: DEFAULT_ROUTING_GROUP.to_owned(),
            selection_id: Some(call.id),
            prompt: prompt(call.tokens),
            router_config_override: None,
            expected_output_tokens: None,
            priority_jump: None,
            strict_priority: None,
            session_id: None,
            session_context: None,
            affinity_target: None,
            pinned_worker: pinned.map(|rank| WorkerWithDpRank::new(rank.worker.0, rank.rank)),
            allowed_worker_ids: None,
            routing_constraints: RoutingConstraints::default(),
        };
        let response = self.service.core().select_and_reserve(request).await?;
        let cached_tokens = prompt_tokens.saturating_sub(response.effective_prefill_tokens);
        let rank = WorkerRank::new(WorkerId(response.worker_id), response.dp_rank);
        let handle = response.selection_id.ok_or("a reservation without an id")?;
        Ok(Routed { cached_tokens: Some(cached_tokens as u64), ..Routed::new(rank, handle) })
    }

    /// Books on `rank`.
    ///
    /// # Errors
    /// The request is rejected or booked on another rank.
    pub async fn reserve_on(&self, call: Call, rank: WorkerRank) -> Result<String, Failed> {
        let routed = self.reserve(call, Some(rank)).await?;
        if routed.rank == rank {
            Ok(routed.handle)
        } else {
            Err(format!("{rank} was requested, {} was booked", routed.rank).into())
        }
    }

    /// Returns when all previous events have been applied.
    ///
    /// # Errors
    /// The index has stopped.
    pub async fn flush(&self) -> Result<(), Failed> {
        match &self.indexer {
            Indexer::Single { primary, .. } => drop(primary.flush_and_wait().await?),
            Indexer::Concurrent { primary, .. } => primary.flush_and_wait().await?,
            Indexer::Remote { .. } | Indexer::None => {}
        }
        Ok(())
    }

    /// The rank that dynamo-kv-router would choose for `tokens` now, without a booking, and its facts about each rank.
    ///
    /// The responses contain facts but no cost. The cost is computed here like in its reference scorer without lower
    /// tiers, a shared cache or a decaying credit. A parity run checks each choice against it.
    ///
    /// # Errors
    /// The request is rejected.
    pub async fn view(&self, tokens: &[u32]) -> Result<View, Failed> {
        let core = self.service.core();
        let (model_name, routing_group) = (DEFAULT_MODEL_NAME.to_owned(), DEFAULT_ROUTING_GROUP.to_owned());
        let advice = core.select(advisory(tokens)).await?;
        let loads = PotentialLoadsRequest {
            model_name: model_name.clone(),
            routing_group: routing_group.clone(),
            prompt: prompt(tokens.to_vec()),
            router_config_override: None,
        };
        let overlaps = OverlapScoresRequest {
            model_name,
            routing_group,
            prompt: prompt(tokens.to_vec()),
            router_config_override: None,
        };
        let mut loads = core.potential_loads(loads).await?;
        loads.sort_unstable_by_key(|load| (load.worker_id, load.dp_rank));
        let overlaps = core.overlap_scores(overlaps).await?; // in rank order
        if loads.len() != overlaps.workers.len() {
            return Err(format!("{} loads, {} overlaps", loads.len(), overlaps.workers.len()).into());
        }

        let (config, isl_tokens) = (KvRouterConfig::default(), tokens.len());
        let ranks = loads.iter().zip(&overlaps.workers).map(|(load, overlap)| {
            let rank = WorkerRank::new(WorkerId(load.worker_id), load.dp_rank);
            if (overlap.worker_id, overlap.dp_rank) != (load.worker_id, load.dp_rank) {
                return Err(format!("{rank} has a load and no overlap").into());
            }
            // The load includes the uncached tokens of this request. The formula needs the whole prompt and the credit
            // separately.
            let cached_tokens = (overlap.device_blocks * overlaps.block_size as usize).min(isl_tokens);
            let raw_tokens = load.potential_prefill_tokens + cached_tokens;
            let raw_blocks = raw_tokens as f64 / f64::from(overlaps.block_size);
            let prefill_blocks = (raw_blocks - config.overlap_score_credit * overlap.device_blocks as f64).max(0.0);
            Ok(Facts {
                rank,
                overlap_blocks: overlap.device_blocks as u64,
                potential_blocks: load.potential_decode_blocks as u64,
                prefill_tokens: (raw_tokens - isl_tokens) as u64,
                active_requests: load.active_requests as u64,
                cost: config.prefill_load_scale * prefill_blocks
                    + load.potential_decode_blocks as f64
                    + config.decode_active_request_weight * load.active_requests as f64,
            })
        });
        Ok(View {
            chosen: WorkerRank::new(WorkerId(advice.worker_id), advice.dp_rank),
            ranks: ranks.collect::<Result<_, Failed>>()?,
        })
    }
}

fn prompt(tokens: Vec<u32>) -> PromptRequest {
    PromptRequest { token_ids: Some(tokens), ..PromptRequest::default() }
}

fn advisory(tokens: &[u32]) -> SelectRequest {
    SelectRequest {
        model_name: DEFAULT_MODEL_NAME.to_owned(),
        routing_group: DEFAULT_ROUTING_GROUP.to_owned(),
        selection_id: None,
        prompt: prompt(tokens.to_vec()),
        router_config_override: None,
        expected_output_tokens: None,
        priority_jump: None,
        strict_priority: None,
        session_id: None,
        session_context: None,
        affinity_target: None,
        pinned_worker: None,
        allowed_worker_ids: None,
        routing_constraints: RoutingConstraints::default(),
        advisory: true,
    }
}

/// Event transport of this process: `apply_events` feeds the index.
struct HostFed;

#[async_trait]
impl KvEventIngress for HostFed {
    fn open(&self, registry: &WorkerRegistry, key: &RoutingPartitionId, block_size: u32) -> Indexer {
        registry.get_or_create_indexer(key.clone(), block_size)
    }
}

impl Target for DynamoRouter {
    type Handle = String;
    type Event = RouterEvent;

    const NAME: &'static str = "dynamo-kv-router";

    fn hash(tokens: &[u32], block_size: NonZeroU32) -> Vec<BlockHash> {
        let hashes = compute_block_hash_for_seq(tokens, block_size.get(), BlockHashOptions::default());
        hashes.into_iter().map(|LocalBlockHash(hash)| BlockHash(hash)).collect()
    }

    fn event(&self, rank: WorkerRank, tier: pointsman::protocol::StorageTier, data: KvEvent) -> RouterEvent {
        let tier = match tier {
            pointsman::protocol::StorageTier::Device => StorageTier::Device,
            pointsman::protocol::StorageTier::HostPinned => StorageTier::HostPinned,
            pointsman::protocol::StorageTier::Disk => StorageTier::Disk,
            pointsman::protocol::StorageTier::External => StorageTier::External,
        };
        let data = match data {
            KvEvent::Removed { blocks } => {
                let block_hashes = blocks.iter().map(|hash| ExternalSequenceBlockHash(hash.0)).collect();
                KvCacheEventData::Removed(KvCacheRemoveData { block_hashes })
            }
            KvEvent::Stored { parent, blocks } => {
                let stored = |block: &StoredBlock| KvCacheStoredBlockData {
                    block_hash: ExternalSequenceBlockHash(block.engine_hash.0),
                    tokens_hash: LocalBlockHash(block.block_hash.0),
                    mm_extra_info: None,
                };
                KvCacheEventData::Stored(KvCacheStoreData {
                    parent_hash: parent.map(|hash| ExternalSequenceBlockHash(hash.0)),
                    start_position: None,
                    blocks: blocks.iter().map(stored).collect(),
                })
            }
            KvEvent::Cleared | KvEvent::TierCleared | KvEvent::Offloaded { .. } => KvCacheEventData::Cleared, // one tier only
            KvEvent::GroupStored { .. } | KvEvent::GroupRemoved { .. } => unreachable!("one cache group per rank"),
        };
        let event = KvCacheEvent { event_id: self.next_event.fetch_add(1, Relaxed), data, dp_rank: rank.rank };
        RouterEvent::with_storage_tier(rank.worker.0, event, tier)
    }

    async fn route(&self, call: Call) -> Result<Routed<String>, Failed> {
        self.reserve(call, None).await
    }

    async fn apply_events(&self, events: Vec<RouterEvent>) -> Result<(), Failed> {
        self.is_unsettled.store(true, Relaxed);
        for event in events {
            self.indexer.apply_event_routed(event).await?;
        }
        Ok(())
    }

    async fn output_block(&self, handle: &mut String) -> Result<(), Failed> {
        if self.with_output {
            self.service.core().add_output_block(handle, None)?;
        }
        Ok(())
    }

    /// The event threads are outside virtual time, so they must finish before time advances.
    async fn settle(&self) -> Result<(), Failed> {
        if self.is_unsettled.swap(false, Relaxed) { self.flush().await } else { Ok(()) }
    }

    async fn prefill_completed(&self, handle: &mut String) -> Result<(), Failed> {
        Ok(self.service.core().prefill_complete(handle).await?)
    }

    async fn free(&self, handle: String) -> Result<(), Failed> {
        Ok(self.service.core().free_reservation(&handle).await?)
    }

    async fn shutdown(self) {
        self.service.shutdown().await;
    }
}
