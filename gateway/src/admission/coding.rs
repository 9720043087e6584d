//! Compressed request bodies (`Content-Encoding`), decoded in steps of bounded output.

use std::io::{self, Error, ErrorKind, Write};
use std::mem::take;

use axum::http::HeaderMap;
use axum::http::header::CONTENT_ENCODING;
use flate2::write::{MultiGzDecoder, ZlibDecoder};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// Coding of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coding {
    Identity,
    Gzip,
    /// The format of zlib (RFC 9110, 8.4.1.2).
    Deflate,
    Zstd,
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
            (b"zstd", None) => Self::Zstd,
            _ => Self::Unknown,
        }
    }
}

/// Decoder of one body.
pub(super) enum Decoder {
    Gzip(Box<MultiGzDecoder<Vec<u8>>>),
    Deflate(Box<ZlibDecoder<Vec<u8>>>),
    Zstd(Box<Zstd>),
}

impl Decoder {
    /// `None` for a body without a coding.
    pub(super) fn of(coding: Coding) -> Option<Self> {
        match coding {
            Coding::Identity | Coding::Unknown => None,
            Coding::Gzip => Some(Self::Gzip(Box::new(MultiGzDecoder::new(Vec::new())))),
            Coding::Deflate => Some(Self::Deflate(Box::new(ZlibDecoder::new(Vec::new())))),
            Coding::Zstd => Some(Self::Zstd(Box::default())),
        }
    }

    /// Maximum input of a step, whose output is about a megabyte at most.
    pub(super) fn step_bytes(&self) -> usize {
        match self {
            Self::Gzip(_) | Self::Deflate(_) => 1024,
            Self::Zstd(_) => 8 * SHORTEST_BLOCK_BYTES,
        }
    }

    /// The output of a step; an empty step ends the body.
    ///
    /// # Errors
    /// Input that has another format.
    pub(super) fn step(&mut self, input: &[u8]) -> io::Result<Vec<u8>> {
        match self {
            Self::Gzip(decoder) => {
                if input.is_empty() { decoder.try_finish() } else { decoder.write_all(input) }?;
                decoder.flush()?;
                Ok(take(decoder.get_mut()))
            }
            Self::Deflate(decoder) => {
                if input.is_empty() { decoder.try_finish() } else { decoder.write_all(input) }?;
                decoder.flush()?;
                Ok(take(decoder.get_mut()))
            }
            Self::Zstd(decoder) => decoder.step(input),
        }
    }
}

/// Shortest block of zstd, which has up to 128 KiB decoded.
const SHORTEST_BLOCK_BYTES: usize = 4;

/// Longest header of a frame (RFC 8878, 3.1.1.1), with the magic number.
const FRAME_HEADER_BYTES_MAX: usize = 18;

/// Largest window (RFC 9659). It is held until the end of a frame, in addition to the decoded body.
const WINDOW_BYTES_MAX: u64 = 8 << 20;

/// Decoder of the frames of zstd. Their checksums are not compared.
pub(super) struct Zstd {
    decoder: FrameDecoder,
    /// Received bytes of a header or a block that is not complete.
    input: Vec<u8>,
    is_in_frame: bool,
}

impl Default for Zstd {
    fn default() -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(WINDOW_BYTES_MAX);
        Self { decoder, input: Vec::new(), is_in_frame: false }
    }
}

impl Zstd {
    fn step(&mut self, input: &[u8]) -> io::Result<Vec<u8>> {
        self.input.extend_from_slice(input);
        let (is_last, mut output) = (input.is_empty(), Vec::new());
        while is_last && !self.input.is_empty() || self.input.len() >= self.needed_bytes() {
            let mut rest = &self.input[..];
            let invalid = |error| Error::new(ErrorKind::InvalidData, error);
            if self.is_in_frame {
                let is_end = self.decoder.decode_blocks(&mut rest, BlockDecodingStrategy::UptoBlocks(1));
                self.is_in_frame = !is_end.map_err(invalid)?;
                output.extend(self.decoder.collect().unwrap_or_default());
            } else {
                self.decoder.reset(&mut rest).map_err(invalid)?;
                self.is_in_frame = true;
            }
            let read = self.input.len() - rest.len();
            self.input.drain(..read);
        }
        if is_last && self.is_in_frame { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(output) }
    }

    /// Bytes that suffice for the next header, or for the next block with a checksum.
    fn needed_bytes(&self) -> usize {
        let &[first, second, third, ..] = &self.input[..] else { return FRAME_HEADER_BYTES_MAX };
        let header = u32::from_le_bytes([first, second, third, 0]);
        let (is_last, is_repeated_byte, length) = (header & 1 == 1, header >> 1 & 3 == 1, header as usize >> 3);
        let content = if is_repeated_byte { 1 } else { length };
        match self.is_in_frame {
            true => 3 + content + if is_last { 4 } else { 0 },
            false => FRAME_HEADER_BYTES_MAX,
        }
    }
}
