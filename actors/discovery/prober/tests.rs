//! The default port of vLLM's KV event publisher, and slow pages.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;
use crate::protocol::KvEventsConfig;
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
    let _ = prober.ask_with(&workers, &default).await; // the earlier connection may still be open
    assert_eq!(found(prober.ask_with(&workers, &default).await), None, "no greeting any more");

    let given = BTreeMap::from([(id, FirstRankEvents::Given(endpoints(port)))]);
    assert_eq!(found(prober.ask_with(&workers, &given).await), Some(base), "configured ports are not checked");
    mode.store(PUBLISHES, Ordering::Relaxed);
    prober.options.finds_publishers = false;
    assert_eq!(found(prober.ask_with(&workers, &default).await), None, "the router reads no events");
}

/// A vLLM engine whose pages are released one by one.
#[derive(Debug, Default)]
struct SlowEngine {
    /// Requested paths, in order.
    requested: Mutex<Vec<String>>,
    /// Paths that respond only after a release.
    slow: &'static [&'static str],
    released: tokio::sync::Notify,
}

impl SlowEngine {
    fn times(&self, path: &str) -> usize {
        self.requested.lock().expect("no panic").iter().filter(|requested| *requested == path).count()
    }
}

impl EngineClient for SlowEngine {
    fn get(&self, request: EngineGet) -> crate::actors::io::BoxFuture<'_, Result<Vec<u8>, EngineHttpError>> {
        let path = request.url.trim_start_matches("http://e:80").to_owned();
        self.requested.lock().expect("no panic").push(path.clone());
        Box::pin(async move {
            if self.slow.contains(&path.as_str()) {
                self.released.notified().await;
            }
            match path.as_str() {
                "/v1/models" => Ok(b"{\"data\":[{\"id\":\"mock\"}]}".to_vec()),
                "/metrics" => Ok(b"vllm:cache_config_info{block_size=\"64\",num_gpu_blocks=\"100\"} 1.0\n".to_vec()),
                "/server_info" => Ok(b"{\"page_size\":64,\"dp_size\":2,\"served_model_name\":\"mock\"}".to_vec()),
                _ => Err(EngineHttpError::Status(404)),
            }
        })
    }
}

fn prober_of(engine: &Arc<SlowEngine>) -> (Prober, [NamedWorker; 1]) {
    let options =
        ProbeOptions { client: Arc::<SlowEngine>::clone(engine), ..ProbeOptions::of(&RouterConfig::default()) };
    let worker = NamedWorker::at("http://e", &WorkerConfig::at("")).map(NamedWorker::probed).expect("an address");
    (Prober::new(options.model("mock")), [worker])
}

#[tokio::test(start_paused = true)]
async fn a_slow_page_delays_no_other_and_its_late_answer_counts() {
    let engine = Arc::new(SlowEngine { slow: &["/server_info"], ..SlowEngine::default() });
    let (mut prober, workers) = prober_of(&engine);
    for _ in 0..3 {
        let (complete, errors) = prober.ask(&workers).await;
        assert_eq!((complete.len(), errors), (1, vec![]), "the other pages suffice");
        assert_eq!((complete[0].1.total_kv_blocks, complete[0].1.data_parallel_size), (Some(100), 1));
    }
    assert_eq!((engine.times("/metrics"), engine.times("/server_info")), (3, 1), "the slow request goes on");
    engine.released.notify_one();
    let (complete, _) = prober.ask(&workers).await;
    let late = if complete[0].1.data_parallel_size == 2 { complete } else { prober.ask(&workers).await.0 };
    assert_eq!(late[0].1.data_parallel_size, 2, "its late answer");
}

#[tokio::test(start_paused = true)]
async fn the_requests_of_a_cancelled_round_go_on() {
    let engine = Arc::new(SlowEngine { slow: &["/v1/models"], ..SlowEngine::default() });
    let (mut prober, workers) = prober_of(&engine);
    let cut = Duration::from_millis(10);
    assert!(tokio::time::timeout(cut, prober.ask(&workers)).await.is_err(), "waits for the model list");
    engine.released.notify_one();
    let (complete, errors) = prober.ask(&workers).await;
    assert_eq!((complete.len(), errors, engine.times("/v1/models")), (1, vec![], 1));
}
