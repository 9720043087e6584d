//! Drills of engines, event streams and clients under load. Each accounts for every request: sent requests end once at
//! the client, the gateways count the same number, and no more attempts succeed than requests.

use std::time::Duration;

use pointsman_trial::kv_events::Dialect;
use pointsman_trial::mock::{Faults, Scope};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use super::fleet::Fleet;
use super::scenarios::seconds;
use super::{Drill, DrillError, Outcome, Scenario};

/// Request of a slow client.
const SLOW_REQUEST: &[u8] = b"GET /v1/models HTTP/1.1\r\nhost: drill\r\nconnection: close\r\n\r\n";

/// Limit of the response to a slow request. No result depends on it.
const SLOW_RESPONSE: Duration = Duration::from_secs(60);

/// Counts of a point in time.
pub(super) struct Account {
    sent: u64,
    counted: f64,
    succeeded: f64,
}

impl Account {
    pub(super) async fn take(fleet: &Fleet) -> Result<Self, DrillError> {
        Ok(Self {
            sent: fleet.traffic.ended(),
            counted: fleet.sum("pointsman_gateway_requests_total{", "endpoint=\"completions\"").await?,
            succeeded: fleet.sum("pointsman_gateway_worker_requests_total{", "outcome=\"ok\"").await?,
        })
    }
}

/// Accounts for the requests since `before`, and waits until no load is counted.
pub(super) async fn settle(
    fleet: &Fleet,
    before: Account,
    outcome: &mut Outcome,
    may_fail: bool,
) -> Result<(), DrillError> {
    let paused_at = Instant::now();
    fleet.pause().await?;
    fleet.until_unloaded().await?;
    outcome.figure("settled_s", seconds(paused_at.elapsed()));
    let (after, failures) = (Account::take(fleet).await?, fleet.take_failures(None));
    let sent = after.sent - before.sent;
    let lost = sent as f64 - (after.counted - before.counted);
    let doubled = (after.succeeded - before.succeeded) - (sent as f64 - failures.len() as f64);
    outcome.figure("requests", sent);
    outcome.figure("lost", lost);
    outcome.figure("doubled", doubled);
    outcome.fact(lost == 0.0, "the gateways counted another number of requests");
    outcome.fact(doubled <= 0.0, "more attempts succeeded than requests");
    if may_fail {
        outcome.figure("requests_failed", failures.len());
        outcome.figures.extend(failures.into_iter().next().map(|first| ("first_failure", first.into())));
    } else {
        outcome.no_failures(failures);
    }
    Ok(())
}

/// Restarts an engine under load, several times. Its requests break off.
pub(super) async fn engine_crash(drill: &Drill, fleet: &mut Fleet) -> Result<Outcome, DrillError> {
    let mut outcome = Outcome::new(Scenario::EngineCrash);
    let (before, second) = (Account::take(fleet).await?, u64::from(drill.rate.get()));
    let crashes = 5;
    for n in 0..crashes {
        fleet.serve(second).await?;
        fleet.engines[n % fleet.engines.len()].restart(Dialect::VllmMap).await?;
    }
    fleet.serve(2 * second).await?;
    outcome.figure("faults", crashes);
    settle(fleet, before, &mut outcome, false).await?;
    Ok(outcome)
}

/// Engines close connections, respond with errors, and respond late, each for a part of the requests.
pub(super) async fn engine_errors(drill: &Drill, fleet: &mut Fleet) -> Result<Outcome, DrillError> {
    let mut outcome = Outcome::new(Scenario::EngineErrors);
    let (before, second) = (Account::take(fleet).await?, u64::from(drill.rate.get()));
    let scope = Scope::Generation;
    let kinds = [
        Faults { reset_share: 0.05, scope, ..Faults::default() },
        Faults { status_share: 0.05, scope, ..Faults::default() },
        Faults { status_share: 0.05, status: 503, scope, ..Faults::default() },
        Faults { delay_ms: 500, scope, ..Faults::default() },
    ];
    for faults in kinds {
        fleet.set_faults(&faults)?;
        fleet.serve(3 * second).await?;
    }
    fleet.set_faults(&Faults::default())?;
    let eased_at = Instant::now();
    fleet.serve(second).await?;
    outcome.figure("recovered_s", seconds(eased_at.elapsed()));
    outcome.figure("faults", fleet.faults());
    settle(fleet, before, &mut outcome, true).await?;
    Ok(outcome)
}

