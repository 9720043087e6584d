//! Disaggregated service: one request on a prefill pool and a decode pool.
//!
//! Combines two routers. A request is booked on both pools or on the decode pool alone. An error names the failed side
//! and leaves no booking, and dropping a placement frees the bookings on both. The conditions for remote prefill are in
//! [`crate::disagg`]; transfer of KV blocks is up to the engines.
//!
//! The decode rank is booked first, for three reasons. It serves the request in any case, so this booking is never
//! taken back. Its cached blocks and load are then those of the actual rank, with the request's own blocks included.
//! And other requests see these blocks during the prefill, as the engine reserves them for the transfer. The load of
//! the prefill pool is *queried* before a booking there, if it matters, because a booking that is taken back would have
//! influenced other decisions.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::placement::Placement;
use super::router::Router;
use crate::config::{ConfigErrors, PoolRole};
use crate::disagg::{DisaggConfig, DisaggError, DisaggFacts, RemotePrefill, Side, WhyLocal, decide};
use crate::error::{RequestError, RouteError};
use crate::protocol::{WorkerConfig, WorkerRank};
use crate::request::{Prompt, RouteRequest};
use crate::schedule::{PotentialLoad, Rejection};
use crate::select::Constraints;
use crate::validation::Problems;

/// Prefill pool and decode pool that serve requests together. Cheap to clone.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use pointsman::{DisaggConfig, Disaggregated, Prompt, RouteRequest, Router, RouterConfig};
/// use pointsman::protocol::{WorkerConfig, WorkerId};
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
    /// Combines two running pools.
    ///
    /// # Errors
    /// Every setting that breaks a rule: of `config`, the roles of the pools, and a decode pool without an index
    /// although its cached blocks decide.
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

    /// Places a request on a decode rank, and its prefill on a prefill rank if the conditions for remote prefill hold.
    ///
    /// Pins, allowed workers and excluded ranks of the request apply to the decode side, whose ids they contain; taints
    /// apply to both. The prefill rank must be in the KV-transfer domain of the decode rank.
    ///
    /// Costs one decision in each pool, and one hash computation if both pools use the same blocks. If load matters,
    /// adds one load snapshot of the pool concerned, and one more decision of the prefill pool. Cancel-safe: dropping
    /// the future frees all bookings.
    ///
    /// # Errors
    /// The failed side and its error. No booking remains.
    pub async fn route(&self, request: RouteRequest<'_>) -> Result<DisaggPlacement, DisaggError> {
        let prefill = Constraints {
            allowed_workers: None,
            excluded_ranks: BTreeSet::new(),
            pin: None,
            ..request.options.constraints.clone()
        };
        self.route_between(request, &prefill).await
    }

    /// Places a request whose prefill has constraints of its own. Those of the request apply to the decode side only.
    ///
    /// # Errors
    /// As for [`Disaggregated::route`].
    pub async fn route_between(
        &self,
        mut request: RouteRequest<'_>,
        prefill: &Constraints,
    ) -> Result<DisaggPlacement, DisaggError> {
        let mut hashing = request.clone();
        hashing.options.routing_hashes |= self.hashes_alike();
        let started = Instant::now();
        let decode = self.decode.route(hashing).await.map_err(on(Side::Decode))?;
        // Both sides share one deadline. The policy class applies if the prefill pool has it.
        let options = &mut request.options;
        options.deadline = options.deadline.map(|deadline| deadline.saturating_sub(started.elapsed()));
        options.ttft_target = options.ttft_target.map(|target| remaining(target, started.elapsed()));
        let prefill = self.place_prefill(request, prefill, &decode).await?;
        Ok(DisaggPlacement { prefill, decode })
    }

    /// Places the prefill of a request that has a decode rank already, if the conditions for remote prefill hold.
    ///
    /// For callers that place both sides themselves, for example to replace a failed prefill rank: exclude its ranks in
    /// `prefill` and call this again with the same `decode`. The request needs an id that is not in use in the prefill
    /// pool. Constraints of the request itself are ignored. If the placement has routing hashes
    /// ([`RequestOptions::routing_hashes`](crate::RequestOptions::routing_hashes)) and both pools use the same blocks,
    /// nothing is hashed again.
    ///
    /// # Errors
    /// The failed side and its error. The decode placement stays.
    pub async fn place_prefill(
        &self,
        mut request: RouteRequest<'_>,
        prefill: &Constraints,
        decode: &Placement,
    ) -> Result<PrefillPlacement, DisaggError> {
        let options = &mut request.options;
        options.policy_class = options.policy_class.take().filter(|name| self.prefill.config().queue.knows_class(name));
        match self.place_remote(request, prefill, decode).await {
            Err(DisaggError { side: Side::Prefill, error })
                if self.config.decode_fallback && is_about_the_pool(&error) =>
            {
                Ok(PrefillPlacement::Local(WhyLocal::Fallback(error)))
            }
            placed => placed,
        }
    }

    /// Whether both pools produce equal block hashes, so that one hash computation serves both.
    #[must_use]
    pub fn hashes_alike(&self) -> bool {
        cut(&self.prefill) == cut(&self.decode)
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

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &DisaggConfig {
        &self.config
    }

    /// Books the prefill, or returns the reason why it stays on the decode rank.
    async fn place_remote(
        &self,
        mut request: RouteRequest<'_>,
        wanted: &Constraints,
        decode: &Placement,
    ) -> Result<PrefillPlacement, DisaggError> {
        if let Some(hashed) = decode.routing_hashes().filter(|_| self.hashes_alike()) {
            request.prompt = Prompt::Hashed(hashed.clone());
        }
        request.options.constraints = self.prefill_constraints(wanted, decode);
        request.options.routing_hashes = false;
        match self.weigh(&request, decode).await? {
            RemotePrefill::Skip(reason) => Ok(PrefillPlacement::Local(WhyLocal::Skipped(reason))),
            RemotePrefill::Worth => {
                let placed = self.prefill.route(request).await.map_err(on(Side::Prefill))?;
                Ok(PrefillPlacement::Remote(Box::new(placed)))
            }
        }
    }

    /// Constraints for the prefill rank: `wanted`, restricted to the KV-transfer domain of the decode rank. Transfer
    /// domains are symmetric, so workers of either pool may declare them; the declaration of the decode worker takes
    /// precedence.
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

    /// Decides whether the prefill is remote. Queries the prefill pool only if its load can change the result.
    async fn weigh(&self, request: &RouteRequest<'_>, decode: &Placement) -> Result<RemotePrefill, DisaggError> {
        let config = &*self.config;
        if !config.enabled {
            return Ok(RemotePrefill::Worth);
        }
        let mut facts = DisaggFacts {
            // The decode pool has already accepted the length.
            prompt_tokens: u32::try_from(request.prompt.prompt_tokens()).unwrap_or(u32::MAX),
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
        let best = self.prefill.find_best_match(request.clone()).await.map_err(on(Side::Prefill))?;
        let load = load_of(&self.prefill, best.rank()).await.map_err(on(Side::Prefill))?;
        facts.prefill_active_tokens = load.map_or(0, |load| load.potential_prefill_tokens);
        facts.prefill_max_num_batched_tokens =
            known(&self.prefill, best.rank(), |worker| worker.max_num_batched_tokens);
        Ok(decide(config, &facts))
    }
}

/// Block size and hashing parameters of a pool. Pools with equal values produce equal block hashes.
fn cut(router: &Router) -> (u32, bool) {
    (router.block_size(), router.config().is_eagle)
}

fn on(side: Side) -> impl FnOnce(RouteError) -> DisaggError {
    move |error| DisaggError { side, error }
}

/// Remaining part of a target, above 0.
fn remaining(target: Duration, elapsed: Duration) -> Duration {
    target.saturating_sub(elapsed).max(Duration::from_nanos(1))
}

/// Whether the decode pool may serve the whole request after this error of the prefill pool. Not after a freed request,
/// an expired deadline, missed targets or a duplicate id. Not with a saturated prefill pool either: its work would move
/// to ranks that delay the output of other requests for it.
fn is_about_the_pool(error: &RouteError) -> bool {
    match error {
        RouteError::Rejected(rejection) => !matches!(
            rejection,
            Rejection::DeadlineExceeded { .. }
                | Rejection::TargetsMissed(_)
                | Rejection::AllOverloaded { .. }
                | Rejection::Backpressure(_)
        ),
        RouteError::Freed | RouteError::DuplicateRequest(_) | RouteError::Overloaded { .. } => false,
        _ => true,
    }
}

/// Present load of a rank, if it is registered: its projected load with an empty prompt.
async fn load_of(router: &Router, rank: WorkerRank) -> Result<Option<PotentialLoad>, RouteError> {
    let loads = router.potential_loads(RouteRequest::query(Prompt::Tokens(&[]))).await?;
    Ok(loads.into_iter().find(|load| load.rank == rank))
}

/// A capacity from the configuration of the rank's worker.
fn known(router: &Router, rank: WorkerRank, capacity: impl Fn(&WorkerConfig) -> Option<u32>) -> Option<u32> {
    router.workers().iter().find(|known| known.worker == rank.worker).and_then(|known| capacity(&known.config))
}

/// Placement on a decode rank, and on a prefill rank while a remote prefill is not completed.
///
/// Dropping it frees both bookings.
#[must_use = "dropping a placement frees its bookings"]
#[derive(Debug)]
pub struct DisaggPlacement {
    prefill: PrefillPlacement,
    decode: Placement,
}

/// Place of a prefill.
#[must_use = "dropping a placement frees its bookings"]
#[derive(Debug)]
pub enum PrefillPlacement {
    /// On a prefill rank.
    Remote(Box<Placement>),
    /// On a prefill rank; completed.
    Completed,
    /// On the decode rank.
    Local(WhyLocal),
}

impl DisaggPlacement {
    /// Placement of the prefill; `None` if the decode rank computes it, or after its completion.
    #[must_use]
    pub fn prefill(&self) -> Option<&Placement> {
        if let PrefillPlacement::Remote(placement) = &self.prefill { Some(placement) } else { None }
    }

    /// Placement of the request itself.
    pub fn decode(&self) -> &Placement {
        &self.decode
    }

    /// Reason why the decode rank computes the prefill, if it does.
    #[must_use]
    pub fn why_local(&self) -> Option<&WhyLocal> {
        if let PrefillPlacement::Local(why) = &self.prefill { Some(why) } else { None }
    }

    /// Reports that the prompt is computed and its blocks have reached the decode rank. Ends the booking on the prefill
    /// rank. Repeated calls have no effect.
    pub fn prefill_completed(&mut self) {
        if let PrefillPlacement::Remote(placement) = &self.prefill {
            placement.prefill_completed(); // before the booking ends: an uncompleted prefill gives no speed sample
            self.prefill = PrefillPlacement::Completed;
        }
        self.decode.prefill_completed();
    }

    /// Reports one more output block on the decode rank. See [`Placement::output_block`].
    ///
    /// # Errors
    /// A decay outside [0, 1].
    pub fn output_block(&self, decay: Option<f64>) -> Result<(), RequestError> {
        self.decode.output_block(decay)
    }
}
