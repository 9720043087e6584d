//! A TCP server in front of an engine that records all requests, with or without TLS.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, copy, split};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

/// Received bytes, by connection.
type Received = Arc<Mutex<Vec<Vec<u8>>>>;

pub(crate) struct Front {
    address: SocketAddr,
    is_tls: bool,
    received: Received,
    task: JoinHandle<()>,
}

impl Front {
    pub(crate) async fn start(engine: SocketAddr, tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let (received, is_tls) = (Received::default(), tls.is_some());
        let all = Arc::clone(&received);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (tls, all) = (tls.clone(), Arc::clone(&all));
                tokio::spawn(async move {
                    match tls {
                        None => pass(stream, engine, &all).await,
                        // The client may reject the certificate.
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                pass(stream, engine, &all).await;
                            }
                        }
                    }
                });
            }
        });
        Self { address, is_tls, received, task }
    }

    pub(crate) fn url(&self) -> String {
        format!("{}://{}", if self.is_tls { "https" } else { "http" }, self.address)
    }

    /// All requests so far.
    pub(crate) fn requests(&self) -> String {
        let received = self.received.lock().expect("no panic");
        received.iter().map(|bytes| String::from_utf8_lossy(bytes)).collect()
    }

    /// Whether a request with this method and path has arrived.
    pub(crate) fn has(&self, method_and_path: &str) -> bool {
        self.requests().contains(&format!("{method_and_path} HTTP/1.1\r\n"))
    }

    /// Whether each request has this key, and none has another.
    pub(crate) fn has_only(&self, key: &str) -> bool {
        let requests = self.requests();
        let count = |text: &str| requests.matches(text).count();
        let all = count(" HTTP/1.1\r\n");
        all > 0 && count(&format!("authorization: Bearer {key}\r\n")) == all && count("authorization: ") == all
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn pass(client: impl AsyncRead + AsyncWrite, engine: SocketAddr, all: &Mutex<Vec<Vec<u8>>>) {
    let Ok(engine) = TcpStream::connect(engine).await else { return };
    let ((mut from_client, mut to_client), (mut from_engine, mut to_engine)) = (split(client), split(engine));
    let connection = {
        let mut all = all.lock().expect("no panic");
        all.push(Vec::new());
        all.len() - 1
    };
    let requests = async {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(n @ 1..) = from_client.read(&mut bytes).await {
            all.lock().expect("no panic")[connection].extend_from_slice(&bytes[..n]);
            if to_engine.write_all(&bytes[..n]).await.is_err() {
                break;
            }
        }
        let _ = to_engine.shutdown().await;
    };
    let responses = async {
        let _ = copy(&mut from_engine, &mut to_client).await;
        let _ = to_client.shutdown().await;
    };
    tokio::join!(requests, responses);
}
