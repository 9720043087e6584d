//! HTTP server with a response per path, for tests of probes and polls.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

/// Bodies by path. All other paths return 404.
#[derive(Clone, Default)]
pub(crate) struct Pages(Arc<Mutex<BTreeMap<&'static str, String>>>);

impl Pages {
    /// Starts the server. Returns its URL.
    pub(crate) async fn serve(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let pages = self.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    let Ok(byte) = stream.read_u8().await else { break };
                    request.push(byte);
                }
                let request = String::from_utf8_lossy(&request);
                let (status, body) = match pages.get(request.split(' ').nth(1).unwrap_or_default()) {
                    Some(body) => ("200 OK", body),
                    None => ("404 Not Found", String::new()),
                };
                let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        url
    }

    pub(crate) fn get(&self, path: &str) -> Option<String> {
        self.0.lock().expect("no panic").get(path).cloned()
    }

    pub(crate) fn set(&self, path: &'static str, body: impl Into<String>) {
        self.0.lock().expect("no panic").insert(path, body.into());
    }

    pub(crate) fn remove(&self, path: &str) {
        self.0.lock().expect("no panic").remove(path);
    }
}
