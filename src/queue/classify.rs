//! Classification: maps requests to queue classes.
//!
//! Applies the rules for class names, families and prompt lengths. The result is deterministic, and unknown names are
//! rejected.

use crate::config::{QueueClass, RouterConfig, UncachedBucket};

use super::ids::ClassId;

/// The requested class does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("class is {0:?}, must be the name or the family of one of queue.classes")]
pub struct UnknownClass(
    /// The requested name.
    pub String,
);

#[derive(Debug)]
pub(super) struct Classifier {
    default_family: Option<String>,
    buckets: Box<[UncachedBucket]>,
}

impl Classifier {
    pub(super) fn new(config: &RouterConfig) -> Self {
        Self {
            default_family: config.queue.default_family.clone(),
            buckets: config.queue.uncached_buckets.as_slice().into(),
        }
    }

    /// See [`Queue::class_of`](super::Queue::class_of).
    pub(super) fn class_of(
        &self,
        classes: &[QueueClass],
        name: Option<&str>,
        uncached_tokens: u32,
    ) -> Result<ClassId, UnknownClass> {
        let Some(name) = name else {
            let family = self.default_family.as_deref();
            return Ok(family
                .and_then(|family| self.of_family(classes, family, uncached_tokens))
                .unwrap_or(ClassId(0)));
        };
        let named = classes.iter().position(|class| class.name == name).map(ClassId::at);
        named.or_else(|| self.of_family(classes, name, uncached_tokens)).ok_or_else(|| UnknownClass(name.to_owned()))
    }

    fn of_family(&self, classes: &[QueueClass], family: &str, uncached_tokens: u32) -> Option<ClassId> {
        let bucket = self.buckets.iter().rfind(|bucket| bucket.min_tokens <= uncached_tokens);
        let bucket = bucket.map(|bucket| bucket.bucket.as_str());
        let in_family = |class: &QueueClass| class.family.as_deref() == Some(family);
        classes
            .iter()
            .position(|class| in_family(class) && bucket.is_some() && class.bucket.as_deref() == bucket)
            .or_else(|| classes.iter().position(in_family))
            .map(ClassId::at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::queue::QueueConfig;

    fn class_of(config: &RouterConfig, name: Option<&str>, uncached_tokens: u32) -> Result<String, UnknownClass> {
        let classes = config.queue.classes_or_default();
        let class = Classifier::new(config).class_of(&classes, name, uncached_tokens)?;
        Ok(classes[class.0 as usize].name.clone())
    }

    fn config(default_family: Option<&str>) -> RouterConfig {
        let class = |name: &str, family: &str, bucket: Option<&str>| QueueClass {
            family: Some(family.to_owned()),
            bucket: bucket.map(str::to_owned),
            ..QueueClass::named(name)
        };
        let bucket = |min_tokens, bucket: &str| UncachedBucket { min_tokens, bucket: bucket.to_owned() };
        RouterConfig {
            queue: QueueConfig {
                classes: vec![
                    class("chat-warm", "chat", Some("short")),
                    class("chat-cold", "chat", Some("long")),
                    class("batch", "offline", Some("short")),
                    class("chat", "offline", None),
                ],
                default_family: default_family.map(str::to_owned),
                uncached_buckets: vec![bucket(0, "short"), bucket(1000, "long")],
                ..QueueConfig::default()
            },
            ..RouterConfig::default()
        }
    }

    #[test]
    fn classes_are_selected_by_name_family_and_length() {
        let config = config(Some("offline"));
        config.validate().unwrap();
        for (name, uncached_tokens, expected) in [
            (Some("chat-cold"), 0, "chat-cold"), // its own name, independent of the length
            (Some("chat"), 0, "chat"),           // class names take precedence over families
            (Some("offline"), 999, "batch"),     // family, by length
            (Some("offline"), 1000, "batch"),    // no class for this length: the first class of the family
            (None, 5000, "batch"),               // default family
        ] {
            assert_eq!(class_of(&config, name, uncached_tokens).unwrap(), expected, "{name:?} {uncached_tokens}");
        }
        let mut config = self::config(None);
        config.queue.classes.pop();
        assert_eq!(class_of(&config, Some("chat"), 999).unwrap(), "chat-warm");
        assert_eq!(class_of(&config, Some("chat"), 1000).unwrap(), "chat-cold");
        assert_eq!(class_of(&config, None, 5000).unwrap(), "chat-warm", "no default family: the first class");
        assert_eq!(class_of(&RouterConfig::default(), None, 7).unwrap(), "default");
    }

    #[test]
    fn unknown_names_are_rejected() {
        let refused = class_of(&config(None), Some("chatt"), 0).unwrap_err();
        let text = "class is \"chatt\", must be the name or the family of one of queue.classes";
        assert_eq!(refused.to_string(), text);
        assert_eq!(class_of(&RouterConfig::default(), Some(""), 0), Err(UnknownClass(String::new())));
    }
}
