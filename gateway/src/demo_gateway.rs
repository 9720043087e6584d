//! The gateway of `pointsman demo`.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use pointsman::Router;
use pointsman_gateway::serve::Gateway;
use pointsman_gateway::settings::{
    DisaggregationSettings, GatewaySettings, ModelSettings, Settings, TokenSourceChoice, TokensSettings,
};
use pointsman_trial::demo::{DemoGateway, GatewaySetup};

/// A gateway of one model on loopback, with a prefill pool if there are prefill workers.
pub(crate) struct OneModel {
    gateway: Gateway,
    routers: Vec<Router>,
}

/// Name of the model with the prefill workers.
const PREFILL: &str = "prefill";

impl DemoGateway for OneModel {
    async fn start(setup: GatewaySetup) -> Result<Self, String> {
        let tokens = TokensSettings {
            source: TokenSourceChoice::Engine,
            engine_timeout_ms: setup.tokenize_timeout_ms,
            ..TokensSettings::default()
        };
        let mut model = ModelSettings {
            router: setup.router,
            workers: setup.workers,
            tokens,
            ..ModelSettings::named(setup.model.as_str())
        };
        let mut models = Vec::new();
        if !setup.prefill_workers.is_empty() {
            let prefill = PREFILL.to_owned();
            model.disaggregation = Some(DisaggregationSettings { prefill, ..DisaggregationSettings::default() });
            let mut prefill =
                ModelSettings { name: PREFILL.to_owned(), workers: setup.prefill_workers, ..model.clone() };
            prefill.disaggregation = None;
            prefill.router.pool = PREFILL.to_owned();
            models.push(prefill);
        }
        models.insert(0, model);
        let names: Vec<String> = models.iter().map(|model| model.name.clone()).collect();
        let gateway = GatewaySettings {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            head_timeout_ms: setup.idle_timeout_ms,
            ..GatewaySettings::default()
        };
        let settings = Settings { gateway, models, ..Settings::default() };
        let gateway = Gateway::start(settings).await.map_err(|error| error.to_string())?;
        let router = |name: &String| gateway.router(name).ok_or_else(|| format!("no router of {name:?}"));
        let routers = names.iter().map(router).collect::<Result<_, _>>()?;
        Ok(Self { gateway, routers })
    }

    fn address(&self) -> SocketAddr {
        self.gateway.address()
    }

    fn routers(&self) -> Vec<Router> {
        self.routers.clone()
    }

    async fn shutdown(self, drain: Duration) {
        self.gateway.shutdown(drain).await;
    }
}
