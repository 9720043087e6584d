//! HTTP client for completions at engines.
//!
//! It keeps one connection per engine. Each call returns a response or the failure.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use pointsman::Outcome;
use serde_json::{Value as Json, json};
use tokio::net::TcpStream;

use super::proxy::kept;
use super::workload::WorkloadRequest;

/// Kept connections.
#[derive(Default)]
pub(crate) struct Client {
    open: BTreeMap<SocketAddr, TcpStream>,
}

impl Client {
    /// Completes a prompt on a rank. Returns the number of cached tokens.
    pub(crate) async fn complete(
        &mut self,
        engine: SocketAddr,
        rank: u32,
        request: &WorkloadRequest,
    ) -> Result<u32, Outcome> {
        let mut body = json!({ "prompt": request.tokens, "max_tokens": request.output_tokens });
        if let Some(name) = request.lora_name {
            body["model"] = name.into();
        }
        if let Some(salt) = request.cache_salt {
            body["cache_salt"] = salt.into();
        }
        let body = body.to_string();
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: engine\r\nx-data-parallel-rank: {rank}\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        let answer = self.exchange(engine, &(head + &body)).await?;
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        Ok(u32::try_from(cached.expect("usage reports cached tokens")).expect("a prompt's tokens"))
    }

    /// Sends a command without a body, such as `/reset_prefix_cache`.
    pub(crate) async fn command(&mut self, engine: SocketAddr, path: &str) -> Result<(), Outcome> {
        let request = format!("POST {path} HTTP/1.1\r\nhost: engine\r\ncontent-length: 0\r\n\r\n");
        self.exchange(engine, &request).await.map(drop)
    }

    async fn exchange(&mut self, engine: SocketAddr, request: &str) -> Result<Json, Outcome> {
        if let Some(stream) = self.open.remove(&engine) {
            // The engine may have closed a kept connection.
            if let Ok(answer) = self.exchange_on(engine, stream, request).await {
                return Ok(answer);
            }
        }
        let stream = TcpStream::connect(engine).await.map_err(|_| Outcome::ConnectFailed)?;
        let _ = stream.set_nodelay(true);
        self.exchange_on(engine, stream, request).await
    }

    async fn exchange_on(&mut self, engine: SocketAddr, mut stream: TcpStream, request: &str) -> Result<Json, Outcome> {
        let answer = kept(&mut stream, request).await.map_err(|_| Outcome::Reset)?;
        if answer.status >= 500 {
            return Err(Outcome::ServerError);
        }
        assert_eq!(answer.status, 200, "{answer:?}");
        self.open.insert(engine, stream);
        Ok(if answer.body.is_empty() { Json::Null } else { answer.json() })
    }
}
