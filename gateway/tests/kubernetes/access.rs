//! Certificates and credentials of the client: kubeconfig files, and the service account of a pod.

use std::path::PathBuf;
use std::process::Stdio;

use serde_json::{Value, json};
use tokio::process::Command;

use crate::common::authority::Authority;

use crate::common::directory::Directory;

use super::api_server::ApiServer;
use super::cluster::{NAMESPACE, TestPod, WatchingGateway, engines, settings};

const TOKEN: &str = "token-of-the-service-account";

/// The file with the certificate of an authority.
fn write(authority: &Authority, directory: &Directory) -> PathBuf {
    directory.write("ca.crt", authority.pem())
}

/// User of a kubeconfig with the client certificate.
fn certificate_of(authority: &Authority, directory: &Directory) -> serde_json::Value {
    let [certificate, key] = authority.client_pem();
    json!({
        "client-certificate": directory.write("client.crt", certificate),
        "client-key": directory.write("client.key", key),
    })
}

/// The settings of a model `m` with the pods of `app=engine`, and further lines.
fn model(port: u16, lines: &str) -> String {
    settings(&[("m", format!("selector = \"app=engine\"\nports = [{port}]\n{lines}"))])
}

/// A gateway with this user and authority in its kubeconfig.
async fn gateway(server: &ApiServer, authority: &Authority, user: User<'_>, port: u16) -> WatchingGateway {
    let directory = Directory::new();
    let ca = write(authority, &directory);
    let user = match user {
        User::Anonymous => json!({}),
        User::Token(token) => json!({ "token": token }),
        User::Certificate(of) => certificate_of(of, &directory),
    };
    directory.kubeconfig(&server.url(), &[("certificate-authority", &ca)], &user);
    WatchingGateway::start(directory, &model(port, "kubeconfig_file = \"kubeconfig\"")).await
}

enum User<'a> {
    Anonymous,
    Token(&'a str),
    Certificate(&'a Authority),
}

/// The error of the source with this text. A server that rejects a certificate closes the connection, and under TLS 1.3
/// the client may see the end before the reason. The next attempt of the watch shows the reason.
async fn refusal(gateway: &WatchingGateway, text: &str) -> String {
    let has_text = |source: &Value| source["last_error"].as_str().is_some_and(|error| error.contains(text));
    let source = gateway.until_source(&format!("an error with {text:?}"), has_text).await;
    assert!(gateway.workers("m").await.is_empty());
    source["last_error"].as_str().expect("a text").to_owned()
}

#[tokio::test]
async fn a_kubeconfig_has_authority_and_client_certificate() {
    let (authority, port, pod) = (Authority::new(), engines().await, TestPod::ready("e", "1", "127.0.3.1"));
    let server = ApiServer::start_with(Some(authority.acceptor(true))).await;
    server.put(pod.object());
    let known = gateway(&server, &authority, User::Certificate(&authority), port).await;
    known.until_workers("m", &pod.workers(&[port]), "with the certificate").await;
    let others = Authority::new();
    let anonymous = gateway(&server, &authority, User::Anonymous, port).await;
    refusal(&anonymous, "ertificate").await;
    let stranger = gateway(&server, &authority, User::Certificate(&others), port).await;
    refusal(&stranger, "").await;
    let misled = gateway(&server, &others, User::Certificate(&authority), port).await;
    refusal(&misled, "ertificate").await;
}

#[tokio::test]
async fn a_kubeconfig_has_a_bearer_token() {
    let (authority, port, pod) = (Authority::new(), engines().await, TestPod::ready("e", "1", "127.0.3.2"));
    let server = ApiServer::start_with(Some(authority.acceptor(false))).await;
    server.require_token(TOKEN);
    server.put(pod.object());
    let known = gateway(&server, &authority, User::Token(TOKEN), port).await;
    known.until_workers("m", &pod.workers(&[port]), "with the token").await;
    let stranger = gateway(&server, &authority, User::Token("another"), port).await;
    refusal(&stranger, "status 401").await;
}

#[tokio::test]
async fn a_damaged_kubeconfig_is_reported_and_read_again() {
    let (server, port, pod) = (ApiServer::start().await, engines().await, TestPod::ready("e", "1", "127.0.3.3"));
    server.put(pod.object());
    let directory = Directory::new();
    directory.write("kubeconfig", "clusters: 7");
    let gateway = WatchingGateway::start(directory, &model(port, "kubeconfig_file = \"kubeconfig\"")).await;
    let error = refusal(&gateway, "").await;
    assert!(error.starts_with("the Kubernetes client cannot be configured: /"), "{error}");
    assert!(error.contains("kubeconfig: "), "{error}");
    gateway.directory.kubeconfig(&server.url(), &[], &json!({}));
    gateway.until_workers("m", &pod.workers(&[port]), "repaired").await;
}

/// Runs a program with the files of the directory `$1` in place of those of the service account of a pod.
const AS_POD: &str = "mount -t tmpfs tmpfs /var/run && mkdir -p /var/run/secrets/kubernetes.io/serviceaccount \
                      && cp \"$1\"/* /var/run/secrets/kubernetes.io/serviceaccount && shift && exec \"$@\"";

/// The options of `unshare` for a mount namespace of its own, as this user may create it.
async fn mount_namespace() -> Option<&'static [&'static str]> {
    for options in [&["--user", "--map-root-user", "--mount"][..], &["--mount"]] {
        let mut probe = Command::new("unshare");
        probe.args(options).args(["mount", "-t", "tmpfs", "tmpfs", "/var/run"]);
        let probe = probe.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if probe.status().await.is_ok_and(|status| status.success()) {
            return Some(options);
        }
    }
    None
}

#[tokio::test]
async fn a_pod_uses_its_service_account() {
    let Some(options) = mount_namespace().await else {
        eprintln!("SKIPPED: unshare cannot create a mount namespace; service accounts were NOT tested");
        return;
    };
    let (authority, port, pod) = (Authority::new(), engines().await, TestPod::ready("e", "1", "127.0.3.4"));
    let server = ApiServer::start_with(Some(authority.acceptor(false))).await;
    server.require_token(TOKEN);
    server.put(pod.object());
    let (account, directory) = (Directory::new(), Directory::new());
    account.write("token", TOKEN);
    account.write("namespace", NAMESPACE);
    write(&authority, &account);
    let mut command = Command::new("unshare");
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", directory.path());
    command.env("KUBERNETES_SERVICE_HOST", "127.0.0.1");
    command.env("KUBERNETES_SERVICE_PORT", server.port().to_string());
    command.args(options).args(["sh", "-c", AS_POD, "sh"]).arg(account.path());
    command.args([env!("CARGO_BIN_EXE_pointsman"), "serve", "--log-format", "json"]);
    let gateway = WatchingGateway::start_as(command, directory, &model(port, "")).await;
    gateway.until_workers("m", &pod.workers(&[port]), "by the service account").await;
}
