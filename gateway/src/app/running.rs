//! State of a running gateway that reloads replace, and the files that it is made from.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::admin::Tokens;
use crate::admission::admit::Admission;
use crate::admission::retry_budget::RetryBudget;
use crate::admission::tenants::Tenants;
use crate::net::budget::RequestBudget;
use crate::net::certificates::Certificate;
use crate::net::limits::ProcessLimits;
use crate::net::listener::ListenerOptions;
use crate::net::tls::{self, TlsError};
use crate::net::upstream::Upstream;
use crate::observe::otlp::Tracing;
use crate::observe::requests::Meters;
use crate::pools::latest::Latest;
use crate::pools::models::Models;
use crate::pools::serving::{Pools, Readiness};
use crate::proxy::context::RequestContext;
use crate::proxy::ids::Ids;
use crate::settings::{GatewaySettings, Secrets, Settings};

/// Why the gateway cannot start, or cannot apply settings.
pub type GatewayError = Box<dyn std::error::Error + Send + Sync>;

/// State that reloads replace.
#[derive(Clone)]
pub(super) struct Running {
    /// What requests see.
    pub(super) context: Latest<RequestContext>,
    /// What the tasks of the models see.
    pub(super) pools: Latest<Pools>,
    pub(super) admin_tokens: Latest<Tokens>,
    pub(super) certificates: Latest<Vec<Certificate>>,
}

impl Running {
    pub(super) fn new(
        settings: Settings,
        limits: &ProcessLimits,
        (secrets, admin_tokens): (&Secrets, Tokens),
        models: Models,
        upstream: Upstream,
    ) -> Result<Self, GatewayError> {
        let gateway = &settings.gateway;
        let tracing = tracing_of(gateway)?;
        let admission = Admission {
            tenants: Arc::new(Tenants::new(&settings.tenants, secrets)),
            retry_budget: Arc::new(RetryBudget::new(gateway.retry_share_max, Instant::now())),
            budget: RequestBudget::new(limits.request_budget_bytes, limits.requests_max),
            shared_sessions: Arc::default(),
        };
        let certificates = Latest::new(Certificate::all(&settings));
        let readiness = Arc::new(Readiness::new(Duration::from_millis(gateway.warm_up_ms)));
        let (settings, models) = (Arc::new(settings), Arc::new(models));
        let pools = Pools { settings: Arc::clone(&settings), models: Arc::clone(&models), readiness };
        let (meters, ids) = (Arc::new(Meters::new()), Arc::new(Ids::new()));
        let engine_sessions = Arc::default();
        let context = RequestContext { settings, models, admission, upstream, meters, tracing, ids, engine_sessions };
        let (context, pools, admin_tokens) = (Latest::new(context), Latest::new(pools), Latest::new(admin_tokens));
        Ok(Self { context, pools, admin_tokens, certificates })
    }
}

/// Exporter of traces, if an address is set.
fn tracing_of(gateway: &GatewaySettings) -> Result<Option<Arc<Tracing>>, GatewayError> {
    let Some(endpoint) = &gateway.otlp_endpoint else { return Ok(None) };
    let tracing = Tracing::start(endpoint, gateway.otlp_sample_share);
    let tracing = tracing.map_err(|reason| format!("cannot export traces to {endpoint}: {reason}"))?;
    Ok(Some(Arc::new(tracing)))
}

/// Contents of the files referenced by settings, validated.
pub(super) struct Files {
    pub(super) secrets: Secrets,
    pub(super) admin_tokens: Tokens,
    /// The clients' listener with its certificate.
    pub(super) listener: ListenerOptions,
}

impl Files {
    pub(super) fn read(settings: &Settings, limits: &ProcessLimits) -> Result<Self, GatewayError> {
        let listener = client_options(&settings.gateway, limits)?;
        let admin_tokens = Tokens::read(settings.admin.as_ref())?;
        Ok(Self { secrets: Secrets::read(settings)?, admin_tokens, listener })
    }
}

/// Options of the clients' listener.
fn client_options(settings: &GatewaySettings, limits: &ProcessLimits) -> Result<ListenerOptions, TlsError> {
    let tls = match (&settings.tls_certificate_file, &settings.tls_key_file) {
        (Some(certificate_file), Some(key_file)) => Some(tls::server(certificate_file, key_file)?),
        (None, None) => None,
        (Some(file), None) | (None, Some(file)) => return Err(TlsError::Half { file: file.clone() }),
    };
    Ok(ListenerOptions {
        name: "clients",
        connections_max: limits.connections_max,
        overflow: None,
        cores: None,
        budget: None,
        streams_max: settings.http2_streams_max,
        head_timeout: Duration::from_millis(settings.head_timeout_ms),
        stall_max: Duration::from_millis(settings.idle_timeout_ms),
        busy_max: Duration::from_millis(settings.drain_timeout_ms / 4),
        tls,
    })
}
