//! Local copy of a watched set of objects.

use std::collections::BTreeMap;

/// Change of a watched set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReflectedEvent<T> {
    /// A new list begins, at the start of a watch or after its expiry.
    ListStarted,
    /// One object of the list.
    Listed(String, T),
    /// End of the list.
    ListDone,
    /// An object has been added or changed.
    Applied(String, T),
    /// An object has been deleted.
    Deleted(String),
}

/// Objects by name. A list replaces the set at its end, so an incomplete list removes nothing.
///
/// ```
/// use pointsman::internals::discovery::{ReflectedEvent, ReflectedSet};
///
/// let mut set = ReflectedSet::default();
/// set.apply(ReflectedEvent::Listed("a".to_owned(), 1));
/// assert!(!set.is_complete());
/// set.apply(ReflectedEvent::ListDone);
/// assert_eq!(set.objects().values().collect::<Vec<_>>(), [&1]);
/// ```
#[derive(Clone, Debug)]
pub struct ReflectedSet<T> {
    objects: BTreeMap<String, T>,
    listing: BTreeMap<String, T>,
    is_complete: bool,
}

impl<T> Default for ReflectedSet<T> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), listing: BTreeMap::new(), is_complete: false }
    }
}

impl<T> ReflectedSet<T> {
    /// The objects of the last complete list, with all later changes.
    #[must_use]
    pub fn objects(&self) -> &BTreeMap<String, T> {
        &self.objects
    }

    /// Whether a list has been completed.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Applies a change.
    pub fn apply(&mut self, event: ReflectedEvent<T>) {
        match event {
            ReflectedEvent::ListStarted => self.listing.clear(),
            ReflectedEvent::Listed(name, object) => drop(self.listing.insert(name, object)),
            ReflectedEvent::ListDone => {
                self.objects = std::mem::take(&mut self.listing);
                self.is_complete = true;
            }
            ReflectedEvent::Applied(name, object) => drop(self.objects.insert(name, object)),
            ReflectedEvent::Deleted(name) => drop(self.objects.remove(&name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A step of the server or of the connection to it.
    #[derive(Clone, Debug)]
    enum Step {
        Put(u8, u32),
        Delete(u8),
        /// Changes without a connection, then an incomplete list, then a complete one.
        Relist(Vec<(u8, Option<u32>)>, usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        let change = (0..6_u8, proptest::option::of(any::<u32>()));
        prop_oneof![
            (0..6_u8, any::<u32>()).prop_map(|(name, value)| Step::Put(name, value)),
            (0..6_u8).prop_map(Step::Delete),
            (proptest::collection::vec(change, 0..4), 0..4_usize).prop_map(|(missed, cut)| Step::Relist(missed, cut)),
        ]
    }

    proptest! {
        #[test]
        fn the_reflected_set_is_the_set_of_the_server(steps in proptest::collection::vec(step(), 0..40)) {
            let (mut server, mut set) = (BTreeMap::<String, u32>::new(), ReflectedSet::default());
            set.apply(ReflectedEvent::ListDone);
            for step in steps {
                match step {
                    Step::Put(name, value) => {
                        server.insert(name.to_string(), value);
                        set.apply(ReflectedEvent::Applied(name.to_string(), value));
                    }
                    Step::Delete(name) => {
                        server.remove(&name.to_string());
                        set.apply(ReflectedEvent::Deleted(name.to_string()));
                    }
                    Step::Relist(missed, cut) => {
                        let before = set.objects().clone();
                        for (name, value) in missed {
                            match value {
                                Some(value) => drop(server.insert(name.to_string(), value)),
                                None => drop(server.remove(&name.to_string())),
                            }
                        }
                        for length in [cut, server.len()] {
                            prop_assert_eq!(set.objects(), &before, "an incomplete list changes nothing");
                            set.apply(ReflectedEvent::ListStarted);
                            for (name, value) in server.iter().take(length) {
                                set.apply(ReflectedEvent::Listed(name.clone(), *value));
                            }
                        }
                        set.apply(ReflectedEvent::ListDone);
                    }
                }
                prop_assert_eq!(set.objects(), &server);
            }
        }
    }
}
