//! Disaggregated service: one request on two pools.
//!
//! Owns two routers and the order in which they are asked. Promises that a request is booked on both sides or on the
//! decode side alone, that an error says which side failed and leaves nothing booked, and that a placement frees what it
//! has on both. Leaves the decision to [`crate::disagg`], the ranks to the routers, and the transfer to the engines.
//!
//! The decode side is booked first, not asked first. It serves the request in any case, so nothing is booked in vain;
//! what it has cached and how full it is are then those of the rank that the request really gets, its own blocks
//! included; and other requests see these blocks while this one waits for its prefill, as the engine does that sets them
//! aside for the transfer. The prefill side is *asked* before it is booked, where its load matters at all: a booking that
//! is taken back would have shown in decisions in between.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::time::Instant;

use super::placement::Placement;
use super::request::{Prompt, RouteRequest};
use super::router::Router;
use crate::config::{ConfigErrors, PoolRole};
use crate::disagg::{DisaggConfig, DisaggError, DisaggFacts, RemotePrefill, Side, WhyLocal, decide};
use crate::error::{RequestError, RouteError};
use crate::protocol::{WorkerConfig, WorkerRank};
use crate::schedule::{PotentialLoad, Rejection};
use crate::select::Constraints;
use crate::validation::Problems;

/// A prefill and a decode pool that serve requests together. Cheap to clone.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use pointsman::disagg::DisaggConfig;
/// use pointsman::protocol::{WorkerConfig, WorkerId};
/// use pointsman::{Disaggregated, Prompt, RouteRequest, Router, RouterConfig};
///
/// let start = |config, worker, url: &str| {
///     Router::builder(config).worker(WorkerId(worker), WorkerConfig::at(url)).start()
/// };
/// let prefill = start(RouterConfig::default().for_prefill(), 1, "http://prefill").await?;
/// let decode = start(RouterConfig::default().for_decode(), 2, "http://decode").await?;
/// let pools = Disaggregated::new(prefill, decode, DisaggConfig::default())?;
///
/// let mut placement = pools.route(RouteRequest::new("req-1", Prompt::Tokens(&[1, 2, 3]))).await?;
/// assert_eq!(placement.prefill().map(|prefill| prefill.endpoint()), Some("http://prefill"));
/// assert_eq!(placement.decode().endpoint(), "http://decode");
/// placement.prefill_completed(); // the blocks are transferred: the prefill rank is done
/// drop(placement); // when the request is over
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Disaggregated {
    prefill: Router,
    decode: Router,
    config: Arc<DisaggConfig>,
}

impl Disaggregated {
    /// Joins two running pools.
    ///
    /// # Errors
    /// Every setting that breaks a rule: of `config`, the roles of the pools, and a decode pool without an index where
    /// what it has cached should decide.
    pub fn new(prefill: Router, decode: Router, config: DisaggConfig) -> Result<Self, ConfigErrors> {
        let mut problems = Problems::default();
        config.check(&mut problems);
        let role = |role: PoolRole| format!("{role:?}").to_lowercase();
        let (prefills, decodes) = (prefill.config().role, decode.config().role);
        problems.check("prefill.role", role(prefills), prefills == PoolRole::Prefill, "prefill");
        problems.check("decode.role", role(decodes), decodes == PoolRole::Decode, "decode");
        let knows = decode.config().has_index() || !(config.enabled && config.policy.looks_at_isl());
        let rule = "true where policy is isl_bounding or isl_or_load, with an overlap credit above 0";
        problems.check("decode.index.enabled", decode.config().has_index(), knows, rule);
        problems.into_result()?;
        Ok(Self { prefill, decode, config: Arc::new(config) })
    }

    /// Places a request on a decode rank, and its prefill on a prefill rank if that is worth it.
    ///
    /// Pins, allowed workers and excluded ranks of the request are meant for the decode side, whose ids they are; taints for both. The
    /// prefill side follows the decode rank's KV-transfer domain.
    ///
    /// Costs one decision of each pool, and hashes the prompt once where both cut it alike. Where load matters it also
    /// costs one load snapshot of the pool in question, and one more decision of the prefill pool. Cancel-safe: dropping the
    /// future frees whatever was booked.
    ///
    /// # Errors
    /// Which side failed, and how. Nothing stays booked.
    pub async fn route(&self, request: RouteRequest<'_>) -> Result<DisaggPlacement, DisaggError> {
        let constraints = request.constraints;
        let taints = |constraints: &Constraints| Constraints {
            allowed_workers: None,
            excluded_ranks: BTreeSet::new(),
            pin: None,
            ..constraints.clone()
        };
        self.route_between(request, &constraints.map(taints).unwrap_or_default()).await
    }

