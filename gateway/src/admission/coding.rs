//! Compressed request bodies (`Content-Encoding`), decoded in steps of bounded output.

use std::io::{self, Write as _};

use axum::http::HeaderMap;
use axum::http::header::CONTENT_ENCODING;
use flate2::write::{MultiGzDecoder, ZlibDecoder};

/// Coding of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coding {
    Identity,
    Gzip,
    /// The format of zlib (RFC 9110, 8.4.1.2).
    Deflate,
    /// One that the gateway does not read, or several.
    Unknown,
}

impl Coding {
    /// The coding that the headers name.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let mut values = headers.get_all(CONTENT_ENCODING).iter();
        let Some(value) = values.next() else { return Self::Identity };
        let name = value.as_bytes().trim_ascii().to_ascii_lowercase();
        match (&*name, values.next()) {
            (b"" | b"identity", None) => Self::Identity,
            (b"gzip" | b"x-gzip", None) => Self::Gzip,
            (b"deflate", None) => Self::Deflate,
            _ => Self::Unknown,
        }
    }
}

/// Decoder of one body.
pub(super) enum Decoder {
    Gzip(Box<MultiGzDecoder<Vec<u8>>>),
    Deflate(Box<ZlibDecoder<Vec<u8>>>),
}

impl Decoder {
    /// Maximum input of a step. Its output is at most about a thousand times as long.
    pub(super) const STEP_BYTES: usize = 1024;

    /// `None` for a body without a coding.
    pub(super) fn of(coding: Coding) -> Option<Self> {
        match coding {
            Coding::Identity | Coding::Unknown => None,
            Coding::Gzip => Some(Self::Gzip(Box::new(MultiGzDecoder::new(Vec::new())))),
            Coding::Deflate => Some(Self::Deflate(Box::new(ZlibDecoder::new(Vec::new())))),
        }
    }

    /// The output of a step; an empty step ends the body.
    ///
    /// # Errors
    /// Input that has another format.
    pub(super) fn step(&mut self, input: &[u8]) -> io::Result<Vec<u8>> {
        match self {
            Self::Gzip(decoder) => {
                if input.is_empty() {
                    decoder.try_finish()?
                } else {
                    decoder.write_all(input)?
                }
                decoder.flush()?;
                Ok(std::mem::take(decoder.get_mut()))
            }
            Self::Deflate(decoder) => {
                if input.is_empty() {
                    decoder.try_finish()?
                } else {
                    decoder.write_all(input)?
                }
                decoder.flush()?;
                Ok(std::mem::take(decoder.get_mut()))
            }
        }
    }
}
