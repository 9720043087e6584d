//! Parser for messages of SGLang's load socket: a msgpack `LoadStat`.
//!
//! As an array: `["LoadStat", num_running_reqs, num_waiting_reqs, num_tokens, max_total_num_tokens, attn_dp_rank]`,
//! possibly longer or shorter, with or without the tag; as a map with these names. The rank is that of the socket,
//! independent of the rank in the message. Sequence numbers are ignored: each message is complete, so the next one
//! replaces a lost one. (reference: SGLang 0.5.22, managers/scheduler_components/load_publisher.py)

use super::{EngineReading, count};
use crate::wire::msgpack::{Cursor, MsgpackItem};

/// Maximum payload size in bytes.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// Maximum depth of skipped items.
const NESTING_MAX: usize = 16;

/// Reason for rejecting a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The payload is far larger than a load report.
    #[error("the payload has {0} bytes, must be at most {max}", max = MESSAGE_BYTES_MAX)]
    TooLong(usize),
    /// The payload has an unexpected structure.
    #[error("the payload is not a LoadStat (array or map of its numbers)")]
    NotAStat,
}

/// Parses a payload.
///
/// ```
/// use pointsman::internals::engine_load::read_stat;
///
/// let reading = read_stat(b"\x96\xa8LoadStat\x03\x02\x32\x64\xc0")?; // ["LoadStat", 3, 2, 50, 100, nil]
/// assert_eq!((reading.running, reading.waiting, reading.kv_usage), (Some(3), Some(2), Some(0.5)));
/// # Ok::<(), pointsman::internals::engine_load::MessageError>(())
/// ```
///
/// # Errors
/// If the payload is not readable as a whole. A single invalid number is omitted.
pub fn read_stat(payload: &[u8]) -> Result<EngineReading, MessageError> {
    if payload.len() > MESSAGE_BYTES_MAX {
        return Err(MessageError::TooLong(payload.len()));
    }
    let mut cursor = Cursor::new(payload);
    let stat = match cursor.item() {
        Ok(MsgpackItem::Array(items)) => read_array(&mut cursor, items),
        Ok(MsgpackItem::Map(items)) => read_map(&mut cursor, items),
        Ok(_) | Err(_) => None,
    };
    stat.map(Stat::reading).ok_or(MessageError::NotAStat)
}

/// Running requests, waiting requests, used tokens, total tokens.
#[derive(Debug, Default)]
struct Stat([Option<f64>; 4]);

impl Stat {
    fn reading(self) -> EngineReading {
        let [running, waiting, tokens, tokens_max] = self.0;
        // A capacity of 0 means unknown.
        let kv_usage = tokens.zip(tokens_max).filter(|(used, there)| *used >= 0.0 && *there > 0.0);
        let kv_usage = kv_usage.map(|(used, there)| (used / there).min(1.0)).filter(|usage| usage.is_finite());
        let (running, waiting) = (running.and_then(count), waiting.and_then(count));
        EngineReading { running, waiting, kv_usage, sleep: None }
    }
}

fn read_array(cursor: &mut Cursor<'_>, items: u32) -> Option<Stat> {
    let (mut stat, mut at) = (Stat::default(), 0);
    for position in 0..items {
        let item = whole_item(cursor)?;
        match (position, item) {
            (0, MsgpackItem::Str(b"LoadStat")) => continue,
            (0, MsgpackItem::Str(_)) => return None,
            _ => {}
        }
        match stat.0.get_mut(at) {
            Some(field) => *field = number(item),
            None => return Some(stat), // fields of later versions
        }
        at += 1;
    }
    (at > 0).then_some(stat)
}

fn read_map(cursor: &mut Cursor<'_>, items: u32) -> Option<Stat> {
    let (mut stat, mut known) = (Stat::default(), false);
    for _ in 0..items {
        let at = match whole_item(cursor)? {
            MsgpackItem::Str(b"num_running_reqs") => Some(0),
            MsgpackItem::Str(b"num_waiting_reqs") => Some(1),
            MsgpackItem::Str(b"num_tokens" | b"num_used_tokens") => Some(2),
            MsgpackItem::Str(b"max_total_num_tokens") => Some(3),
            _ => None,
        };
        let value = number(whole_item(cursor)?);
        if let Some(field) = at.and_then(|at| stat.0.get_mut(at)) {
            known = true;
            *field = value;
        }
    }
    known.then_some(stat)
}

/// The next item; skips its content.
fn whole_item<'a>(cursor: &mut Cursor<'a>) -> Option<MsgpackItem<'a>> {
    let item = cursor.item().ok()?;
    let inside = match item {
        MsgpackItem::Array(items) => u64::from(items),
        MsgpackItem::Map(pairs) => 2 * u64::from(pairs),
        _ => 0,
    };
    cursor.pass(inside, NESTING_MAX).ok()?;
    Some(item)
}

#[expect(clippy::cast_precision_loss, reason = "counts beyond 2^53 are no counts of requests")]
fn number(item: MsgpackItem<'_>) -> Option<f64> {
    match item {
        MsgpackItem::Uint(number) => Some(number as f64),
        MsgpackItem::Neg(number) => Some(number as f64),
        MsgpackItem::Float(number) => Some(number),
        _ => None,
    }
}
