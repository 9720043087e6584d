//! The command `pointsman top`: prints the state of a gateway, as the live page has it, and ends.
//!
//! The state is the first snapshot of the page's stream. `watch` repeats the command.

mod terminal;

use std::path::Path;
use std::time::Duration;

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

/// Options of the command.
#[derive(Clone, Debug)]
pub struct TopOptions {
    /// Address of the administration listener: `http://HOST:PORT`.
    pub url: String,
    /// Its token.
    pub token: String,
    /// Only the model with this name.
    pub model: Option<String>,
    /// Maximum number of ranks per model.
    pub ranks_max: usize,
    /// Maximum length of a line.
    pub width: usize,
}

/// Reason for which the command ends.
#[derive(Debug, thiserror::Error)]
pub enum TopError {
    /// Address of another form.
    #[error("the address is {0:?}, must be http://HOST:PORT")]
    Address(String),
    /// Token that is invalid in a header.
    #[error("the token holds a blank or a byte that is not ASCII, must be one line of visible characters")]
    Token,
    /// No connection, or one that broke before the first snapshot.
    #[error("{url} does not respond: {error}")]
    Connect {
        /// Address of the listener.
        url: String,
        /// Cause.
        error: String,
    },
    /// A response without snapshots.
    #[error("{url} responds with status {status}{}", hint(*status))]
    Status {
        /// Address of the listener.
        url: String,
        /// Its response.
        status: StatusCode,
    },
    /// A model that the gateway does not have.
    #[error("the gateway has no model {name:?}; its models are {}", known.join(", "))]
    Model {
        /// The name.
        name: String,
        /// The models there are.
        known: Vec<String>,
    },
    /// An event that is too long or no snapshot.
    #[error("the stream has an invalid event: {0}")]
    Event(String),
    /// Closed output.
    #[error("cannot write: {0}")]
    Output(#[from] std::io::Error),
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

/// Prints the state.
///
/// # Errors
/// See [`TopError`].
pub async fn print(options: &TopOptions, output: &mut impl std::io::Write) -> Result<(), TopError> {
    let snapshot = snapshot(options).await?;
    let TopOptions { ranks_max, model, width, .. } = options;
    let model = model.as_deref();
    if let Some(name) = model.filter(|name| snapshot.models.iter().all(|model| model.name != *name)) {
        let known = snapshot.models.iter().map(|model| model.name.clone()).collect();
        return Err(TopError::Model { name: name.to_owned(), known });
    }
    let view = View { width: *width, ranks_max: *ranks_max, model };
    Ok(output.write_all((lines(&snapshot, &view).join("\n") + "\n").as_bytes())?)
}

/// The first snapshot of the stream.
async fn snapshot(options: &TopOptions) -> Result<LiveSnapshot, TopError> {
    let url = &options.url;
    let failed = |error: String| TopError::Connect { url: url.clone(), error };
    let response = timeout(CONNECT_TIME_MAX, request(options)).await;
    let response = response.map_err(|_| failed("no response in time".to_owned()))??;
    let status = response.status();
    if status != StatusCode::OK {
        return Err(TopError::Status { url: url.clone(), status });
    }
    let (mut body, mut buffered) = (response.into_body(), Vec::new());
    loop {
        if let Some(end) = buffered.windows(2).position(|two| two == b"\n\n") {
            let event: Vec<u8> = buffered.drain(..end + 2).collect();
            let data = event.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"data: "));
            let Some(data) = data else { continue };
            return serde_json::from_slice(data).map_err(|error| TopError::Event(error.to_string()));
        }
        if buffered.len() > EVENT_BYTES_MAX {
            return Err(TopError::Event(format!("longer than {EVENT_BYTES_MAX} bytes")));
        }
        match body.frame().await {
            Some(Ok(frame)) => buffered.extend(frame.into_data().unwrap_or_default()),
            Some(Err(error)) => return Err(failed(error.to_string())),
            None => return Err(failed("the stream has ended".to_owned())),
        }
    }
}

async fn request(options: &TopOptions) -> Result<Response<Incoming>, TopError> {
    let address = || TopError::Address(options.url.clone());
    let url = if options.url.contains("://") { options.url.clone() } else { format!("http://{}", options.url) };
    let uri: Uri = url.parse().map_err(|_| address())?;
    if uri.scheme_str() != Some("http") || !matches!(uri.path(), "" | "/" | PAGE) || uri.query().is_some() {
        return Err(address());
    }
    let authority = uri.authority().ok_or_else(address)?;
    let (host, port) = (authority.host().trim_matches(['[', ']']), authority.port_u16().unwrap_or(80));
    let request = Request::get(PATH).header(HOST, authority.as_str());
    let request = request.header(AUTHORIZATION, format!("Bearer {}", options.token)).body(Empty::<Bytes>::new());
    let request = request.map_err(|_| TopError::Token)?;
    let failed = |error: String| TopError::Connect { url: options.url.clone(), error };
    let stream = TcpStream::connect((host, port)).await.map_err(|error| failed(error.to_string()))?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| failed(error.to_string()))?;
    // Ends with the body.
    tokio::spawn(connection);
    sender.send_request(request).await.map_err(|error| failed(error.to_string()))
}
