//! Prefill pool of a model: both routers, and the identifiers of transfers between their workers.
//!
//! A model with `[models.disaggregation]` decodes, and the workers of another model compute its prompts. The library
//! selects both ranks, [`handover`](crate::formats::handover) has the bodies, and [`proxy`](crate::proxy) sends the legs.

mod engine_ids;
mod prefill_results;

use std::collections::BTreeSet;
use std::time::Duration;

use pointsman::config::ConfigErrors;
use pointsman::error::RouteError;
use pointsman::protocol::WorkerRank;
use pointsman::{Constraints, Disaggregated, Placement, PrefillPlacement, RouteRequest, Router};
use tokio::sync::watch;
use tokio::time::timeout;

use self::engine_ids::EngineIds;
use self::prefill_results::LegCounts;
pub(crate) use self::prefill_results::{METRICS, PrefillResult};
use crate::formats::handover::{Protocol, Transfer, bootstrap_room, p2p_request_id};
use crate::net::upstream::{Upstream, UpstreamError};
use crate::settings::DisaggregationSettings;

/// Prefill pool of a model.
pub(crate) struct PrefillPool {
    pub(crate) pools: Disaggregated,
    pub(crate) settings: DisaggregationSettings,
    engine_ids: EngineIds,
    pub(crate) legs: LegCounts,
}

/// Longest wait for the end of a prefill leg after its decode leg has usage to report.
const LEG_WAIT: Duration = Duration::from_secs(1);

/// Cached prompt tokens of a prefill leg, for the response of the decode leg. The outer option is set at the end of the
/// leg, the inner one if the engine reports them.
pub(crate) type LegTokens = watch::Sender<Option<Option<u32>>>;

/// Receiver of [`LegTokens`].
#[derive(Clone, Debug)]
pub(crate) struct PrefillTokens(watch::Receiver<Option<Option<u32>>>);

/// Of a request without a prefill leg.
impl Default for PrefillTokens {
    fn default() -> Self {
        Self::of_leg().1
    }
}

impl PrefillTokens {
    /// The tokens, and their sender for the leg.
    pub(crate) fn of_leg() -> (LegTokens, Self) {
        let (sender, receiver) = watch::channel(None);
        (sender, Self(receiver))
    }

    pub(crate) fn cached_tokens(&self) -> Option<u32> {
        self.0.borrow().flatten()
    }

    /// Returns when the leg has ended with a response, or after a second.
    pub(crate) async fn settled(mut self) {
        let _ = timeout(LEG_WAIT, self.0.wait_for(Option::is_some)).await;
    }
}

impl PrefillPool {
    /// `prefill` and `decode` are the routers of both models.
    ///
    /// # Errors
    /// Settings of the pools that do not fit together.
    pub(crate) fn new(prefill: Router, decode: Router, settings: DisaggregationSettings) -> Result<Self, ConfigErrors> {
        let name = decode.config().pool.clone();
        let pools = Disaggregated::new(prefill, decode, settings.conditions())?;
        let legs = LegCounts::new(&name);
        Ok(Self { pools, settings, engine_ids: EngineIds::default(), legs })
    }

    pub(crate) fn protocol(&self) -> Protocol {
        self.settings.protocol
    }

    /// Prefill ranks of the worker at this address. A worker of both pools transfers nothing to itself.
    fn ranks_at(&self, endpoint: &str) -> impl Iterator<Item = WorkerRank> + use<> {
        let workers = self.pools.prefill().workers();
        let same = workers.iter().find(|known| known.config.endpoint == endpoint).map(|known| known.ranks.clone());
        same.into_iter().flatten()
    }

    /// Places the prefill of a request on a rank that is neither excluded nor of the decode worker. Of the request's
    /// constraints, the taints hold.
    pub(crate) async fn place(
        &self,
        request: RouteRequest<'_>,
        excluded: &BTreeSet<WorkerRank>,
        decode: &Placement,
    ) -> Result<PrefillPlacement, RouteError> {
        let given = &request.options.constraints;
        let constraints = Constraints {
            required_taints: given.required_taints.clone(),
            preferred_taints: given.preferred_taints.clone(),
            excluded_ranks: excluded.iter().copied().chain(self.ranks_at(decode.endpoint())).collect(),
            ..Constraints::default()
        };
        self.pools.place_prefill(request, &constraints, decode).await.map_err(|failed| failed.error)
    }

