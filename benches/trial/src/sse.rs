//! Reader of server-sent events, as OpenAI's streams use them.
//!
//! Reports each event's data once and complete, for any split of the input, up to [`EVENT_BYTES_MAX`]. Lines end with a
//! line feed, with or without a carriage return before it. Fields other than `data` are skipped. The library's
//! `AnswerReader` is no substitute: it keeps only counts and the usage, not the events.

/// Maximum size of an event in bytes.
pub const EVENT_BYTES_MAX: usize = 1 << 20;

/// An event exceeds [`EVENT_BYTES_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event is longer than {EVENT_BYTES_MAX} bytes")]
pub struct EventTooLong;

/// Reads events from bytes that arrive in pieces.
///
/// ```
/// use pointsman_trial::sse::{EventTooLong, SseReader};
///
/// let (mut reader, mut events) = (SseReader::default(), Vec::new());
/// for piece in ["data: a\n", "data: b\n\n"] {
///     reader.push(piece.as_bytes(), |data| Ok::<_, EventTooLong>(events.push(data.to_vec())))?;
/// }
/// assert_eq!(events, [b"a\nb"]);
/// # Ok::<(), EventTooLong>(())
/// ```
#[derive(Debug, Default)]
pub struct SseReader {
    /// The incomplete line.
    line: Vec<u8>,
    /// Data of the incomplete event, a line feed after each of its lines.
    data: Vec<u8>,
}

impl SseReader {
    /// Parses the next bytes and calls `event` with the data of each completed event.
    ///
    /// # Errors
    /// The first error of `event`, or [`EventTooLong`]; the reader is unusable after an error.
    pub fn push<E: From<EventTooLong>>(
        &mut self,
        bytes: &[u8],
        mut event: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.line.len() + self.data.len() + piece.len() > EVENT_BYTES_MAX {
                return Err(EventTooLong.into());
            }
            self.line.extend_from_slice(piece);
            let Some(line) = self.line.strip_suffix(b"\n") else { continue };
            let line = line.strip_suffix(b"\r").unwrap_or(line);
            if let Some(value) = line.strip_prefix(b"data:") {
                self.data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
                self.data.push(b'\n');
            } else if line.is_empty()
                && let Some(data) = self.data.strip_suffix(b"\n")
            {
                event(data)?;
                self.data.clear();
            }
            self.line.clear();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &[u8] = b": hello\n\ndata: {\"a\": 1}\n\nevent: x\r\ndata:two\r\ndata: lines\r\n\r\nid: 7\n\n\
        data: \xc3\xa9\n\ndata:\n\ndata: [DONE]\n\ndata: cut off";
    const EVENTS: [&[u8]; 5] = [b"{\"a\": 1}", b"two\nlines", "é".as_bytes(), b"", b"[DONE]"];

    fn read<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<Vec<u8>> {
        let (mut reader, mut events) = (SseReader::default(), Vec::new());
        for piece in pieces {
            let taken = reader.push(piece, |data| {
                events.push(data.to_vec());
                Ok::<_, EventTooLong>(())
            });
            taken.expect("short events");
        }
        events
    }

    #[test]
    fn events_do_not_depend_on_how_the_bytes_are_split() {
        assert_eq!(read([STREAM]), EVENTS);
        assert_eq!(read(STREAM.chunks(1)), EVENTS);
        for first in 0..=STREAM.len() {
            for second in first..=STREAM.len() {
                let pieces = [&STREAM[..first], &STREAM[first..second], &STREAM[second..]];
                assert_eq!(read(pieces), EVENTS, "cut at {first} and {second}");
            }
        }
    }
}
