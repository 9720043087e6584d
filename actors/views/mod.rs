//! Views: plain data that one owner publishes and other actors and the handle read without a message.

pub(crate) mod kv_source;
pub(crate) mod worker;