    /// Places a request whose prefill has constraints of its own: those of the request hold for the decode side alone.
    ///
    /// # Errors
    /// As for [`Disaggregated::route`].
    pub async fn route_between(
        &self,
        request: RouteRequest<'_>,
        prefill: &Constraints,
    ) -> Result<DisaggPlacement, DisaggError> {
        let cut_alike = cut(&self.prefill) == cut(&self.decode);
        let hashing = RouteRequest { routing_hashes: request.routing_hashes || cut_alike, ..request };
        let started = Instant::now();
        let decode = self.decode.route(hashing).await.map_err(on(Side::Decode))?;
        let request = RouteRequest {
            // One deadline for both sides, and a class where the pool has it.
            deadline: request.deadline.map(|deadline| deadline.saturating_sub(started.elapsed())),
            policy_class: request.policy_class.filter(|name| self.prefill.config().queue.knows_class(name)),
            ..request
        };
        let prefill = match self.place_prefill(request, prefill, &decode).await {
            Err(DisaggError { side: Side::Prefill, error })
                if self.config.decode_fallback && is_about_the_pool(&error) =>
            {
                PrefillPlacement::Local(WhyLocal::Fallback(error))
            }
            placed => placed?,
        };
        Ok(DisaggPlacement { prefill, decode })
    }

    /// The prefill pool.
    #[must_use]
    pub fn prefill(&self) -> &Router {
        &self.prefill
    }

    /// The decode pool.
    #[must_use]
    pub fn decode(&self) -> &Router {
        &self.decode
    }

    /// The settings.
    #[must_use]
    pub fn config(&self) -> &DisaggConfig {
        &self.config
    }

    /// Books the prefill, or says why it stays on the decode rank.
    async fn place_prefill(
        &self,
        request: RouteRequest<'_>,
        wanted: &Constraints,
        decode: &Placement,
    ) -> Result<PrefillPlacement, DisaggError> {
        let hashed = decode.routing_hashes().filter(|_| cut(&self.prefill) == cut(&self.decode));
        let constraints = self.prefill_constraints(wanted, decode);
        let request = RouteRequest {
            prompt: hashed.map_or(request.prompt, Prompt::Hashed),
            constraints: Some(&constraints).filter(|constraints| !constraints.is_empty()),
            routing_hashes: false,
            ..request
        };
        match self.weigh(request, decode).await? {
            RemotePrefill::Skip(reason) => Ok(PrefillPlacement::Local(WhyLocal::Skipped(reason))),
            RemotePrefill::Worth => {
                self.prefill.route(request).await.map(PrefillPlacement::Remote).map_err(on(Side::Prefill))
            }
        }
    }

    /// Who may do the prefill of a request that decodes there: whoever `wanted` allows, where the blocks can get from the
    /// one to the other. That either can reach the other is the same question from both ends, so the domain may be
    /// stated by the workers of either pool; the decode worker's word comes first.
    fn prefill_constraints(&self, wanted: &Constraints, decode: &Placement) -> Constraints {
        let mut constraints = wanted.clone();
        let decodes = self.decode.workers();
        let Some(decode) = decodes.iter().find(|known| known.worker == decode.rank().worker) else {
            return constraints;
        };
        let prefills = self.prefill.workers();
        let candidates = std::iter::once(decode).chain(prefills.iter());
        let stated = candidates.map(|known| &known.config).find(|config| config.kv_transfer_domain.is_some());
        if let Some(stated) = stated {
            let topology_domains = decode.config.topology_domains.clone();
            constraints.follow_transfer(&WorkerConfig { topology_domains, ..stated.clone() });
        }
        constraints
    }

