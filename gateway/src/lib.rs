//! Library of the `pointsman` command.
//!
//! [`serve`] is the gateway, [`settings`] its configuration, and [`anthropic`], [`handover`], [`migration`], [`openai`], [`prompt`], [`quota`],
//! [`replicas`] and [`upstream`] are its parts. The command line is in `main`.

pub mod anthropic;
pub mod handover;
#[cfg(test)]
mod hostile;
pub mod live;
pub mod migration;
pub mod openai;
pub mod prompt;
pub mod quota;
pub mod replay;
pub mod replicas;
pub mod serve;
pub mod settings;
pub mod upstream;
