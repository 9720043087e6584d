//! The scenarios. Each expects a fleet without requests, and leaves one with all gateways running.
//!
//! Scenarios with faults of engines, event streams and clients account for every request: sent requests end once at the
//! client, the gateways count the same number, and no more attempts succeed than requests. A request may fail at the client
//! if engines hang or break off: no retry can follow the first token of a stream, and retries have a budget.

use std::path::Path;
use std::time::Duration;

use pointsman_trial::kv_events::Dialect;
use pointsman_trial::mock::{Faults, Scope};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use super::fleet::{Fleet, Network, until};
use super::nats::NatsServer;
use super::{Drill, Outcome, Scenario};
use crate::Failed;

/// Gateway that is killed and restarted.
const KILLED: usize = 0;

/// Maximum share of blind decisions after a restart, in percent.
const BLIND_PERCENT_MAX: f64 = 1.0;

/// Share of the responses with a fault.
const SHARE: f64 = 0.05;

/// Request of a slow client.
const SLOW_REQUEST: &[u8] = b"GET /v1/models HTTP/1.1\r\nhost: drill\r\nconnection: close\r\n\r\n";

/// Limit of the response to a slow request. No result depends on it.
const SLOW_RESPONSE: Duration = Duration::from_secs(60);

/// A running scenario.
struct Scene<'a> {
    drill: &'a Drill,
    fleet: &'a mut Fleet,
    outcome: Outcome,
}

/// Runs a scenario that needs no server of its own.
pub(super) async fn run(drill: &Drill, fleet: &mut Fleet, scenario: Scenario) -> Result<Outcome, Failed> {
    let mut scene = Scene { drill, fleet, outcome: Outcome::new(scenario) };
    let none = || Faults { scope: Scope::Generation, ..Faults::default() };
    match scenario {
        Scenario::Kill | Scenario::NatsOutage | Scenario::NatsLate => scene.kill().await?,
        Scenario::Restart => scene.restart().await?,
        Scenario::Partition => scene.partition().await?,
        Scenario::KillInLoad => scene.kill_in_load().await?,
        Scenario::EngineCrash => scene.engine_crash().await?,
        Scenario::SlowClients => scene.slow_clients().await?,
        Scenario::EngineErrors => {
            let kinds = [
                Faults { reset_share: SHARE, ..none() },
                Faults { status_share: SHARE, ..none() },
                Faults { status_share: SHARE, status: 503, ..none() },
                Faults { delay_ms: 500, ..none() },
            ];
            scene.under(kinds, Effect::Errors).await?;
        }
        Scenario::EngineHangs => {
            let kinds = [
                Faults { hang_share: SHARE, ..none() },
                Faults { stall_share: SHARE, ..none() },
                Faults { hang_share: SHARE, stall_share: SHARE, ..none() },
            ];
            scene.under(kinds, Effect::BrokenStreams).await?;
        }
        Scenario::EngineGarbage => {
            scene.under([Faults { garbage_share: SHARE, ..none() }], Effect::BrokenStreams).await?;
        }
        Scenario::HalfStreams => scene.under([Faults { cut_share: SHARE, ..none() }], Effect::BrokenStreams).await?,
        Scenario::EventFaults => {
            let kinds = [
                Faults { drop_share: 0.1, ..none() },
                Faults { duplicate_share: 0.1, ..none() },
                Faults { reorder_share: 0.1, ..none() },
                Faults { mangle_share: 0.1, ..none() },
                Faults { drop_share: 0.1, duplicate_share: 0.1, reorder_share: 0.1, mangle_share: 0.1, ..none() },
            ];
            scene.under(kinds, Effect::DamagedEvents).await?;
        }
    }
    Ok(scene.outcome)
}

/// What the faults of engines may affect.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// Whole responses.
    Errors,
    /// Responses in their middle. Half of the requests are streams.
    BrokenStreams,
    /// Event messages of restarted engines, which publish what they cache again. No request may fail.
    DamagedEvents,
}

/// Counts of a point in time.
struct Account {
    sent: u64,
    counted: f64,
    succeeded: f64,
}

