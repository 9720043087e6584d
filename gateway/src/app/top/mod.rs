//! The command `pointsman top`: prints the state of a gateway, as the live page has it, and ends.
//!
//! The state is the first snapshot of the page's stream. `watch` repeats the command.

mod terminal;

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use http_body_util::{BodyExt as _, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, HOST};
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::app::top::terminal::{View, lines};
use crate::formats::live::LiveSnapshot;

/// Time limit of a connection and of its response head.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);

/// Maximum length of one event.
const EVENT_BYTES_MAX: usize = 8 << 20;

/// Path of the stream.
const PATH: &str = "/admin/live";

/// Path of the page, which an address from a browser may have.
const PAGE: &str = "/admin/page";

/// Arguments of `top`.
#[derive(Clone, Debug, Args)]
pub struct TopArgs {
    /// Address of the administration listener.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8081")]
    pub admin: String,
    /// File with the token of operators.
    #[arg(long, value_name = "FILE")]
    pub token_file: PathBuf,
    /// Shows only this model.
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// Maximum number of ranks per model.
    #[arg(long, value_name = "RANKS", default_value_t = 20)]
    pub ranks: usize,
}

/// Probable cause of a status, as the end of a message.
fn hint(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            ": --token-file must hold the token of operators (admin.token_file), and --admin name the listener that it is \
             for (admin.listen, port 8081 by default), not that of clients"
        }
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => {
            ": this is not the administration listener, which has a port of its own (admin.listen, 8081 by default)"
        }
        _ => "",
    }
}

/// Reads a token file like the gateway.
///
/// # Errors
/// A description of the failure.
pub fn read_token(path: &Path) -> Result<String, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

/// The state in lines of at most `width` characters.
///
/// # Errors
/// A description of the failure.
pub async fn page(args: &TopArgs, token: &str, width: usize) -> Result<String, String> {
    let snapshot = snapshot(&args.admin, token).await?;
    let model = args.model.as_deref();
    if let Some(name) = model.filter(|name| snapshot.models.iter().all(|model| model.name != *name)) {
        let known: Vec<&str> = snapshot.models.iter().map(|model| model.name.as_str()).collect();
        return Err(format!("the gateway has no model {name:?}; its models are {}", known.join(", ")));
    }
    Ok(lines(&snapshot, &View { width, ranks_max: args.ranks, model }).join("\n") + "\n")
}

fn failed(url: &str, error: impl Display) -> String {
    format!("{url} does not respond: {error}")
}

/// The first snapshot of the stream.
async fn snapshot(url: &str, token: &str) -> Result<LiveSnapshot, String> {
    let response = timeout(CONNECT_TIME_MAX, request(url, token)).await;
    let response = response.map_err(|_| failed(url, "no response in time"))??;
    let status = response.status();
    if status != StatusCode::OK {
        return Err(format!("{url} responds with status {status}{}", hint(status)));
    }
    let (mut body, mut buffered) = (response.into_body(), Vec::new());
    loop {
        if let Some(end) = buffered.windows(2).position(|two| two == b"\n\n") {
            let event: Vec<u8> = buffered.drain(..end + 2).collect();
            let data = event.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"data: "));
            let Some(data) = data else { continue };
            return serde_json::from_slice(data).map_err(|error| format!("the stream has an invalid event: {error}"));
        }
        if buffered.len() > EVENT_BYTES_MAX {
            return Err(format!("the stream has an event longer than {EVENT_BYTES_MAX} bytes"));
        }
        match body.frame().await {
            Some(Ok(frame)) => buffered.extend(frame.into_data().unwrap_or_default()),
            Some(Err(error)) => return Err(failed(url, error)),
            None => return Err(failed(url, "the stream has ended")),
        }
    }
}

async fn request(url: &str, token: &str) -> Result<Response<Incoming>, String> {
    let address = || format!("the address is {url:?}, must be http://HOST:PORT");
    let full = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    let uri: Uri = full.parse().map_err(|_| address())?;
    if uri.scheme_str() != Some("http") || !matches!(uri.path(), "" | "/" | PAGE) || uri.query().is_some() {
        return Err(address());
    }
    let authority = uri.authority().ok_or_else(address)?;
    let (host, port) = (authority.host().trim_matches(['[', ']']), authority.port_u16().unwrap_or(80));
    let request = Request::get(PATH).header(HOST, authority.as_str());
    let request = request.header(AUTHORIZATION, format!("Bearer {token}")).body(Empty::<Bytes>::new());
    let request = request
        .map_err(|_| "the token holds a blank or a byte that is not ASCII, must be one line of visible characters")?;
    let stream = TcpStream::connect((host, port)).await.map_err(|error| failed(url, error))?;
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(|error| failed(url, error))?;
    // Ends with the body.
    tokio::spawn(connection);
    sender.send_request(request).await.map_err(|error| failed(url, error))
}
