//! The default port of vLLM's KV event publisher.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;
use crate::zmtp::subscriber_hello;

const PATIENCE: Duration = Duration::from_secs(60);

/// Number of the only rank of the engine.
const RANK: u32 = 3;

const CLOSES: u8 = 0;
const PUBLISHES: u8 = 1;
const IS_SILENT: u8 = 2;

/// Address of a vLLM engine.
async fn engine() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") && stream.read_buf(&mut request).await.is_ok_and(|n| n > 0) {}
                let (status, body) = match request.split(|byte| *byte == b' ').nth(1) {
                    Some(b"/v1/models") => (200, "{\"data\":[{\"id\":\"mock\"}]}".to_owned()),
                    Some(b"/metrics") => {
                        let labels = format!("block_size=\"16\",engine=\"{RANK}\",num_gpu_blocks=\"100\"");
                        (200, format!("vllm:cache_config_info{{{labels}}} 1.0\n"))
                    }
                    _ => (404, String::new()),
                };
                let head =
                    format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
                let _ = stream.write_all(format!("{head}{body}").as_bytes()).await;
            });
        }
    });
    format!("http://{address}")
}

/// Port at which connections are treated by the mode.
async fn publisher(mode: Arc<AtomicU8>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mode = mode.load(Ordering::Relaxed);
            tokio::spawn(async move {
                if mode == PUBLISHES {
                    let mut hello = subscriber_hello();
                    let last = hello.len() - 3;
                    hello[last..].copy_from_slice(b"PUB");
                    let _ = stream.write_all(&hello).await;
                }
                if mode != CLOSES {
                    let _ = stream.read_to_end(&mut Vec::new()).await;
                }
            });
        }
    });
    port
}

#[tokio::test]
async fn a_publisher_at_the_default_port_is_used_while_it_is_there() {
    let mode = Arc::new(AtomicU8::new(CLOSES));
    let (url, port) = (engine().await, publisher(Arc::clone(&mode)).await);
    let config = RouterConfig { block_size: Some(16), ..RouterConfig::default() };
    let options = ProbeOptions { timeout: PATIENCE, finds_publishers: true, ..ProbeOptions::of(&config) };
    let mut prober = Prober::new(options);
    let id = WorkerId(1);
    let worker = NamedWorker::at(&url, &WorkerConfig::at("")).map(NamedWorker::probed).expect("an address");
    let workers = [NamedWorker { id: Some(id), ..worker }];
    let endpoints = |port: u16| KvEventsConfig {
        endpoint: format!("tcp://127.0.0.1:{port}"),
        replay_endpoint: None,
        topic: String::new(),
    };
    let default = BTreeMap::from([(id, FirstRankEvents::IfPublished(endpoints(port)))]);
    let base = endpoints(port - u16::try_from(RANK).expect("small"));

    let found = |(mut complete, errors): (Vec<(Option<WorkerId>, WorkerConfig)>, Vec<EngineError>)| {
        assert_eq!(errors, []);
        complete.pop().expect("one worker").1.kv_events
    };
    assert_eq!(found(prober.ask_with(&workers, &default).await), None, "no greeting");
    mode.store(PUBLISHES, Ordering::Relaxed);
    assert_eq!(found(prober.ask_with(&workers, &default).await), Some(base.clone()), "a publisher");
    mode.store(IS_SILENT, Ordering::Relaxed);
    prober.options.timeout = Duration::from_millis(50);
    let (complete, _) = prober.ask_with(&workers, &default).await;
    assert_eq!(complete[0].1.kv_events, Some(base.clone()), "a timeout keeps the last result");
    mode.store(CLOSES, Ordering::Relaxed);
    prober.options.timeout = PATIENCE;
    assert_eq!(found(prober.ask_with(&workers, &default).await), None, "no greeting any more");

    let given = BTreeMap::from([(id, FirstRankEvents::Given(endpoints(port)))]);
    assert_eq!(found(prober.ask_with(&workers, &given).await), Some(base), "configured ports are not checked");
    mode.store(PUBLISHES, Ordering::Relaxed);
    prober.options.finds_publishers = false;
    assert_eq!(found(prober.ask_with(&workers, &default).await), None, "the router reads no events");
}