impl Account {
    async fn take(fleet: &Fleet) -> Result<Self, Failed> {
        Ok(Self {
            sent: fleet.traffic.ended(),
            counted: fleet.sum("pointsman_gateway_requests_total{", "endpoint=\"completions\"").await?,
            succeeded: fleet.sum("pointsman_gateway_worker_requests_total{", "outcome=\"ok\"").await?,
        })
    }
}

impl Scene<'_> {
    fn figure(&mut self, name: &'static str, value: impl Into<Value>) {
        self.outcome.figures.insert(name, value.into());
    }

    /// Reports a duration in seconds.
    fn took(&mut self, name: &'static str, elapsed: Duration) {
        self.figure(name, json!((elapsed.as_secs_f64() * 1e3).round() / 1e3));
    }

    fn fact(&mut self, holds: bool, violation: &str) {
        if !holds {
            self.outcome.violations.push(violation.to_owned());
        }
    }

    /// Serves the load of some seconds.
    async fn serve_s(&self, seconds: u32) -> Result<(), Failed> {
        self.fleet.serve(u64::from(seconds) * u64::from(self.drill.rate.get())).await
    }

    /// Pauses the load until none is counted, and reports failed requests as violations.
    async fn end(&mut self) -> Result<(), Failed> {
        self.fleet.pause().await?;
        self.fleet.until_unloaded().await?;
        self.no_failures();
        Ok(())
    }

    fn no_failures(&mut self) {
        let failures = self.fleet.take_failures();
        self.figure("requests_failed", failures.len());
        if let Some(first) = failures.first() {
            self.fact(false, &format!("{} requests failed, the first at {first}", failures.len()));
        }
    }

    /// Accounts for the requests since `before`, and waits until no load is counted.
    async fn settle(&mut self, before: Account, may_fail: bool) -> Result<(), Failed> {
        let paused_at = Instant::now();
        self.fleet.pause().await?;
        self.fleet.until_unloaded().await?;
        self.took("settled_s", paused_at.elapsed());
        let (after, failures) = (Account::take(self.fleet).await?, self.fleet.take_failures());
        let sent = after.sent - before.sent;
        let lost = sent as f64 - (after.counted - before.counted);
        let doubled = (after.succeeded - before.succeeded) - (sent as f64 - failures.len() as f64);
        self.figure("requests", sent);
        self.figure("lost", lost);
        self.figure("doubled", doubled);
        self.figure("requests_failed", failures.len());
        self.fact(lost == 0.0, "the gateways counted another number of requests");
        self.fact(doubled <= 0.0, "more attempts succeeded than requests");
        if let Some(first) = failures.into_iter().next() {
            self.fact(may_fail, &format!("requests failed, the first at {first}"));
            self.figure("first_failure", first);
        }
        Ok(())
    }

    /// Kills a gateway under load. Its share of the load ends at the others.
    async fn kill(&mut self) -> Result<(), Failed> {
        self.serve_s(1).await?;
        self.fleet.gateways[KILLED].kill();
        let killed_at = Instant::now();
        self.fleet.traffic.set_gateway(KILLED, None);
        self.serve_s(2).await?;
        self.fleet.pause().await?;
        let blocks = self.fleet.active_blocks().await?;
        self.figure("blocks_counted_then", blocks);
        self.fleet.until_unloaded().await?;
        self.took("share_gone_s", killed_at.elapsed());
        let failed = self.fleet.traffic.take_failures(KILLED).len();
        self.figure("requests_failed_at_killed", failed);
        self.no_failures();
        Ok(())
    }

    /// Restarts the killed gateway under load.
    async fn restart(&mut self) -> Result<(), Failed> {
        if self.fleet.gateways[KILLED].is_running() {
            self.fleet.gateways[KILLED].kill();
            self.fleet.traffic.set_gateway(KILLED, None);
        }
        self.serve_s(1).await?;
        let begun = Instant::now();
        self.fleet.start_gateway(KILLED).await?;
        self.took("listening_s", begun.elapsed());
        self.fleet.include(KILLED).await?;
        self.took("ready_s", begun.elapsed());
        let restores = self.fleet.gateways[KILLED].metrics("snapshot_restores_total").await?;
        let restores: Vec<String> = restores.into_iter().filter(|(_, n)| *n > 0.0).map(|(labels, _)| labels).collect();
        let is_restored = restores.iter().any(|labels| labels.contains("result=\"restored\""));
        self.fact(is_restored, "no snapshot was restored");
        let sources = restores.iter().filter_map(|labels| Some(labels.split_once("source=")?.1.trim_end_matches('}')));
        self.figure("restores", sources.collect::<Vec<_>>());

        let other = 1;
        let traffic = &self.fleet.traffic;
        let (before, other_before) = (traffic.ended_of(KILLED), traffic.ended_of(other));
        let decisions = u64::from(self.drill.decisions);
        until("decisions", async || Ok(traffic.ended_of(KILLED) >= before + decisions)).await?;
        self.fleet.pause().await?;
        let other_after = self.fleet.traffic.ended_of(other);
        for (name, n, from, to) in
            [("blind_percent", KILLED, 0, decisions), ("blind_percent_of_another", other, other_before, other_after)]
        {
            let mut blind = None;
            until("lines of the access log", async || {
                blind = self.fleet.gateways[n].blind(from, to)?;
                Ok(blind.is_some())
            })
            .await?;
            let share = blind.unwrap_or_default().share();
            self.figure(name, (share * 100.0).round() / 100.0);
            let holds = n != KILLED || share < BLIND_PERCENT_MAX;
            self.fact(holds, &format!("{share:.2} % of the decisions were blind"));
        }
        self.fleet.until_connected().await?;
        self.end().await
    }

    /// Separates two gateways under load. Each drops the share of the other one, and they meet again.
    async fn partition(&mut self) -> Result<(), Failed> {
        self.fleet.until_connected().await?;
        self.serve_s(1).await?;
        self.fleet.set_connected(0, 1, false);
        let separated_at = Instant::now();
        until("silent replicas", async || Ok(self.fleet.peers("silent").await? >= 2.0)).await?;
        self.took("silent_s", separated_at.elapsed());
        self.fleet.pause().await?;
        let blocks = self.fleet.active_blocks().await?;
        self.figure("blocks_counted_then", blocks);
        self.fleet.until_unloaded().await?;
        self.took("shares_gone_s", separated_at.elapsed());
        self.serve_s(2).await?;
        self.fleet.set_connected(0, 1, true);
        self.connect("connected_again_s").await
    }

    /// Waits until all gateways are connected, serves for a second and ends.
    async fn connect(&mut self, name: &'static str) -> Result<(), Failed> {
        let begun = Instant::now();
        self.fleet.until_connected().await?;
        self.took(name, begun.elapsed());
        self.serve_s(1).await?;
        self.end().await
    }

    /// Kills a gateway in mid-load and starts it again. Requests at it break off; each ends once at its client.
    async fn kill_in_load(&mut self) -> Result<(), Failed> {
        let (kills, mut recovery, sent) = (3, Duration::ZERO, self.fleet.traffic.ended());
        for _ in 0..kills {
            self.serve_s(1).await?;
            self.fleet.gateways[KILLED].kill();
            self.fleet.traffic.set_gateway(KILLED, None);
            let killed_at = Instant::now();
            self.fleet.start_gateway(KILLED).await?;
            self.fleet.include(KILLED).await?;
            recovery = recovery.max(killed_at.elapsed());
            sleep(Duration::from_millis(100)).await;
        }
        self.serve_s(1).await?;
        self.fleet.pause().await?;
        self.fleet.until_connected().await?;
        let (requests, failed) = (self.fleet.traffic.ended() - sent, self.fleet.traffic.take_failures(KILLED).len());
        self.figure("faults", kills);
        self.took("ready_again_s_max", recovery);
        self.figure("requests", requests);
        self.figure("requests_failed_at_killed", failed);
        self.end().await
    }

    /// Restarts an engine under load, several times. Its requests break off.
    async fn engine_crash(&mut self) -> Result<(), Failed> {
        let (before, crashes) = (Account::take(self.fleet).await?, 5);
        for n in 0..crashes {
            self.serve_s(1).await?;
            self.fleet.engines[n % self.fleet.engines.len()].restart(Dialect::VllmMap).await?;
        }
        self.serve_s(2).await?;
        self.figure("faults", crashes);
        self.settle(before, false).await
    }

    /// Engines have each of `faults` for some seconds.
    async fn under(&mut self, faults: impl IntoIterator<Item = Faults>, effect: Effect) -> Result<(), Failed> {
        let (before, faults_before) = (Account::take(self.fleet).await?, self.fleet.faults());
        let is_streaming = effect == Effect::BrokenStreams;
        self.fleet.traffic.set_streaming(is_streaming);
        for (n, faults) in faults.into_iter().enumerate() {
            self.fleet.set_faults(&faults)?;
            if effect == Effect::DamagedEvents {
                self.fleet.engines[n % self.fleet.engines.len()].restart(Dialect::VllmMap).await?;
            }
            self.serve_s(if is_streaming { 4 } else { 3 }).await?;
        }
        self.fleet.set_faults(&Faults::default())?;
        let eased_at = Instant::now();
        self.serve_s(1).await?;
        self.took("recovered_s", eased_at.elapsed());
        let faults = self.fleet.faults() - faults_before;
        self.figure("faults", faults);
        self.fact(faults > 0, "no fault was injected");
        self.settle(before, effect != Effect::DamagedEvents).await?;
        if is_streaming {
            self.fleet.traffic.set_streaming(false);
            self.serve_s(1).await?;
            self.fleet.pause().await?;
            let is_clean = self.fleet.take_failures().is_empty();
            self.fact(is_clean, "requests failed after the faults");
        }
        Ok(())
    }

    /// Clients that send their request a byte at a time, each on a connection of its own, beside the load.
    async fn slow_clients(&mut self) -> Result<(), Failed> {
        let before = Account::take(self.fleet).await?;
        let addresses: Vec<_> = self.fleet.gateways.iter().filter_map(|gateway| gateway.address).collect();
        let mut connections = Vec::new();
        for address in addresses.into_iter().cycle().take(self.drill.connections as usize) {
            connections.push(TcpStream::connect(address).await?);
        }
        self.figure("connections", connections.len());
        // All but the last byte of each request, in parts of one byte per round.
        let (last, slowly) = SLOW_REQUEST.split_last().expect("not empty");
        for byte in slowly {
            for connection in &mut connections {
                // A refused connection is closed. Its response is read below.
                let _ = connection.write_all(&[*byte]).await;
            }
        }
        self.serve_s(3).await?;
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
        self.figure("answered", answered);
        self.figure("refused", refused);
        self.took("answered_s", ended_at.elapsed());
        let holds = answered > 0 && answered + refused == self.drill.connections;
        self.fact(holds, "slow clients received no response");
        self.settle(before, false).await
    }
}

/// Stops the NATS server under load, so that each gateway goes on alone, or starts it after the gateways, which serve
/// without it. They meet again.
pub(super) async fn run_with_server(
    drill: &Drill,
    program: &Path,
    server: &mut NatsServer,
    scenario: Scenario,
) -> Result<Outcome, Failed> {
    let is_outage = scenario == Scenario::NatsOutage;
    if is_outage {
        server.start().await?;
    }
    let mut fleet = Fleet::start(drill, program, Network::Nats(server.address())).await?;
    let mut scene = Scene { drill, fleet: &mut fleet, outcome: Outcome::new(scenario) };
    if is_outage {
        scene.fleet.until_connected().await?;
    }
    scene.serve_s(1).await?;
    if is_outage {
        server.stop();
        scene.serve_s(drill.outage_s).await?;
        let live = scene.fleet.peers("live").await?;
        scene.fact(live == 0.0, "a replica counts as live without the server");
    }
    server.start().await?;
    scene.connect(if is_outage { "connected_again_s" } else { "connected_s" }).await?;
    Ok(scene.outcome)
}
