//! Drills of engines that hang, send garbage, or break off in the middle of a response. Half of the requests are streams.
//!
//! A request may fail at the client: no retry can follow the first token of a stream, and retries have a budget. It must
//! end once, and without load that is left.

use pointsman_trial::mock::{Faults, Scope};
use tokio::time::Instant;

use super::faults::{Account, settle};
use super::fleet::Fleet;
use super::scenarios::seconds;
use super::{Drill, DrillError, Outcome, Scenario};

/// Share of the responses with a fault.
const SHARE: f64 = 0.05;

/// Engines accept requests and never respond, stop in the middle of a response, and both.
pub(super) async fn engine_hangs(drill: &Drill, fleet: &mut Fleet) -> Result<Outcome, DrillError> {
    let kinds = [
        Faults { hang_share: SHARE, ..Faults::default() },
        Faults { stall_share: SHARE, ..Faults::default() },
        Faults { hang_share: SHARE, stall_share: SHARE, ..Faults::default() },
    ];
    under(drill, fleet, Scenario::EngineHangs, kinds).await
}

/// Engines send bytes that are not HTTP, wrong content types, and bodies that break off, each for a part of the requests.
pub(super) async fn engine_garbage(drill: &Drill, fleet: &mut Fleet) -> Result<Outcome, DrillError> {
    under(drill, fleet, Scenario::EngineGarbage, [Faults { garbage_share: SHARE, ..Faults::default() }]).await
}

/// Engines close connections in the middle of a response.
pub(super) async fn half_streams(drill: &Drill, fleet: &mut Fleet) -> Result<Outcome, DrillError> {
    under(drill, fleet, Scenario::HalfStreams, [Faults { cut_share: SHARE, ..Faults::default() }]).await
}

async fn under(
    drill: &Drill,
    fleet: &mut Fleet,
    scenario: Scenario,
    kinds: impl IntoIterator<Item = Faults>,
) -> Result<Outcome, DrillError> {
    let mut outcome = Outcome::new(scenario);
    let (before, second) = (Account::take(fleet).await?, u64::from(drill.rate.get()));
    let faults_before = fleet.faults();
    fleet.traffic.set_streaming(true);
    for faults in kinds {
        fleet.set_faults(&Faults { scope: Scope::Generation, ..faults })?;
        fleet.serve(4 * second).await?;
    }
    fleet.set_faults(&Faults::default())?;
    let eased_at = Instant::now();
    fleet.serve(second).await?;
    outcome.figure("recovered_s", seconds(eased_at.elapsed()));
    let faults = fleet.faults() - faults_before;
    outcome.figure("faults", faults);
    outcome.fact(faults > 0, "no response had a fault");
    settle(fleet, before, &mut outcome, true).await?;
    fleet.traffic.set_streaming(false);
    fleet.serve(second).await?;
    fleet.pause().await?;
    let failures = fleet.take_failures(None);
    outcome.fact(failures.is_empty(), "requests failed after the faults");
    Ok(outcome)
}
