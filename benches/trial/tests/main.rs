//! Integration tests of the trial tools, one module each.

#[cfg(feature = "mock")]
mod common;

mod engine_properties;
mod engine_scheduling;
mod engine_story;
mod generators;
#[cfg(feature = "mock")]
mod handover;
#[cfg(feature = "mock")]
mod mock_engine;
#[cfg(feature = "mock")]
mod mock_faults;
mod traces;