    /// Identifiers of a transfer between two placements, and the request id of both legs if the protocol has one of its
    /// own. `number` is unique. Queries the prefill engine if its protocol
    /// has engine ids, and they are not known yet.
    ///
    /// # Errors
    /// A failed query.
    pub(crate) async fn transfer(
        &self,
        upstream: &Upstream,
        (prefill, decode): (&Placement, &Placement),
        number: u64,
    ) -> Result<(Transfer, Option<String>), UpstreamError> {
        let (at, to) = (self.end_of(self.pools.prefill(), prefill), self.end_of(self.pools.decode(), decode));
        let prefill_rank = prefill.rank_at_worker();
        let bootstrap_address = format!("http://{}:{}", at.host, at.port);
        let engine_id = match self.protocol() {
            Protocol::VllmMooncake => {
                self.engine_ids.of(upstream, &bootstrap_address, prefill_rank.unwrap_or_default()).await?
            }
            _ => String::new(),
        };
        let address = |end: &TransferEnd, rank: Option<u32>| {
            let port = u32::from(end.port).saturating_add(rank.unwrap_or_default());
            format!("{}:{port}", end.host)
        };
        let request_id = (self.protocol() == Protocol::VllmP2pNccl).then(|| {
            let decode = address(&to, decode.rank_at_worker());
            p2p_request_id(&address(&at, prefill_rank), &decode, &format!("{number:016x}"))
        });
        let transfer = Transfer {
            prefill_host: at.host,
            prefill_rank,
            prefill_dp_size: at.dp_size,
            decode_rank: decode.rank_at_worker(),
            bootstrap_port: Some(at.port),
            room: bootstrap_room(number, at.dp_size, prefill_rank.unwrap_or_default()),
            transfer_id: format!("xfer-{number:016x}"),
            bootstrap_address,
            engine_id,
        };
        Ok((transfer, request_id))
    }

    /// Drops the engine ids of a worker whose leg failed. Its next incarnation has others.
    pub(crate) fn forget(&self, transfer: &Transfer) {
        self.engine_ids.forget(&transfer.bootstrap_address);
    }

    /// Whether the prefill engine has restarted since these identifiers were chosen, so that the decode rank cannot find
    /// the transfer. Only protocols with engine ids need to know.
    pub(crate) async fn is_stale(&self, upstream: &Upstream, transfer: &Transfer) -> bool {
        if self.protocol() != Protocol::VllmMooncake {
            return false;
        }
        self.forget(transfer);
        let rank = transfer.prefill_rank.unwrap_or_default();
        let now = self.engine_ids.of(upstream, &transfer.bootstrap_address, rank).await;
        now.is_ok_and(|now| now != transfer.engine_id)
    }

    fn end_of(&self, router: &Router, placement: &Placement) -> TransferEnd {
        let workers = router.workers();
        let config = workers.iter().find(|known| known.worker == placement.rank().worker).map(|known| &known.config);
        TransferEnd {
            host: host(placement.endpoint()).to_owned(),
            port: config.and_then(|config| config.transfer_port).unwrap_or(self.settings.default_port()),
            dp_size: config.map_or(1, |config| config.data_parallel_size),
        }
    }
}

/// A worker as one end of transfers.
struct TransferEnd {
    host: String,
    port: u16,
    dp_size: u32,
}

/// Host of an endpoint such as `http://HOST:PORT`; IPv6 addresses stay in brackets.
fn host(endpoint: &str) -> &str {
    let rest = endpoint.split_once("://").map_or(endpoint, |(_, rest)| rest);
    let authority = rest.split(['/', '?']).next().unwrap_or_default();
    match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => authority,
    }
}

#[cfg(test)]
mod tests {
    use super::host;

    #[test]
    fn hosts_have_no_port_and_keep_brackets() {
        for (endpoint, expected) in [
            ("http://10.0.0.1:8000", "10.0.0.1"),
            ("https://engine.example/v1", "engine.example"),
            ("http://[fd00::1]:8000", "[fd00::1]"),
            ("http://[fd00::1]", "[fd00::1]"),
            ("engine:80", "engine"),
        ] {
            assert_eq!(host(endpoint), expected);
        }
    }
}