    /// Whether the prefill should be remote. The prefill side is asked only if that can change the answer.
    async fn weigh(&self, request: RouteRequest<'_>, decode: &Placement) -> Result<RemotePrefill, DisaggError> {
        let config = &*self.config;
        if !config.enabled {
            return Ok(RemotePrefill::Worth);
        }
        let isl_tokens = match request.prompt {
            Prompt::Tokens(tokens) => tokens.len(),
            Prompt::Hashed(hashed) => hashed.isl_tokens(),
        };
        let mut facts = DisaggFacts {
            isl_tokens: u32::try_from(isl_tokens).unwrap_or(u32::MAX), // the decode side has taken it
            decode_cached_tokens: decode.cached_tokens(),
            ..DisaggFacts::default()
        };
        if config.decode_busy_frac.is_some() {
            let load = load_of(&self.decode, decode.rank()).await.map_err(on(Side::Decode))?;
            facts.decode_potential_blocks = load.map_or(0, |load| load.potential_decode_blocks);
            facts.decode_total_kv_blocks = known(&self.decode, decode.rank(), |worker| worker.total_kv_blocks);
        }
        let decided = decide(config, &facts);
        if !config.policy.looks_at_load() || decided != RemotePrefill::Worth {
            return Ok(decided);
        }
        let best = self.prefill.find_best_match(request).await.map_err(on(Side::Prefill))?;
        let load = load_of(&self.prefill, best.rank()).await.map_err(on(Side::Prefill))?;
        facts.prefill_active_tokens = load.map_or(0, |load| load.potential_prefill_tokens);
        facts.prefill_max_num_batched_tokens =
            known(&self.prefill, best.rank(), |worker| worker.max_num_batched_tokens);
        Ok(decide(config, &facts))
    }
}

/// How a pool cuts prompts into blocks: pools that cut them alike name them alike.
fn cut(router: &Router) -> (u32, bool) {
    (router.config().block_size, router.config().is_eagle)
}

fn on(side: Side) -> impl FnOnce(RouteError) -> DisaggError {
    move |error| DisaggError { side, error }
}

/// Whether another pool may still serve a request that failed so. One that was freed is over, one whose deadline has
/// passed too, and one whose id is taken was sent twice.
fn is_about_the_pool(error: &RouteError) -> bool {
    let late = matches!(error, RouteError::Rejected(Rejection::DeadlineExceeded { .. }));
    !late && !matches!(error, RouteError::Freed | RouteError::DuplicateRequest(_))
}

/// The rank's load as it is, if the rank is still there: what it would be with an empty prompt on top.
async fn load_of(router: &Router, rank: WorkerRank) -> Result<Option<PotentialLoad>, RouteError> {
    let loads = router.potential_loads(RouteRequest::query(Prompt::Tokens(&[]))).await?;
    Ok(loads.into_iter().find(|load| load.rank == rank))
}

/// What the configuration of the rank's worker says of its capacity.
fn known(router: &Router, rank: WorkerRank, capacity: impl Fn(&WorkerConfig) -> Option<u32>) -> Option<u32> {
    router.workers().iter().find(|known| known.worker == rank.worker).and_then(|known| capacity(&known.config))
}

/// A request's place on a decode rank, and on a prefill rank while its prefill is remote and not completed.
///
/// Dropping it frees both.
#[must_use = "dropping a placement frees its bookings"]
#[derive(Debug)]
pub struct DisaggPlacement {
    prefill: PrefillPlacement,
    decode: Placement,
}

/// Where the prefill is.
#[derive(Debug)]
enum PrefillPlacement {
    Remote(Placement),
    /// It was remote, and is done.
    Completed,
    /// On the decode rank.
    Local(WhyLocal),
}

impl DisaggPlacement {
    /// Where to send the prefill; `None` when the decode rank does it, or when it is done.
    #[must_use]
    pub fn prefill(&self) -> Option<&Placement> {
        match &self.prefill {
            PrefillPlacement::Remote(placement) => Some(placement),
            PrefillPlacement::Completed | PrefillPlacement::Local(_) => None,
        }
    }

    /// Where to send the request.
    pub fn decode(&self) -> &Placement {
        &self.decode
    }

    /// Why the decode rank prefills, too, if it does.
    #[must_use]
    pub fn why_local(&self) -> Option<&WhyLocal> {
        match &self.prefill {
            PrefillPlacement::Local(why) => Some(why),
            PrefillPlacement::Remote(_) | PrefillPlacement::Completed => None,
        }
    }

    /// The prompt is computed, and its blocks are where they are needed: the prefill rank has nothing left to do for
    /// this request, and its booking there ends. Again is harmless.
    pub fn prefill_completed(&mut self) {
        if let PrefillPlacement::Remote(placement) = &self.prefill {
            placement.prefill_completed(); // before it ends: one that ends uncompleted teaches nothing
            self.prefill = PrefillPlacement::Completed;
        }
        self.decode.prefill_completed();
    }

    /// One more block of output is there, on the decode rank. See [`Placement::output_block`].
    ///
    /// # Errors
    /// A decay outside [0, 1].
    pub fn output_block(&self, decay: Option<f64>) -> Result<(), RequestError> {
        self.decode.output_block(decay)
    }
}
