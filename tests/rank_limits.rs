//! Limit of active requests per rank, with batches and under several policies.

use pointsman::Filter;
use pointsman::internals::schedule::Purpose;
use pointsman::policy::Policy;
use pointsman::protocol::WorkerId;
use pointsman::test_support::{SampleRequest, SimulatedFleet};

use crate::fleet::config_with;

#[test]
fn no_rank_has_more_active_requests_than_the_limit() {
    for policy in [Policy::Latency, Policy::Kv, Policy::RoundRobin, Policy::LeastLoaded] {
        let mut config = config_with(|c| c.policy = policy.into());
        config.overload.active_requests_max = Some(2);
        let mut fleet = SimulatedFleet::new(config, 3);
        let sample = SampleRequest { blocks: 1, ..SampleRequest::default() };
        // Requests that arrive during a load query are one batch.
        (0..9).for_each(|id| fleet.request(id, &sample));
        fleet.settle();
        let on = |fleet: &SimulatedFleet, worker| {
            fleet.placed().iter().filter(|(_, rank)| rank.worker == WorkerId(worker)).count()
        };
        assert_eq!([0, 1, 2].map(|worker| on(&fleet, worker)), [2, 2, 2], "{policy:?}");
        let refused = (0..9).find(|id| !fleet.booked().contains(id)).expect("three are rejected");
        let rejection = fleet.rejection(refused).to_string();
        assert_eq!(rejection, "all eligible workers are overloaded: 3 overloaded", "{policy:?}");
        fleet.request(10, &SampleRequest { purpose: Purpose::Explain, ..sample.clone() });
        assert!(fleet.explanation(10).ranks.iter().all(|row| row.excluded_by == Some(Filter::Overloaded)));
        let freed = fleet.booked()[0];
        let worker = fleet.worker(freed);
        fleet.free(freed);
        fleet.request(9, &sample);
        fleet.settle();
        assert_eq!(fleet.worker(9), worker, "{policy:?}: the only rank below the limit");
    }
}
