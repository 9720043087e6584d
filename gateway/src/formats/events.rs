//! Whole events of event streams that arrive in frames, and their data.
//!
//! An event ends with an empty line. It may have several lines of data, which belong together.

use std::borrow::Cow;

use axum::body::Bytes;

/// Longest start of an event's end that can be the end of a frame.
pub(super) const END_BYTES_MAX: usize = 3;

/// The start of an event that is not whole yet.
#[derive(Clone, Debug, Default)]
pub(super) struct IncompleteEvent(pub(super) Vec<u8>);

impl IncompleteEvent {
    /// Adds a frame, and returns the events that are whole now. Frames of whole events are not copied.
    pub(super) fn push(&mut self, mut frame: Bytes) -> Bytes {
        if self.0.is_empty() {
            if frame.ends_with(b"\n\n") {
                return frame;
            }
            let events = frame.split_to(events_end(&frame, 0));
            self.0.extend_from_slice(&frame);
            return events;
        }
        let scanned = self.0.len().saturating_sub(END_BYTES_MAX);
        self.0.extend_from_slice(&frame);
        match events_end(&self.0, scanned) {
            0 => Bytes::new(),
            end => {
                let rest = self.0.split_off(end);
                std::mem::replace(&mut self.0, rest).into()
            }
        }
    }

    /// Whether an event is whole with this frame.
    pub(super) fn ends_with(&self, frame: &[u8]) -> bool {
        let tail = &self.0[self.0.len().saturating_sub(END_BYTES_MAX)..];
        events_end(&[tail, frame].concat(), 0) > 0
    }
}

fn is_end(bytes: &[u8], at: usize) -> bool {
    let before = bytes[..at].strip_suffix(b"\n").map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    before.is_some_and(|before| before.ends_with(b"\n"))
}

/// End of the last whole event; 0 without one. The events before `from` are known to be incomplete.
fn events_end(bytes: &[u8], from: usize) -> usize {
    (from + 1..=bytes.len()).rev().find(|at| is_end(bytes, *at)).unwrap_or(0)
}

/// End of the first event, or of the bytes.
pub(super) fn first_event_end(bytes: &[u8]) -> usize {
    (1..bytes.len()).find(|at| is_end(bytes, *at)).unwrap_or(bytes.len())
}

/// Data of each event in a stream.
pub(crate) fn each_data(mut stream: &str) -> impl Iterator<Item = Cow<'_, str>> {
    let events = std::iter::from_fn(move || {
        let (event, rest) = stream.split_at(first_event_end(stream.as_bytes()));
        stream = rest;
        (!event.is_empty()).then_some(event)
    });
    events.filter_map(data)
}

/// Data of an event; `None` without any.
pub(super) fn data(event: &str) -> Option<Cow<'_, str>> {
    let event = event.trim_start_matches('\u{feff}'); // a stream may begin with a byte order mark
    let mut lines = event.lines().filter_map(|line| line.strip_prefix("data:"));
    let first = lines.next()?;
    let more: Vec<_> = lines.collect();
    Some(if more.is_empty() { first.into() } else { [&[first][..], &more].concat().join("\n").into() })
}

/// The event with other data.
pub(super) fn with_data(event: &str, data: &str) -> String {
    let (mut changed, mut data) = (String::with_capacity(event.len() + data.len()), Some(data));
    for line in event.split_inclusive('\n') {
        if !line.starts_with("data:") {
            changed += line;
        } else if let Some(data) = data.take() {
            let end = &line[line.lines().next().map_or(0, str::len)..];
            changed += &["data:", &data.replace('\n', &format!("{end}data:")), end].concat();
        }
    }
    changed
}
