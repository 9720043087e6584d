//! The command `pointsman top`: reads the stream of snapshots and draws each one in the terminal.
//!
//! Draws with plain escape sequences on the alternate screen. After a lost connection it tries again every second.

use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use http_body_util::{BodyExt as _, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, HOST};
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::LiveSnapshot;
use super::terminal::{View, lines};

/// Interval of attempts to connect.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Time limit of a connection and of its response head.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);

/// Maximum length of one event.
const EVENT_BYTES_MAX: usize = 8 << 20;

/// Path of the stream.
const PATH: &str = "/admin/live";

/// Options of the command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopOptions {
    /// Address of the administration listener: `http://HOST:PORT`.
    pub url: String,
    /// Its token.
    pub token: String,
    /// Only the model with this name.
    pub model: Option<String>,
    /// Maximum number of ranks per model.
    pub ranks_max: usize,
    /// Prints one frame and ends.
    pub is_once: bool,
    /// Whether levels are coloured.
    pub has_colours: bool,
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
    #[error("{url} responds with status {status}")]
    Status {
        /// Address of the listener.
        url: String,
        /// Its response.
        status: StatusCode,
    },
    /// An event that is too long or no snapshot.
    #[error("the stream has an invalid event: {0}")]
    Event(String),
    /// Closed output.
    #[error("cannot write: {0}")]
    Output(#[from] std::io::Error),
}

impl TopError {
    /// Whether another attempt can succeed.
    fn is_temporary(&self) -> bool {
        match self {
            Self::Connect { .. } => true,
            Self::Status { status, .. } => status.is_server_error() || *status == StatusCode::TOO_MANY_REQUESTS,
            Self::Address(_) | Self::Token | Self::Event(_) | Self::Output(_) => false,
        }
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

/// Draws snapshots until the output is closed or an error is permanent; with `is_once` the first one only.
///
/// # Errors
/// See [`TopError`].
pub async fn run(options: &TopOptions, output: &mut impl std::io::Write) -> Result<(), TopError> {
    if options.is_once {
        let mut stream = Snapshots::connect(options).await?;
        let snapshot = stream.next().await?;
        return Ok(output.write_all((frame(options, &snapshot).join("\n") + "\n").as_bytes())?);
    }
    loop {
        match draw_all(options, output).await {
            Err(error) if error.is_temporary() => {
                redraw(output, &[format!("{error}; next attempt in a second")])?;
                sleep(RETRY_INTERVAL).await;
            }
            end => return end,
        }
    }
}

async fn draw_all(options: &TopOptions, output: &mut impl std::io::Write) -> Result<(), TopError> {
    let mut stream = Snapshots::connect(options).await?;
    loop {
        let snapshot = stream.next().await?;
        redraw(output, &frame(options, &snapshot))?;
    }
}

fn frame(options: &TopOptions, snapshot: &LiveSnapshot) -> Vec<String> {
    let TopOptions { has_colours, ranks_max, model, .. } = options;
    lines(snapshot, &View { has_colours: *has_colours, ranks_max: *ranks_max, model: model.as_deref() })
}

/// Replaces the screen without clearing it first, which would flicker.
fn redraw(output: &mut impl std::io::Write, lines: &[String]) -> std::io::Result<()> {
    let mut frame = b"\x1b[H".to_vec();
    for line in lines {
        write!(frame, "{line}\x1b[K\r\n")?;
    }
    frame.extend_from_slice(b"\x1b[J");
    output.write_all(&frame)?;
    output.flush()
}

/// The alternate screen without line wrapping and cursor, until dropped.
pub struct Screen;

impl Screen {
    /// Enters it.
    ///
    /// # Errors
    /// A closed output.
    pub fn enter() -> std::io::Result<Self> {
        std::io::stdout().write_all(b"\x1b[?1049h\x1b[?7l\x1b[?25l")?;
        Ok(Self)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let mut output = std::io::stdout();
        // The terminal may be gone.
        let _ = output.write_all(b"\x1b[?25h\x1b[?7h\x1b[?1049l");
        let _ = output.flush();
    }
}

/// The snapshots of one connection.
struct Snapshots {
    url: String,
    body: Incoming,
    buffered: Vec<u8>,
}

impl Snapshots {
    async fn connect(options: &TopOptions) -> Result<Self, TopError> {
        let url = options.url.clone();
        let failed = |error: String| TopError::Connect { url: url.clone(), error };
        let response = timeout(CONNECT_TIME_MAX, request(options)).await;
        let response = response.map_err(|_| failed("no response in time".to_owned()))??;
        let status = response.status();
        if status != StatusCode::OK {
            return Err(TopError::Status { url, status });
        }
        Ok(Self { url, body: response.into_body(), buffered: Vec::new() })
    }

    /// The next snapshot.
    async fn next(&mut self) -> Result<LiveSnapshot, TopError> {
        loop {
            if let Some(end) = self.buffered.windows(2).position(|two| two == b"\n\n") {
                let event: Vec<u8> = self.buffered.drain(..end + 2).collect();
                let data = event.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"data: "));
                let Some(data) = data else { continue };
                return serde_json::from_slice(data).map_err(|error| TopError::Event(error.to_string()));
            }
            if self.buffered.len() > EVENT_BYTES_MAX {
                return Err(TopError::Event(format!("longer than {EVENT_BYTES_MAX} bytes")));
            }
            let failed = |error: String| TopError::Connect { url: self.url.clone(), error };
            match self.body.frame().await {
                Some(Ok(frame)) => self.buffered.extend(frame.into_data().unwrap_or_default()),
                Some(Err(error)) => return Err(failed(error.to_string())),
                None => return Err(failed("the stream has ended".to_owned())),
            }
        }
    }
}

async fn request(options: &TopOptions) -> Result<Response<Incoming>, TopError> {
    let address = || TopError::Address(options.url.clone());
    let uri: Uri = options.url.parse().map_err(|_| address())?;
    if uri.scheme_str() != Some("http") || !matches!(uri.path(), "" | "/") || uri.query().is_some() {
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
