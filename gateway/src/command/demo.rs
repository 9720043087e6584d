//! The gateway of `pointsman demo`.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use pointsman::Router;
use pointsman_gateway::app::Gateway;
use pointsman_gateway::settings::{
    AdminSettings, DisaggregationSettings, GatewaySettings, ModelSettings, Settings, TokenSourceChoice, TokensSettings,
};
use pointsman_trial::demo::{DemoGateway, GatewaySetup, LivePage};
use ring::rand::{SecureRandom as _, SystemRandom};

/// A gateway of one model on loopback, with a prefill pool if there are prefill workers.
pub(crate) struct OneModel {
    gateway: Gateway,
    routers: Vec<Router>,
    token: Option<TokenFile>,
}

/// A random token of operators in a file, which is removed at the end.
struct TokenFile {
    token: String,
    path: PathBuf,
}

impl TokenFile {
    fn new() -> Result<Self, String> {
        let mut bytes = [0; 16];
        SystemRandom::new().fill(&mut bytes).map_err(|_| "no random numbers".to_owned())?;
        let token: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let path = std::env::temp_dir().join(format!("pointsman-demo-{}-{}.token", std::process::id(), &token[..8]));
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let written = file.and_then(|mut file| file.write_all(token.as_bytes()));
        written.map_err(|error| format!("{} cannot be written: {error}", path.display()))?;
        Ok(Self { token, path })
    }
}

impl Drop for TokenFile {
    fn drop(&mut self) {
        // A missing file is no error.
        let _ = std::fs::remove_file(&self.path);
    }
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
        let token = setup.has_live_page.then(TokenFile::new).transpose()?;
        let admin = token.as_ref().map(|token| AdminSettings {
            listen: gateway.listen,
            token_file: token.path.clone(),
            ..AdminSettings::default()
        });
        let settings = Settings { gateway, models, admin, ..Settings::default() };
        let gateway = Gateway::start(settings).await.map_err(|error| error.to_string())?;
        let router = |name: &String| gateway.router(name).ok_or_else(|| format!("no router of {name:?}"));
        let routers = names.iter().map(router).collect::<Result<_, _>>()?;
        Ok(Self { gateway, routers, token })
    }

    fn address(&self) -> SocketAddr {
        self.gateway.address()
    }

    fn routers(&self) -> Vec<Router> {
        self.routers.clone()
    }

    fn live_page(&self) -> Option<LivePage> {
        let (address, TokenFile { token, path }) = self.gateway.admin_address().zip(self.token.as_ref())?;
        Some(LivePage { address, token: token.clone(), token_file: path.clone() })
    }

    async fn shutdown(self, drain: Duration) {
        self.gateway.shutdown(drain).await;
    }
}