/// Event messages of restarted engines are lost, repeated, reordered and damaged, each alone and all together.
pub(super) async fn event_faults(drill: &Drill, fleet: &mut Fleet) -> Result<Outcome, DrillError> {
    let mut outcome = Outcome::new(Scenario::EventFaults);
    let (before, second) = (Account::take(fleet).await?, u64::from(drill.rate.get()));
    let faults_before = fleet.faults();
    let none = Faults::default();
    let kinds = [
        Faults { drop_share: 0.1, ..none.clone() },
        Faults { duplicate_share: 0.1, ..none.clone() },
        Faults { reorder_share: 0.1, ..none.clone() },
        Faults { mangle_share: 0.1, ..none.clone() },
        Faults { drop_share: 0.1, duplicate_share: 0.1, reorder_share: 0.1, mangle_share: 0.1, ..none.clone() },
    ];
    for (n, faults) in kinds.into_iter().enumerate() {
        fleet.set_faults(&faults)?;
        // Engines publish what they cache again after a restart.
        fleet.engines[n % fleet.engines.len()].restart(Dialect::VllmMap).await?;
        fleet.serve(3 * second).await?;
    }
    fleet.set_faults(&none)?;
    fleet.serve(second).await?;
    let faults = fleet.faults() - faults_before;
    outcome.figure("faults", faults);
    outcome.fact(faults > 0, "no event message had a fault");
    settle(fleet, before, &mut outcome, false).await?;
    Ok(outcome)
}

/// Clients that send their request a byte at a time, each on a connection of its own, beside the load.
pub(super) async fn slow_clients(drill: &Drill, fleet: &mut Fleet) -> Result<Outcome, DrillError> {
    let mut outcome = Outcome::new(Scenario::SlowClients);
    let (before, second) = (Account::take(fleet).await?, u64::from(drill.rate.get()));
    let addresses: Vec<_> = fleet.gateways.iter().filter_map(|gateway| gateway.address).collect();
    let mut connections = Vec::new();
    for address in addresses.into_iter().cycle().take(drill.connections as usize) {
        connections.push(TcpStream::connect(address).await?);
    }
    outcome.figure("connections", connections.len());
    // All but the last byte of each request, in parts of one byte per round.
    let (last, slowly) = SLOW_REQUEST.split_last().expect("not empty");
    for byte in slowly {
        for connection in &mut connections {
            // A refused connection is closed. Its response is read below.
            let _ = connection.write_all(&[*byte]).await;
        }
    }
    fleet.serve(3 * second).await?;
    let ended_at = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for mut connection in connections {
        let last = [*last];
        tasks.spawn(async move {
            let mut response = Vec::new();
            let exchange = async {
                let _ = connection.write_all(&last).await;
                connection.read_to_end(&mut response).await
            };
            let is_over = timeout(SLOW_RESPONSE, exchange).await.is_ok();
            (is_over, response.starts_with(b"HTTP/1.1 200"))
        });
    }
    let (mut answered, mut refused) = (0_u32, 0_u32);
    while let Some(ended) = tasks.join_next().await {
        let (is_over, is_answered) = ended.unwrap_or_default();
        answered += u32::from(is_answered);
        refused += u32::from(is_over && !is_answered);
    }
    outcome.figure("answered", answered);
    outcome.figure("refused", refused);
    outcome.figure("answered_s", seconds(ended_at.elapsed()));
    outcome.fact(answered > 0 && answered + refused == drill.connections, "slow clients received no response");
    settle(fleet, before, &mut outcome, false).await?;
    Ok(outcome)
}

/// Kills a gateway in mid-load and starts it again. Requests at it break off; each ends once at its client.
pub(super) async fn kill_in_load(drill: &Drill, fleet: &mut Fleet) -> Result<Outcome, DrillError> {
    let mut outcome = Outcome::new(Scenario::KillInLoad);
    let second = u64::from(drill.rate.get());
    let (kills, mut recovery, sent) = (3, Duration::ZERO, fleet.traffic.ended());
    for _ in 0..kills {
        fleet.serve(second).await?;
        fleet.gateways[0].kill();
        fleet.traffic.set_gateway(0, None);
        let killed_at = Instant::now();
        fleet.start_gateway(0).await?;
        fleet.include(0).await?;
        recovery = recovery.max(killed_at.elapsed());
        sleep(Duration::from_millis(100)).await;
    }
    fleet.serve(second).await?;
    fleet.pause().await?;
    fleet.until_connected().await?;
    fleet.until_unloaded().await?;
    outcome.figure("faults", kills);
    outcome.figure("ready_again_s_max", seconds(recovery));
    outcome.figure("requests", fleet.traffic.ended() - sent);
    outcome.figure("requests_failed_at_killed", fleet.traffic.take_failures(0).len());
    outcome.no_failures(fleet.take_failures(None));
    Ok(outcome)
}
