//! HTTP client for completions at engines.
//!
//! It keeps one connection per engine. Each call returns a response or the failure within [`PATIENCE`]. It supports
//! only the HTTP that the engines use.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use pointsman::health::Outcome;
use serde_json::{Value as Json, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::workload::WorkloadRequest;

/// Limit of every wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

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
        let answer = self.exchange(engine, (head + &body).as_bytes()).await?;
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        Ok(u32::try_from(cached.expect("usage reports cached tokens")).expect("a prompt's tokens"))
    }

    /// Resets the cache of an engine.
    pub(crate) async fn reset_cache(&mut self, engine: SocketAddr) -> Result<(), Outcome> {
        let request = "POST /reset_prefix_cache HTTP/1.1\r\nhost: engine\r\ncontent-length: 0\r\n\r\n";
        self.exchange(engine, request.as_bytes()).await.map(drop)
    }

    async fn exchange(&mut self, engine: SocketAddr, request: &[u8]) -> Result<Json, Outcome> {
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

    async fn exchange_on(
        &mut self,
        engine: SocketAddr,
        mut stream: TcpStream,
        request: &[u8],
    ) -> Result<Json, Outcome> {
        let exchange = async {
            stream.write_all(request).await.map_err(|_| Outcome::Reset)?;
            answer(&mut stream).await
        };
        let answer = timeout(PATIENCE, exchange).await.map_err(|_| Outcome::Timeout)??;
        self.open.insert(engine, stream);
        Ok(answer)
    }
}

async fn answer(stream: &mut TcpStream) -> Result<Json, Outcome> {
    let mut bytes = Vec::with_capacity(1024);
    loop {
        if let Some(head_len) = bytes.windows(4).position(|end| end == b"\r\n\r\n") {
            let head = str::from_utf8(&bytes[..head_len]).expect("a head is text").to_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = length.and_then(|length| length.parse().ok()).expect("responses have a content length");
            if let Some(body) = bytes.get(head_len + 4..head_len + 4 + length) {
                if head.starts_with("http/1.1 5") {
                    return Err(Outcome::ServerError);
                }
                assert!(head.starts_with("http/1.1 200"), "{head}\n{}", String::from_utf8_lossy(body));
                let body = if body.is_empty() { b"null" } else { body };
                return Ok(serde_json::from_slice(body).expect("responses are JSON"));
            }
        }
        if stream.read_buf(&mut bytes).await.map_err(|_| Outcome::Reset)? == 0 {
            return Err(Outcome::Reset);
        }
    }
}
