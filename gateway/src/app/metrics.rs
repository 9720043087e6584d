//! All metrics of the gateway, joined from the modules that own them.

use crate::admission::leases;
use crate::observe::metric::Metric;
use crate::observe::requests;
use crate::pools::{decision_files, disaggregation, warm};
use crate::replicas::meters;

/// All metrics of the gateway, for descriptions and documentation.
pub fn all() -> impl Iterator<Item = &'static Metric> {
    let owners = [
        requests::METRICS,
        leases::METRICS,
        disaggregation::METRICS,
        meters::METRICS,
        warm::METRICS,
        decision_files::METRICS,
    ];
    owners.into_iter().flatten()
}
