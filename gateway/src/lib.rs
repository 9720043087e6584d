//! What the `pointsman` command is made of and other members test against.
//!
//! Owns [`serve`]: the gateway; [`settings`]: what an operator sets; [`openai`], [`prompt`] and [`upstream`]: its parts;
//! [`mock`]: an engine without a GPU; and [`demo`]: both at work. The command line is `main`'s.

pub mod demo;
pub mod mock;
pub mod openai;
pub mod prompt;
pub mod serve;
pub mod settings;
pub mod upstream;
