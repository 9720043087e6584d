//! Admission of a request: client, and the limits of its tenant.

use std::sync::Arc;

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;

use super::leases::QuotaLease;
use super::retry_budget::RetryBudget;
use super::shared_sessions::SharedSessions;
use super::tenants::{Tenant, Tenants};
use crate::formats::openai::{API_KEY, ApiError};
use crate::net::budget::RequestBudget;

/// Admission rules of clients. Budgets and shared sessions survive reloads.
#[derive(Clone)]
pub(crate) struct Admission {
    pub(crate) tenants: Arc<Tenants>,
    pub(crate) retry_budget: Arc<RetryBudget>,
    pub(crate) budget: Arc<RequestBudget>,
    pub(crate) shared_sessions: Arc<SharedSessions>,
}

/// A request that may enter.
pub(crate) struct Admitted<'a> {
    /// Tenant of the client; `None` without tenants.
    pub(crate) tenant: Option<&'a Tenant>,
    /// Its share of the limits.
    pub(crate) quota: Option<QuotaLease>,
}

impl Admission {
    /// Authenticates the client and counts the request.
    ///
    /// # Errors
    /// 401 for an unknown client, 429 above a limit of the client.
    pub(crate) fn admit(&self, headers: &HeaderMap) -> Result<Admitted<'_>, ApiError> {
        match self.tenants.identify(headers.get(AUTHORIZATION), headers.get(API_KEY))? {
            Some(client) => Ok(Admitted { tenant: Some(client.tenant), quota: Some(client.admit()?) }),
            None => Ok(Admitted { tenant: None, quota: None }),
        }
    }
}
