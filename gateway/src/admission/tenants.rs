//! Tenants: authentication by key, and cache salts.
//!
//! Rejection time does not depend on the similarity of a key to a valid one. Salts of different tenants never collide,
//! and a client's own salt divides the cache of its tenant further. Request options enforce permissions.

use std::fmt;
use std::sync::Arc;

use ahash::AHashMap;
use axum::http::HeaderValue;
use ring::{digest, hmac};

use super::leases::{QuotaLease, TenantQuota};
use crate::admission::quota::KeyId;
use crate::formats::openai::ApiError;
use crate::settings::{Secrets, TenantSettings};

/// Salt length in bytes, written as twice as many digits.
const SALT_BYTES: usize = 16;

/// A tenant.
pub struct Tenant {
    /// Name in logs.
    pub name: String,
    /// Fixed queue class of its requests, if any.
    pub policy_class: Option<String>,
    /// Maximum strict priority of its requests.
    pub strict_priority_max: u32,
    salt_key: hmac::Key,
    quota: Arc<TenantQuota>,
}

/// Omits keys and usage.
impl fmt::Debug for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tenant").field("name", &self.name).finish_non_exhaustive()
    }
}

/// An authenticated client.
#[derive(Clone, Copy, Debug)]
pub struct Client<'a> {
    /// Its tenant.
    pub tenant: &'a Tenant,
    key: KeyId,
}

impl Client<'_> {
    /// Counts a request of the client.
    ///
    /// # Errors
    /// 429 above a limit of the tenant or the key.
    pub(crate) fn admit(&self) -> Result<QuotaLease, ApiError> {
        self.tenant.quota.admit(self.key)
    }
}

impl Tenant {
    /// Salt of a request, 32 hexadecimal digits, derived with the gateway's secret so that no client can produce
    /// another tenant's salt. `client_salt` is the client's own; an empty one differs from none.
    #[must_use]
    pub fn salt(&self, client_salt: Option<&str>) -> String {
        self.own(u8::from(client_salt.is_some()), client_salt.unwrap_or_default())
    }

    /// Session id within the tenant, as long as a salt: equal sessions of two tenants differ.
    #[must_use]
    pub fn session(&self, session_id: &str) -> String {
        self.own(2, session_id)
    }

    fn own(&self, kind: u8, text: &str) -> String {
        let mut context = hmac::Context::with_key(&self.salt_key);
        // Length-prefixed parts, so that different inputs never concatenate to equal bytes.
        context.update(&(self.name.len() as u64).to_be_bytes());
        context.update(self.name.as_bytes());
        context.update(&[kind]);
        context.update(text.as_bytes());
        hex(&context.sign().as_ref()[..SALT_BYTES])
    }
}

/// All tenants. Without tenants the API is open.
#[derive(Debug, Default)]
pub struct Tenants {
    all: Vec<Tenant>,
    /// By SHA-256 of the key, so that lookups compare no bytes chosen by a client.
    by_key: AHashMap<KeyId, usize>,
}

impl Tenants {
    /// Builds the tenants from settings, keys and salt secret.
    #[must_use]
    pub fn new(settings: &[TenantSettings], secrets: &Secrets) -> Self {
        Self::default().reloaded(settings, secrets)
    }

    /// The tenants after a reload. A tenant with the same name keeps its usage.
    #[must_use]
    pub fn reloaded(&self, settings: &[TenantSettings], secrets: &Secrets) -> Self {
        let salt_secret = secrets.salt_secret.as_ref().map_or(&[][..], |secret| secret.as_bytes());
        let salt_key = hmac::Key::new(hmac::HMAC_SHA256, salt_secret);
        debug_assert!(settings.is_empty() || !salt_secret.is_empty(), "tenants require a salt secret");
        let mut tenants = Self::default();
        for (n, tenant) in settings.iter().enumerate() {
            let (limits, key_limits) = (tenant.limits(), tenant.key_limits());
            let TenantSettings { name, policy_class, strict_priority_max, .. } = tenant.clone();
            let running = self.all.iter().find(|running| running.name == name);
            let quota = match running.map(|running| Arc::clone(&running.quota)) {
                Some(quota) => {
                    quota.set(limits, key_limits);
                    quota
                }
                None => Arc::new(TenantQuota::new(n, &name, limits, key_limits)),
            };
            tenants.all.push(Tenant { name, policy_class, strict_priority_max, salt_key: salt_key.clone(), quota });
            for key in secrets.tenant_keys.get(n).into_iter().flatten() {
                tenants.by_key.insert(digest_of(key.as_bytes()), n);
            }
        }
        tenants
    }

    /// Whether the API is open.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The client of an `Authorization` header, or of an `X-Api-Key` header; `None` without tenants.
    ///
    /// # Errors
    /// 401 if tenants exist and neither header has one of their keys.
    pub fn identify(
        &self,
        authorization: Option<&HeaderValue>,
        api_key: Option<&HeaderValue>,
    ) -> Result<Option<Client<'_>>, ApiError> {
        if self.is_empty() {
            return Ok(None);
        }
        let keys = [authorization.and_then(bearer_key), api_key.map(|key| key.as_bytes().trim_ascii())];
        let known = keys.into_iter().flatten().find_map(|key| {
            let key = digest_of(key);
            self.by_key.get(&key).map(|n| Client { tenant: &self.all[*n], key })
        });
        known.map(Some).ok_or_else(ApiError::unauthorized)
    }
}

