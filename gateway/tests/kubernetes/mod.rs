//! Workers of pods: the gateway process, with a kubeconfig file, against an API server in memory.
//!
//! Only Linux has all addresses 127.0.0.0/8, which the pods of these tests use.
#![cfg(all(target_os = "linux", feature = "kubernetes"))]

mod access;
mod api_server;
mod cluster;
mod drills;
mod kubectl;
mod property;
mod selector;
