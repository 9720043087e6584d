//! Server-sent events, as OpenAI's streams use them.
//!
//! Owns what of an event has come so far. Promises each event's data once and whole, however the bytes were cut, and no
//! more memory than [`EVENT_BYTES_MAX`]. Knows lines that end with a line feed, with or without a carriage return before
//! it; fields other than `data` are passed over.

/// Longest event, in bytes.
const EVENT_BYTES_MAX: usize = 1 << 20;

/// An event longer than one may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event is longer than {EVENT_BYTES_MAX} bytes")]
pub(super) struct EventTooLong;

/// Reads events from bytes that come in pieces.
#[derive(Debug, Default)]
pub(super) struct SseReader {
    /// The line that has begun.
    line: Vec<u8>,
    /// The data of the event that has begun; none without a `data` line.
    data: Option<Vec<u8>>,
}

impl SseReader {
    /// Takes the next bytes, and hands over the data of each event that they end.
    ///
    /// # Errors
    /// An event that grows too long; what comes then makes no sense any more.
    pub(super) fn push(&mut self, mut bytes: &[u8], mut event: impl FnMut(&[u8])) -> Result<(), EventTooLong> {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            self.take(&bytes[..end])?;
            bytes = &bytes[end + 1..];
            let line = std::mem::take(&mut self.line);
            let line = line.strip_suffix(b"\r").unwrap_or(&line);
            if line.is_empty() {
                if let Some(data) = self.data.take() {
                    event(&data);
                }
            } else if let Some(value) = line.strip_prefix(b"data:") {
                self.add(value.strip_prefix(b" ").unwrap_or(value));
            }
        }
        self.take(bytes)
    }

    fn take(&mut self, bytes: &[u8]) -> Result<(), EventTooLong> {
        let held = self.line.len() + self.data.as_ref().map_or(0, Vec::len);
        if held + bytes.len() > EVENT_BYTES_MAX {
            return Err(EventTooLong);
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    /// Several `data` lines are one event's, joined by line feeds.
    fn add(&mut self, value: &[u8]) {
        match &mut self.data {
            None => self.data = Some(value.to_vec()),
            Some(data) => {
                data.push(b'\n');
                data.extend_from_slice(value);
            }
        }
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
            reader.push(piece, |data| events.push(data.to_vec())).expect("short events");
        }
        events
    }

    #[test]
    fn events_are_the_same_wherever_the_bytes_are_cut() {
        assert_eq!(read([STREAM]), EVENTS);
        assert_eq!(read(STREAM.chunks(1)), EVENTS);
        for first in 0..=STREAM.len() {
            for second in first..=STREAM.len() {
                let pieces = [&STREAM[..first], &STREAM[first..second], &STREAM[second..]];
                assert_eq!(read(pieces), EVENTS, "cut at {first} and {second}");
            }
        }
    }

    #[test]
    fn an_event_without_end_is_given_up() {
        let mut reader = SseReader::default();
        let line = [b"data: ".as_slice(), &[b'x'; 1000], b"\n"].concat();
        let mut pushes = (0..2000).map(|_| reader.push(&line, |_| panic!("it never ends")));
        assert!(pushes.any(|pushed| pushed == Err(EventTooLong)));
        assert_eq!(SseReader::default().push(&vec![b'x'; EVENT_BYTES_MAX + 1], |_| {}), Err(EventTooLong));
    }
}