/// Credentials of `Authorization: Bearer`.
#[must_use]
pub(crate) fn bearer_key(authorization: &HeaderValue) -> Option<&[u8]> {
    let (scheme, key) = authorization.as_bytes().split_at_checked("Bearer ".len())?;
    let key = key.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"Bearer ") && !key.is_empty()).then_some(key)
}

fn digest_of(key: &[u8]) -> KeyId {
    let digest = digest::digest(&digest::SHA256, key);
    digest.as_ref().try_into().expect("SHA-256 digests have 32 bytes")
}

fn hex(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from_digit(u32::from(value), 16).expect("a nibble is below 16");
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::access::TokenUse;
    use crate::settings::Secret;

    fn settings(name: &str) -> TenantSettings {
        let policy_class = Some(format!("{name}-class"));
        TenantSettings {
            name: name.to_owned(),
            keys_file: "keys".into(),
            policy_class,
            strict_priority_max: 3,
            ..TenantSettings::default()
        }
    }

    fn tenants() -> Tenants {
        let keys = [&["a-key-0123456789", "a-key-9876543210"][..], &["b-key-0123456789"]];
        let secrets = Secrets {
            salt_secret: Some(Secret::new("0123456789abcdef")),
            tenant_keys: keys.iter().map(|keys| keys.iter().map(|key| Secret::new(*key)).collect()).collect(),
            ..Secrets::default()
        };
        Tenants::new(&[settings("acme"), settings("b")], &secrets)
    }

    fn identify<'a>(tenants: &'a Tenants, authorization: &[u8]) -> Result<Option<Client<'a>>, ApiError> {
        tenants.identify(Some(&HeaderValue::from_bytes(authorization).expect("a header")), None)
    }

    /// HMAC-SHA256 by another implementation (Python's `hmac`) over the length of the name in eight bytes, the name, 0
    /// or 1, and the client's salt; truncated to 16 bytes.
    #[test]
    fn salts_are_known_answers() {
        let tenants = tenants();
        let salts = [None, Some(""), Some("s")].map(|salt| tenants.all[0].salt(salt));
        assert_eq!(salts, ACME_SALTS);
    }

    const ACME_SALTS: [&str; 3] =
        ["d3f4b5a470a92213b1e4375daef8f2d8", "2774abe2dd10adc812c375780daeba7a", "5df92e03937d75b01bc85a5cd4167c55"];

    #[test]
    fn no_two_tenants_share_a_salt() {
        let secrets = Secrets { salt_secret: Some(Secret::new("0123456789abcdef")), ..Secrets::default() };
        let names = ["a", "ab", "a\u{1}", "a\u{1}b", "A"];
        let tenants = Tenants::new(&names.map(settings), &secrets);
        let own = [None, Some(""), Some("b"), Some("\u{1}b"), Some("bb")];
        let mut salts: Vec<String> = tenants.all.iter().flat_map(|tenant| own.map(|salt| tenant.salt(salt))).collect();
        assert!(salts.iter().all(|salt| salt.len() == 2 * SALT_BYTES));
        salts.sort();
        salts.dedup();
        assert_eq!(salts.len(), names.len() * own.len());
        let other = Secrets { salt_secret: Some(Secret::new("0123456789abcdeF")), ..Secrets::default() };
        let other = Tenants::new(&[settings("a")], &other);
        assert!(!salts.contains(&other.all[0].salt(None)), "the salt depends on the secret");
    }

    #[test]
    fn a_reload_keeps_the_usage_of_a_tenant() {
        let secrets = Secrets {
            salt_secret: Some(Secret::new("0123456789abcdef")),
            tenant_keys: vec![vec![Secret::new("a-key-0123456789")]],
            ..Secrets::default()
        };
        let limited = |max| [TenantSettings { tokens_per_day: Some(max), ..settings("acme") }];
        let tenants = Tenants::new(&limited(100), &secrets);
        let admit = |tenants: &Tenants| {
            let mut lease = identify(tenants, b"Bearer a-key-0123456789").expect("known").expect("a tenant").admit()?;
            lease.charge(Some(90), 0, None)?;
            lease.settle(Some(TokenUse { prompt: Some(90), ..TokenUse::default() }));
            Ok::<(), ApiError>(())
        };
        assert_eq!(admit(&tenants), Ok(()));
        assert_eq!(admit(&tenants).map_err(|error| error.code), Err("quota_exceeded"));
        let tenants = tenants.reloaded(&limited(185), &secrets);
        assert_eq!(admit(&tenants), Ok(()), "95 tokens are left");
        assert_eq!(admit(&tenants).map_err(|error| error.code), Err("quota_exceeded"));
        assert!(tenants.reloaded(&[], &Secrets::default()).is_empty());
    }

    #[test]
    fn debug_output_hides_secrets() {
        let shown = format!("{:?}", tenants());
        assert!(!shown.contains("0123456789"), "{shown}");
    }
}
