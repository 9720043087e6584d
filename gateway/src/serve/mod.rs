//! The gateway: it takes clients' requests, places them, and carries them to workers and their answers back.
//!
//! Owns what a running gateway is made of ([`App`]) and its start and end. Promises that what was accepted is answered,
//! and that at its end no booking is left. Leaves listening to [`listener`], requests to [`proxy`], who may ask to
//! [`tenants`], and which model is meant to [`models`].

mod listener;
mod models;
mod proxy;
mod routes;
mod tenants;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use pointsman::Router;
use rustls::RootCertStore;

use crate::settings::Settings;
use crate::upstream::Upstream;
use listener::{Drained, Listener};
use models::{ModelError, Models};
pub use tenants::{Tenant, Tenants};

/// Why a gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// A model's pool.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// An address that cannot be listened at.
    #[error("cannot listen at {address}: {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system says.
        error: std::io::Error,
    },
}

/// What every request is served with.
pub(crate) struct App {
    pub(crate) settings: Settings,
    pub(crate) models: Models,
    pub(crate) upstream: Upstream,
}

/// A running gateway.
pub struct Gateway {
    app: Arc<App>,
    clients: Listener,
}

impl Gateway {
    /// Starts the routers, then listens.
    ///
    /// # Errors
    /// See [`GatewayError`]; nothing runs then.
    pub async fn start(settings: Settings) -> Result<Self, GatewayError> {
        let tls = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("ring speaks TLS 1.2 and 1.3")
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        let upstream = Upstream::new(tls, Duration::from_millis(settings.gateway.connect_timeout_ms));
        let models = Models::start(&settings.models, &upstream).await?;
        let listen = settings.gateway.listen;
        let app = Arc::new(App { settings, models, upstream });
        let clients = Listener::start(listen, routes::clients(Arc::clone(&app))).await;
        let clients = clients.map_err(|error| GatewayError::Listen { address: listen, error })?;
        Ok(Self { app, clients })
    }

    /// Where clients connect.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.clients.address()
    }

    /// The router of a model.
    #[must_use]
    pub fn router(&self, model: &str) -> Option<&Router> {
        self.app.models.find(model).map(|(model, _)| &model.router)
    }

    /// Takes no more connections, waits up to `deadline` for requests in flight, and ends.
    pub async fn shutdown(self, deadline: Duration) -> Drained {
        let drained = self.clients.drain(deadline).await;
        self.app.models.shutdown().await;
        drained
    }
}
