//! The scenarios. Each expects a fleet without requests, and leaves one with all gateways running.

use std::path::Path;
use std::time::Duration;

use serde_json::json;
use tokio::time::Instant;

use super::fleet::{Fleet, Network, until};
use super::nats::NatsServer;
use super::{Drill, DrillError, Outcome, Scenario};

/// Gateway that is killed and restarted.
const KILLED: usize = 0;

/// Maximum share of blind decisions after a restart, in percent.
const BLIND_PERCENT_MAX: f64 = 1.0;

pub(super) fn seconds(elapsed: Duration) -> serde_json::Value {
    json!((elapsed.as_secs_f64() * 1e3).round() / 1e3)
}

/// Kills a gateway under load. Its share of the load ends at the others.
pub(super) async fn kill(drill: &Drill, fleet: &mut Fleet) -> Result<Outcome, DrillError> {
    let mut outcome = Outcome::new(Scenario::Kill);
    let second = u64::from(drill.rate.get());
    fleet.serve(second).await?;
    fleet.gateways[KILLED].kill();
    let killed_at = Instant::now();
    fleet.traffic.set_gateway(KILLED, None);
    fleet.serve(2 * second).await?;
    fleet.pause().await?;
    outcome.figure("blocks_counted_then", fleet.active_blocks().await?);
    fleet.until_unloaded().await?;
    outcome.figure("share_gone_s", seconds(killed_at.elapsed()));
    outcome.figure("requests_failed_at_killed", fleet.traffic.take_failures(KILLED).len());
    outcome.no_failures(fleet.take_failures(None));
    Ok(outcome)
}

/// Restarts the killed gateway under load.
pub(super) async fn restart(drill: &Drill, fleet: &mut Fleet) -> Result<Outcome, DrillError> {
    let mut outcome = Outcome::new(Scenario::Restart);
    if fleet.gateways[KILLED].is_running() {
        fleet.gateways[KILLED].kill();
        fleet.traffic.set_gateway(KILLED, None);
    }
    fleet.serve(u64::from(drill.rate.get())).await?;
    let begun = Instant::now();
    fleet.start_gateway(KILLED).await?;
    outcome.figure("listening_s", seconds(begun.elapsed()));
    fleet.include(KILLED).await?;
    outcome.figure("ready_s", seconds(begun.elapsed()));
    let restores = fleet.gateways[KILLED].metrics("snapshot_restores_total").await?;
    let restores: Vec<_> = restores.into_iter().filter(|(_, count)| *count > 0.0).map(|(labels, _)| labels).collect();
    outcome.fact(restores.iter().any(|labels| labels.contains("result=\"restored\"")), "no snapshot was restored");
    outcome.figure(
        "restores",
        restores
            .iter()
            .filter_map(|labels| labels.split_once("source="))
            .map(|(_, rest)| rest.trim_end_matches('}'))
            .collect::<Vec<_>>(),
    );

    let other = 1;
    let (before, other_before) = (fleet.traffic.ended_of(KILLED), fleet.traffic.ended_of(other));
    let decisions = u64::from(drill.decisions);
    until("decisions", async || Ok(fleet.traffic.ended_of(KILLED) >= before + decisions)).await?;
    fleet.pause().await?;
    let other_after = fleet.traffic.ended_of(other);
    for (name, n, from, to) in
        [("blind_percent", KILLED, 0, decisions), ("blind_percent_of_another", other, other_before, other_after)]
    {
        let mut blind = None;
        until("lines of the access log", async || {
            blind = fleet.gateways[n].blind(from, to)?;
            Ok(blind.is_some())
        })
        .await?;
        let share = blind.unwrap_or_default().share();
        outcome.figure(name, (share * 100.0).round() / 100.0);
        if n == KILLED {
            outcome.fact(share < BLIND_PERCENT_MAX, &format!("{share:.2} % of the decisions were blind"));
        }
    }
    fleet.until_connected().await?;
    fleet.until_unloaded().await?;
    outcome.no_failures(fleet.take_failures(None));
    Ok(outcome)
}

/// Separates two gateways under load. Each drops the share of the other one, and they meet again.
pub(super) async fn partition(drill: &Drill, fleet: &mut Fleet) -> Result<Outcome, DrillError> {
    let mut outcome = Outcome::new(Scenario::Partition);
    let second = u64::from(drill.rate.get());
    fleet.until_connected().await?;
    fleet.serve(second).await?;
    fleet.set_connected(0, 1, false);
    let separated_at = Instant::now();
    until("silent replicas", async || Ok(fleet.peers("silent").await? >= 2.0)).await?;
    outcome.figure("silent_s", seconds(separated_at.elapsed()));
    fleet.pause().await?;
    outcome.figure("blocks_counted_then", fleet.active_blocks().await?);
    fleet.until_unloaded().await?;
    outcome.figure("shares_gone_s", seconds(separated_at.elapsed()));
    fleet.serve(2 * second).await?;
    fleet.set_connected(0, 1, true);
    let joined_at = Instant::now();
    fleet.until_connected().await?;
    outcome.figure("connected_again_s", seconds(joined_at.elapsed()));
    fleet.serve(second).await?;
    fleet.pause().await?;
    fleet.until_unloaded().await?;
    outcome.no_failures(fleet.take_failures(None));
    Ok(outcome)
}

/// Stops the NATS server under load. Each gateway goes on alone, and they meet again.
pub(super) async fn nats_outage(drill: &Drill, program: &Path, server: &mut NatsServer) -> Result<Outcome, DrillError> {
    let mut outcome = Outcome::new(Scenario::NatsOutage);
    let second = u64::from(drill.rate.get());
    server.start().await?;
    let fleet = Fleet::start(drill, program, Network::Nats(server.address())).await?;
    fleet.until_connected().await?;
    fleet.serve(second).await?;
    server.stop();
    fleet.serve(u64::from(drill.outage_s) * second).await?;
    outcome.fact(fleet.peers("live").await? == 0.0, "a replica counts as live without the server");
    server.start().await?;
    let started_at = Instant::now();
    fleet.until_connected().await?;
    outcome.figure("connected_again_s", seconds(started_at.elapsed()));
    fleet.serve(second).await?;
    fleet.pause().await?;
    fleet.until_unloaded().await?;
    outcome.no_failures(fleet.take_failures(None));
    Ok(outcome)
}

/// Starts the NATS server after the gateways, which serve without it.
pub(super) async fn nats_late(drill: &Drill, program: &Path, server: &mut NatsServer) -> Result<Outcome, DrillError> {
    let mut outcome = Outcome::new(Scenario::NatsLate);
    let second = u64::from(drill.rate.get());
    let fleet = Fleet::start(drill, program, Network::Nats(server.address())).await?;
    fleet.serve(second).await?;
    server.start().await?;
    let started_at = Instant::now();
    fleet.until_connected().await?;
    outcome.figure("connected_s", seconds(started_at.elapsed()));
    fleet.serve(second).await?;
    fleet.pause().await?;
    fleet.until_unloaded().await?;
    outcome.no_failures(fleet.take_failures(None));
    Ok(outcome)
}
