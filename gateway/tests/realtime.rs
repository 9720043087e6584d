//! WebSockets through the gateway, to a worker that echoes in upper case.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::common::proxy::{at_rest, gateway, get, settings, worker};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn websockets_are_piped_to_one_worker() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let engine = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a connection");
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.expect("a head"));
        }
        let switched = "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-accept: k\r\n\r\n";
        stream.write_all(switched.as_bytes()).await.expect("written");
        let mut bytes = [0; 64];
        while let Ok(length @ 1..) = stream.read(&mut bytes).await {
            stream.write_all(&bytes[..length].to_ascii_uppercase()).await.expect("written");
        }
        String::from_utf8(head).expect("text")
    });
    let gateway = gateway(settings(vec![worker(1, &url, 1)])).await;
    let mut client = TcpStream::connect(gateway.address()).await.expect("a connection");
    let head = "GET /v1/realtime?model=mock HTTP/1.1\r\nhost: g\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\n\
                sec-websocket-key: k\r\nsec-websocket-version: 13\r\n\r\n";
    client.write_all(head.as_bytes()).await.expect("written");
    let mut response = Vec::new();
    while !response.ends_with(b"\r\n\r\n") {
        response.push(client.read_u8().await.expect("a response"));
    }
    let response = String::from_utf8(response).expect("text").to_lowercase();
    assert!(response.starts_with("http/1.1 101 ") && response.contains("sec-websocket-accept: k"), "{response}");
    let router = gateway.router("mock").expect("model is served");
    for text in ["hello", "again"] {
        client.write_all(text.as_bytes()).await.expect("written");
        let mut echoed = [0; 5];
        client.read_exact(&mut echoed).await.expect("an echo");
        assert_eq!(echoed, *text.to_uppercase().as_bytes());
        assert_eq!(router.health().leases, 1, "the booking lasts");
    }
    drop(client);
    at_rest(&gateway).await;
    let head = engine.await.expect("no panic").to_lowercase();
    assert!(head.starts_with("get /v1/realtime?model=mock http/1.1\r\n"), "{head}");
    for header in ["upgrade: websocket", "connection: upgrade", "sec-websocket-key: k", "sec-websocket-version: 13"] {
        assert!(head.contains(header), "{header} in {head}");
    }
    // Without a worker the handshake has an error.
    let refused = get(&gateway, "/v1/realtime?model=none").await;
    assert_eq!((refused.status, refused.code().as_str()), (404, "model_not_found"));
}
