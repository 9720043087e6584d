//! The gateway of `pointsman demo`.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use pointsman::Router;
use pointsman_gateway::serve::Gateway;
use pointsman_gateway::settings::{GatewaySettings, ModelSettings, Settings, TokenSourceChoice, TokensSettings};
use pointsman_trial::demo::{DemoGateway, GatewaySetup};

/// A gateway of one model on loopback.
pub(crate) struct OneModel {
    gateway: Gateway,
    router: Router,
}

impl DemoGateway for OneModel {
    async fn start(setup: GatewaySetup) -> Result<Self, String> {
        let tokens = TokensSettings {
            source: TokenSourceChoice::Engine,
            engine_timeout_ms: setup.tokenize_timeout_ms,
            ..TokensSettings::default()
        };
        let model = ModelSettings {
            router: setup.router,
            workers: setup.workers,
            tokens,
            ..ModelSettings::named(setup.model.as_str())
        };
        let gateway = GatewaySettings {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            head_timeout_ms: setup.idle_timeout_ms,
            ..GatewaySettings::default()
        };
        let settings = Settings { gateway, models: vec![model], ..Settings::default() };
        let gateway = Gateway::start(settings).await.map_err(|error| error.to_string())?;
        let router = gateway.router(&setup.model).ok_or_else(|| format!("no router of {:?}", setup.model))?;
        Ok(Self { gateway, router })
    }

    fn address(&self) -> SocketAddr {
        self.gateway.address()
    }

    fn router(&self) -> Router {
        self.router.clone()
    }

    async fn shutdown(self, drain: Duration) {
        self.gateway.shutdown(drain).await;
    }
}
