//! Compressed request bodies.

use std::io::Write as _;

use serde_json::json;

use crate::common::proxy::{Scripted, answer, gateway, request, settings, worker};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compressed_bodies_reach_workers_uncompressed() {
    let scripted = Scripted::start(|_| answer("200 OK", "{\"a\":1}")).await;
    let gateway = gateway(settings(vec![worker(1, &scripted.url(), 1)])).await;
    let body = json!({ "model": "mock", "documents": vec!["text"; 1000] }).to_string();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(body.as_bytes()).expect("written to memory");
    let compressed = encoder.finish().expect("written to memory");
    let served = request(gateway.address(), "POST", "/v1/rerank", "content-encoding: gzip\r\n", &compressed).await;
    assert_eq!(served.status, 200, "{served:?}");
    let got = scripted.requests().pop().expect("a request");
    assert_eq!((got.text(), got.header("content-encoding")), (body.as_str(), None));
    let compressed = ruzstd::encoding::compress_to_vec(body.as_bytes(), ruzstd::encoding::CompressionLevel::Fastest);
    let served = request(gateway.address(), "POST", "/v1/rerank", "content-encoding: zstd\r\n", &compressed).await;
    assert_eq!(served.status, 200, "{served:?}");
    assert_eq!(scripted.requests().pop().expect("a request").text(), body);
    let refused = request(gateway.address(), "POST", "/v1/rerank", "content-encoding: br\r\n", &compressed).await;
    assert_eq!((refused.status, refused.code().as_str()), (415, "unsupported_coding"));
    assert_eq!(refused.header("accept-encoding"), Some("gzip, deflate, zstd"));
}
