//! Addresses of the pods of a Service, by watching its EndpointSlices.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;

use kube::runtime::watcher;
use kube::{Api, Client};

use super::client::ApiAccess;
use super::objects::{slice_addresses, slice_resource};
use super::watch::ObjectWatch;
use crate::discovery::DiscoveryError;

/// Label of an EndpointSlice with the name of its Service.
const SERVICE_LABEL: &str = "kubernetes.io/service-name";

/// Addresses of all pods of a Service, ready or not, by watch. While the API server does not respond, the last received
/// addresses apply. A pod with two address families has an address of each.
///
/// The address and the credentials of the API server are found as by [`KubernetesPods`](super::KubernetesPods).
///
/// ```
/// use pointsman::ServiceAddresses;
///
/// let addresses = ServiceAddresses::new("pointsman-replicas").namespace("llm");
/// ```
pub struct ServiceAddresses {
    service: String,
    namespace: Option<String>,
    access: ApiAccess,
    slices: Option<ObjectWatch<BTreeSet<IpAddr>>>,
    /// Last returned set and error.
    returned: Option<BTreeSet<IpAddr>>,
    error: Option<DiscoveryError>,
}

impl ServiceAddresses {
    /// A Service in the default namespace of the kubeconfig context or of the service account.
    #[must_use]
    pub fn new(service: impl Into<String>) -> Self {
        let (service, access) = (service.into(), ApiAccess::default());
        Self { service, namespace: None, access, slices: None, returned: None, error: None }
    }

    /// Sets the namespace.
    #[must_use]
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// Sets the client of the API server.
    #[must_use]
    pub fn client(mut self, client: Client) -> Self {
        self.access = ApiAccess::of_client(client);
        self
    }

    /// Sets the kubeconfig file. It is read when the watch starts, and again after an error in it.
    #[must_use]
    pub fn kubeconfig(mut self, file: impl Into<PathBuf>) -> Self {
        self.access = ApiAccess::of_file(file.into());
        self
    }

    /// Waits for the next complete set of addresses, if it differs from the last one. Cancel-safe.
    ///
    /// # Errors
    /// A watch that fails, once until it works again or fails for another reason. The last set remains in use.
    pub async fn next(&mut self) -> Result<BTreeSet<IpAddr>, DiscoveryError> {
        loop {
            let error = self.step().await.err();
            if error != self.error {
                self.error.clone_from(&error);
                if let Some(error) = error {
                    return Err(error);
                }
            }
            let Some(slices) = self.slices.as_ref().filter(|slices| slices.is_current) else { continue };
            let found: BTreeSet<IpAddr> = slices.set.objects().values().flatten().copied().collect();
            if self.returned.as_ref() != Some(&found) {
                self.returned = Some(found.clone());
                return Ok(found);
            }
        }
    }

    /// Applies the next event of the watch. Returns the present error.
    async fn step(&mut self) -> Result<(), DiscoveryError> {
        let slices = match &mut self.slices {
            Some(slices) => slices,
            None => {
                let client = self.access.client().await?;
                let namespace = self.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
                let config = watcher::Config::default().labels(&format!("{SERVICE_LABEL}={}", self.service));
                let resource = format!("endpointslices of service {namespace}/{}", self.service);
                let api = Api::namespaced_with(client, &namespace, &slice_resource());
                self.slices.insert(ObjectWatch::new(api, config, resource, slice_addresses))
            }
        };
        slices.advance().await;
        slices.error.clone().map_or(Ok(()), Err)
    }
}
