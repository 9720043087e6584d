//! Client of the API server, with its configuration.

use std::path::PathBuf;
use std::time::Duration;

use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio::time::{Instant, sleep_until};
use tower::limit::RateLimitLayer;

use crate::discovery::DiscoveryError;

/// Delay after a failure to load the configuration of the client.
const CLIENT_DELAY: Duration = Duration::from_secs(5);

/// Requests to the API server by one source within a period; further ones wait. A new source needs two per resource. A
/// watch that the server ends is opened again by kube without a pause.
const REQUESTS: (u64, Duration) = (20, Duration::from_secs(5));

/// Access to an API server by a client, by a kubeconfig file, or by the standard rules: `KUBECONFIG`, `~/.kube/config`,
/// then the service account of the pod.
#[derive(Clone)]
pub(super) struct ApiAccess {
    client: Option<Client>,
    kubeconfig: Option<PathBuf>,
    connect_at: Instant,
}

impl Default for ApiAccess {
    fn default() -> Self {
        Self { client: None, kubeconfig: None, connect_at: Instant::now() }
    }
}

impl ApiAccess {
    pub(super) fn of_client(client: Client) -> Self {
        Self { client: Some(client), ..Self::default() }
    }

    pub(super) fn of_file(file: PathBuf) -> Self {
        Self { kubeconfig: Some(file), ..Self::default() }
    }

    /// The client. After an error the next call waits.
    pub(super) async fn client(&mut self) -> Result<Client, DiscoveryError> {
        if let Some(client) = &self.client {
            return Ok(client.clone());
        }
        sleep_until(self.connect_at).await;
        let configured = match &self.kubeconfig {
            Some(file) => from_file(file.clone()).await.map_err(|reason| format!("{}: {reason}", file.display())),
            None => Config::infer().await.map_err(|error| error.to_string()),
        };
        let builder = configured.and_then(|config| ClientBuilder::try_from(config).map_err(|error| error.to_string()));
        let limit = RateLimitLayer::new(REQUESTS.0, REQUESTS.1);
        builder.map(|builder| builder.with_layer(&limit).build()).map_err(|reason| {
            self.connect_at = Instant::now() + CLIENT_DELAY;
            DiscoveryError::Other(format!("the Kubernetes client cannot be configured: {reason}"))
        })
    }
}

async fn from_file(file: PathBuf) -> Result<Config, String> {
    let reading = tokio::task::spawn_blocking(move || Kubeconfig::read_from(file));
    let kubeconfig = reading.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.map_err(|error| error.to_string())
}
