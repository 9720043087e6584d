//! Listeners of a gateway: for clients, operators and proxies.

use std::io;
use std::sync::Arc;

use rustls::ServerConfig;
use tokio::net::TcpListener;

use super::reload::Reloader;
use super::running::Running;
use super::{reload_routes, routes};
use crate::net::limits::{ADMIN_CONNECTIONS_MAX, OVERFLOW_CONNECTIONS_MAX};
use crate::net::listener::{Listener, ListenerOptions, Overflow};
use crate::observe::page::Metrics;
use crate::settings::PickerSettings;
use crate::{admin, picker};

/// What the listeners share.
pub(super) struct Listeners<'a> {
    pub(super) running: &'a Running,
    /// Options of the clients' listener.
    pub(super) options: ListenerOptions,
    pub(super) metrics: Option<Metrics>,
}

impl Listeners<'_> {
    /// For clients. Connections above its limit receive probes only.
    pub(super) fn clients(&self, socket: TcpListener) -> io::Result<Listener> {
        let probes = routes::probes(self.running.pools.clone(), self.metrics.clone());
        let routes = routes::overflow(probes.clone());
        let overflow = Some(Overflow { connections_max: OVERFLOW_CONNECTIONS_MAX, routes });
        let options = ListenerOptions { overflow, ..self.options.clone() };
        Listener::start(socket, options, routes::clients(self.running.context.clone(), probes))
    }

    /// For operators.
    pub(super) fn admin(&self, socket: TcpListener, reloader: Arc<Reloader>) -> io::Result<Listener> {
        let connections_max = ADMIN_CONNECTIONS_MAX;
        let options = ListenerOptions { name: "admin", connections_max, tls: None, ..self.options.clone() };
        let (pools, tokens) = (self.running.pools.clone(), self.running.admin_tokens.clone());
        let routes = admin::routes(pools, tokens, self.metrics.clone(), reload_routes::routes(reloader));
        Listener::start(socket, options, routes)
    }

    /// For proxies.
    pub(super) fn picker(
        &self,
        socket: TcpListener,
        settings: &PickerSettings,
        tls: Option<Arc<ServerConfig>>,
    ) -> io::Result<Listener> {
        let options = ListenerOptions { name: "picker", tls, ..self.options.clone() };
        let (context, pools) = (self.running.context.clone(), self.running.pools.clone());
        Listener::start(socket, options, picker::routes(context, pools, settings))
    }
}
