//! A message of SGLang's load socket: its payload, a msgpack `LoadStat`.
//!
//! As an array it is `["LoadStat", num_running_reqs, num_waiting_reqs, num_tokens, max_total_num_tokens, attn_dp_rank]`,
//! longer or shorter at its end and with or without the tag; as a map it has these names. Whatever rank it names, it is of
//! the rank whose socket it came from. No number of a message is looked at: each is the whole truth, and the next makes
//! up for one that was lost.
//! (reference: SGLang 0.5.22, managers/scheduler_components/load_publisher.py)

use super::{EngineReading, count};
use crate::wire::msgpack::{Cursor, MsgpackItem};

/// Longest payload that is looked at.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// Deepest nesting that is passed over.
const NESTING_MAX: usize = 16;

/// Why a message tells nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Far more than a load takes.
    #[error("the payload has {0} bytes, must be at most {max}", max = MESSAGE_BYTES_MAX)]
    TooLong(usize),
    /// Not what it should be.
    #[error("the payload is no LoadStat: neither an array nor a map of its numbers")]
    NotAStat,
}

/// Reads a payload.
///
/// ```
/// use pointsman::engine_load::read_stat;
///
/// let reading = read_stat(b"\x96\xa8LoadStat\x03\x02\x32\x64\xc0")?; // ["LoadStat", 3, 2, 50, 100, nil]
/// assert_eq!((reading.running, reading.waiting, reading.kv_usage), (Some(3), Some(2), Some(0.5)));
/// # Ok::<(), pointsman::engine_load::MessageError>(())
/// ```
///
/// # Errors
/// When it cannot be read at all. A single number that is none is left out.
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

/// Running, waiting, tokens used, tokens there are.
#[derive(Debug, Default)]
struct Stat([Option<f64>; 4]);

impl Stat {
    fn reading(self) -> EngineReading {
        let [running, waiting, tokens, tokens_max] = self.0;
        // A capacity of 0 stands for one that is not known.
        let kv_usage = tokens.zip(tokens_max).filter(|(used, there)| *used >= 0.0 && *there > 0.0);
        let kv_usage = kv_usage.map(|(used, there)| (used / there).min(1.0)).filter(|usage| usage.is_finite());
        EngineReading { running: running.and_then(count), waiting: waiting.and_then(count), kv_usage }
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
            None => return Some(stat), // what later versions add
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

/// The next item; what it contains is passed over.
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
