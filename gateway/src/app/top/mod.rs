//! The command `pointsman top`: reads the stream of snapshots and draws each one in the terminal.
//!
//! Draws with plain escape sequences on the alternate screen, as wide as the terminal. After a lost connection it tries
//! again every second.

pub mod keys;
mod terminal;

use std::path::Path;
use std::time::Duration;

use http_body_util::{BodyExt as _, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, HOST};
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::app::top::keys::Key;
use crate::app::top::terminal::{View, lines};
use crate::formats::live::LiveSnapshot;

/// Interval of attempts to connect.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

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
    /// Whether levels are coloured.
    pub has_colours: bool,
    /// Columns and rows of the terminal; called before each frame.
    pub size: fn() -> (usize, usize),
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

impl TopError {
    /// Whether another attempt can succeed.
    fn is_temporary(&self) -> bool {
        match self {
            Self::Connect { .. } => true,
            Self::Status { status, .. } => status.is_server_error() || *status == StatusCode::TOO_MANY_REQUESTS,
            Self::Address(_) | Self::Token | Self::Model { .. } | Self::Event(_) | Self::Output(_) => false,
        }
    }
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

/// Prints one frame.
///
/// # Errors
/// See [`TopError`].
pub async fn once(options: &TopOptions, output: &mut impl std::io::Write) -> Result<(), TopError> {
    let snapshot = Snapshots::connect(options).await?.next().await?;
    let (mut frame, rest) = options.frame(&snapshot)?;
    frame.extend(rest);
    Ok(output.write_all((frame.join("\n") + "\n").as_bytes())?)
}

/// Draws snapshots until a key ends it, the output is closed or an error is permanent.
///
/// # Errors
/// See [`TopError`].
pub async fn watch(
    options: &TopOptions,
    keys: &mut mpsc::Receiver<Key>,
    output: &mut impl std::io::Write,
) -> Result<(), TopError> {
    let mut screen = Frame::default();
    loop {
        let failed = match screen.draw_all(options, keys, output).await {
            Err(error) if error.is_temporary() => error,
            end => return end,
        };
        (screen.head, screen.rest) = (vec![format!("{failed}; next attempt in a second")], Vec::new());
        screen.draw(options, output)?;
        if let Ok(Some(Key::Quit)) = timeout(RETRY_INTERVAL, keys.recv()).await {
            return Ok(());
        }
    }
}

impl TopOptions {
    /// Lines of the sentence, and the others.
    fn frame(&self, snapshot: &LiveSnapshot) -> Result<(Vec<String>, Vec<String>), TopError> {
        let Self { has_colours, ranks_max, model, size, .. } = self;
        let name = model.as_deref();
        if let Some(name) = name.filter(|name| snapshot.models.iter().all(|model| model.name != *name)) {
            let known = snapshot.models.iter().map(|model| model.name.clone()).collect();
            return Err(TopError::Model { name: name.to_owned(), known });
        }
        let view = View { has_colours: *has_colours, width: size().0, ranks_max: *ranks_max, model: name };
        Ok(lines(snapshot, &view))
    }
}

/// The lines of the last snapshot, of which a part is on the screen.
#[derive(Default)]
struct Frame {
    head: Vec<String>,
    rest: Vec<String>,
    /// Lines of the rest above the screen.
    hidden: usize,
}

impl Frame {
    /// Draws the snapshots of one connection.
    async fn draw_all(
        &mut self,
        options: &TopOptions,
        keys: &mut mpsc::Receiver<Key>,
        output: &mut impl std::io::Write,
    ) -> Result<(), TopError> {
        let mut stream = Snapshots::connect(options).await?;
        loop {
            // A read that is cancelled keeps what it has received.
            tokio::select! {
                biased;
                snapshot = stream.next() => (self.head, self.rest) = options.frame(&snapshot?)?,
                Some(key) = keys.recv() => match key {
                    Key::Quit => return Ok(()),
                    Key::Move(lines) => self.hidden = self.hidden.saturating_add_signed(lines),
                    Key::Page(pages) => {
                        let page = isize::try_from(self.room(options)).unwrap_or(isize::MAX);
                        self.hidden = self.hidden.saturating_add_signed(pages * page);
                    }
                },
            }
            self.draw(options, output)?;
        }
    }

    /// Lines of the screen below the head and above the line with the keys.
    fn room(&self, options: &TopOptions) -> usize {
        (options.size)().1.saturating_sub(self.head.len() + 1).max(1)
    }

    /// Replaces the screen without clearing it first, which would flicker.
    fn draw(&mut self, options: &TopOptions, output: &mut impl std::io::Write) -> std::io::Result<()> {
        use std::io::Write as _;
        let room = self.room(options);
        self.hidden = self.hidden.min(self.rest.len().saturating_sub(room));
        let mut frame = b"\x1b[H".to_vec();
        for line in self.head.iter().chain(self.rest.iter().skip(self.hidden).take(room)) {
            // Erased before: a line of full width leaves the cursor on its last character.
            write!(frame, "\x1b[K{line}\r\n")?;
        }
        let last = self.hidden + room.min(self.rest.len());
        let keys = "q quit  j/k scroll";
        match self.rest.len() > room {
            true => write!(
                frame,
                "\x1b[K\x1b[2m{keys}  {} to {last} of {} lines\x1b[0m\x1b[J",
                self.hidden + 1,
                self.rest.len()
            )?,
            false => write!(frame, "\x1b[K\x1b[2m{keys}\x1b[0m\x1b[J")?,
        }
        output.write_all(&frame)?;
        output.flush()
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
