//! A router with cache contents and active requests, to measure whole requests.

use pointsman::hashing::{HashScheme, HashedPrompt};
use pointsman::internals::config::HealthConfig;
use pointsman::internals::hashing::{BlockHasher, MmBlocks};
use pointsman::protocol::{
    EngineHash, KvEvent, RouterEvent, StorageTier, StoredBlock, WorkerConfig, WorkerId, WorkerRank,
};
use pointsman::{Placement, Prompt, RouteRequest, Router, RouterConfig};

const BLOCK_SIZE: u32 = 64;
const BLOCKS: u32 = 190;
/// Blocks of a prompt that the turns of its conversation share, including the system prompt.
const CONVERSATION_BLOCKS: u32 = 100;
const SYSTEM_BLOCKS: u32 = 16;
const CONVERSATIONS: u32 = 16;
const SYSTEMS: u32 = 4;
const ACTIVE: u32 = 64;

/// Tokens of one turn of a conversation.
fn tokens(conversation: u32, turn: u32) -> Vec<u32> {
    let token = |at: u32| {
        let of = match at / BLOCK_SIZE {
            0..SYSTEM_BLOCKS => conversation % SYSTEMS,
            SYSTEM_BLOCKS..CONVERSATION_BLOCKS => 1_000 + conversation,
            _ => 1_000_000 + turn,
        };
        (of.wrapping_mul(0x9e37_79b9) ^ at.wrapping_mul(0x85eb_ca6b)) % 150_000
    };
    (0..BLOCKS * BLOCK_SIZE).map(token).collect()
}

fn hashed(tokens: &[u32]) -> HashedPrompt {
    let scheme = HashScheme::new(BLOCK_SIZE.try_into().expect("not zero"));
    HashedPrompt::from_tokens(&BlockHasher::new(scheme), tokens, &MmBlocks::NONE)
}

/// Event: `rank` has stored the first `blocks` blocks of a prompt.
fn stored(rank: u32, prompt: &HashedPrompt, blocks: u32) -> RouterEvent {
    let names = prompt.sequence_hashes().iter().map(|hash| EngineHash(!hash.0));
    let named = names.zip(prompt.block_hashes().iter()).take(blocks as usize);
    let blocks = named.map(|(engine_hash, &block_hash)| StoredBlock { engine_hash, block_hash }).collect();
    let rank = WorkerRank::new(WorkerId(u64::from(rank)), 0);
    RouterEvent { rank, tier: StorageTier::Device, data: KvEvent::Stored { parent: None, blocks } }
}

/// A router with cache contents, and the active requests on its ranks.
pub(crate) async fn busy(ranks: u32, defaults: RouterConfig) -> (Router, Vec<Placement>) {
    // The engines do not exist, so they cannot be probed.
    let config = RouterConfig {
        block_size: Some(BLOCK_SIZE),
        health: HealthConfig { probe_interval_ms: 0, ..defaults.health },
        ..defaults
    };
    let mut builder = Router::builder(config);
    for worker in 0..u64::from(ranks) {
        builder = builder.worker(WorkerId(worker), WorkerConfig::at(format!("http://engine-{worker}")));
    }
    let router = builder.start().await.expect("a valid configuration starts");
    for conversation in 0..CONVERSATIONS {
        let prompt = hashed(&tokens(conversation, 0));
        let systems = (0..ranks).filter(|rank| rank % SYSTEMS == conversation % SYSTEMS);
        let mut events: Vec<_> = systems.map(|rank| stored(rank, &prompt, SYSTEM_BLOCKS)).collect();
        let homes = [conversation, conversation * 7 + 3].map(|home| home % ranks);
        events.extend(homes.map(|rank| stored(rank, &prompt, CONVERSATION_BLOCKS)));
        router.apply_events(events).await.expect("the router is up");
    }
    router.flush().await.expect("the router is up");
    let mut active = Vec::new();
    for request in 0..ACTIVE {
        let (id, tokens) = (format!("active-{request}"), tokens(request % CONVERSATIONS, 1 + request));
        let placement = router.route(RouteRequest::new(&id, Prompt::Tokens(&tokens))).await.expect("a rank");
        if request % 2 == 0 {
            placement.prefill_completed();
        }
        active.push(placement);
    }
    (router, active)
}

/// Prompts of the measured requests: a new turn of each conversation.
pub(crate) struct Prompts(Vec<HashedPrompt>);

impl Prompts {
    pub(crate) fn new() -> Self {
        Self((0..CONVERSATIONS).map(|conversation| hashed(&tokens(conversation, 1_000))).collect())
    }

    pub(crate) fn hashed(&self, request: usize) -> Prompt<'static> {
        Prompt::Hashed(self.0[request % self.0.len()].clone())
    }
}
