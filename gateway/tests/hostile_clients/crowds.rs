//! Deliberately slow clients, alone and in large numbers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::scene::{BODY_BYTES_MAX, MIB, Scene, head, repeated};
use crate::common::proxy::{self, Act, Scripted, gateway, until};
use crate::faults::{Client, expect_idle, settings};

/// Hundreds of clients send a partial request and then stall: they use little memory and are disconnected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_clients_use_little_memory_and_time_out() {
    const CROWD: usize = 300;
    alone!();
    let scene = Scene::set().await;
    scene.peak.reset();
    let announced = head(&format!("content-length: {BODY_BYTES_MAX}\r\n")) + "{\"model\"";
    let half = &announced[..announced.len() / 2];
    let mut crowd = Vec::new();
    for n in 0..CROWD {
        let mut client = Client::connect(scene.gateway.address()).await;
        assert!(client.write(if n % 2 == 0 { announced.as_str() } else { half }).await);
        crowd.push(client);
    }
    for (n, client) in crowd.into_iter().enumerate() {
        match client.answer().await {
            Some(answer) => assert!(answer.status == 408, "{n}: {answer:?}"),
            None => assert!(n % 2 == 1, "{n}"),
        }
    }
    let most = scene.peak.most();
    // The announced total is 600 MiB.
    assert!(most < CROWD * (64 << 10) + 16 * MIB, "{most} bytes");
    assert!(scene.reached().is_empty());
    scene.finish().await;
}

/// Memory for clients that do not read is bounded by socket buffers, however much a worker sends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_read_nothing_use_little_memory() {
    const CROWD: usize = 20;
    alone!();
    let scene = Scene::set().await;
    let chunk = [b"10000\r\n".as_slice(), &[b'x'; 0x10000], b"\r\n"].concat();
    let event = proxy::chunk(proxy::EVENT);
    let endless = vec![proxy::chunked_head(), event, Act::Flood(chunk)];
    let worker = Scripted::responding_with(endless).await;
    let gateway = gateway(settings(&[worker.url()])).await;
    scene.peak.reset();
    let mut crowd = Vec::new();
    for _ in 0..CROWD {
        crowd.push(Client::ask(&gateway).await);
    }
    // Waits until the worker's writes stall. Stopping too early can only measure less memory.
    let (mut flooded, mut unchanged) = (0, 0);
    while unchanged < 10 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        let now = worker.seen(|seen| seen.flooded);
        unchanged = if now == flooded && now > 0 { unchanged + 1 } else { 0 };
        flooded = now;
    }
    let most = scene.peak.most();
    assert!(most < CROWD * (512 << 10) + 16 * MIB, "{most} bytes of {flooded}");
    drop(crowd);
    worker.wait_until_closed().await;
    expect_idle(&gateway).await;
    scene.finish().await;
}

/// A client sends its head byte by byte. The head timeout is absolute: received bytes do not extend it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trickled_heads_time_out() {
    alone!();
    let scene = Scene::set().await;
    let client = Client::connect(scene.gateway.address()).await;
    let (mut reads, mut writes) = client.stream.into_split();
    let is_cut = Arc::new(AtomicBool::new(false));
    let finish = Arc::clone(&is_cut);
    let trickle = tokio::spawn(async move {
        let bytes = head(&repeated("x: ", "x", 50_000, "\r\n"));
        for byte in bytes.as_bytes().chunks(1) {
            if finish.load(Ordering::Relaxed) || tokio::io::AsyncWriteExt::write_all(&mut writes, byte).await.is_err() {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(5)).await; // the complete head would take more than four minutes
        }
        false
    });
    let mut rest = Vec::new();
    let ended = tokio::io::AsyncReadExt::read_to_end(&mut reads, &mut rest);
    let _ = tokio::time::timeout(proxy::PATIENCE, ended).await.expect("connection closed before the timeout");
    is_cut.store(true, Ordering::Relaxed);
    assert!(trickle.await.expect("task ends without panic"), "the whole head was read");
    until("only the well-behaved client is connected", || scene.reached().is_empty()).await;
    scene.finish().await;
}
