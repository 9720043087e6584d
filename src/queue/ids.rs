//! Identifiers of classes, lanes and tenants, and the depth of a class.

use xxhash_rust::xxh3::xxh3_64;

use crate::protocol::Timestamp;

/// A class, by its position in [`Queue::classes`](super::Queue::classes).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassId(pub u32);

impl ClassId {
    pub(super) fn at(position: usize) -> Self {
        Self(u32::try_from(position).expect("the number of configured classes fits u32"))
    }

    pub(super) fn position(self) -> usize {
        self.0 as usize
    }
}

/// Identifies a set of eligible ranks: requests of a class with the same key share a lane. 0 represents all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneKey(pub u64);

/// Identifies a customer: requests of a class with the same key share one fair share. 0 represents requests without a
/// customer. Customers with colliding keys share one share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantKey(pub u64);

impl TenantKey {
    /// The key of a tenant's name.
    ///
    /// ```
    /// use pointsman::internals::queue::TenantKey;
    ///
    /// assert_eq!(TenantKey::of("acme"), TenantKey::of("acme"));
    /// assert_ne!(TenantKey::of("acme"), TenantKey::default());
    /// ```
    #[must_use]
    pub fn of(name: &str) -> Self {
        Self(xxh3_64(name.as_bytes()))
    }
}

/// Number and size of the waiting requests of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    /// Requests.
    pub requests: u64,
    /// Their prompt tokens.
    pub raw_tokens: u64,
    /// Prompt tokens that are cached on the best eligible rank.
    pub cached_tokens: u64,
    /// The earliest arrival.
    pub oldest: Option<Timestamp>,
}
