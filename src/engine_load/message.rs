//! A message of SGLang's load socket: `[topic, sequence, payload]`, the payload a msgpack `LoadStat`.
//!
//! As an array it is `["LoadStat", num_running_reqs, num_waiting_reqs, num_tokens, max_total_num_tokens, attn_dp_rank]`,
//! longer or shorter at its end and with or without the tag; as a map it has these names.
//! (reference: SGLang 0.5.22, managers/scheduler_components/load_publisher.py)

use super::{EngineReading, count};

/// Longest payload that is looked at.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// Deepest nesting that is skipped.
const DEPTH_MAX: u32 = 16;

/// Why a message tells nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Not a topic, a sequence number and a payload.
    #[error("the message has {0} frames, must be 3")]
    Frames(usize),
    /// The second frame is no number.
    #[error("the sequence number has {0} bytes, must be 8")]
    Sequence(usize),
    /// Far more than a load takes.
    #[error("the payload has {0} bytes, must be at most {max}", max = MESSAGE_BYTES_MAX)]
    TooLong(usize),
    /// Not what it should be.
    #[error("the payload is no LoadStat: neither an array nor a map of its numbers")]
    NotAStat,
}

/// Reads a whole message: what it says of the rank whose socket it came from.
///
/// The rank is the socket's, whatever the payload names. Sequence numbers are not looked at: each message is the whole
/// truth, and the next makes up for one that was lost.
///
/// # Errors
/// When it cannot be read at all. A single number that is none is left out.
pub fn read_message<F: AsRef<[u8]>>(frames: &[F]) -> Result<EngineReading, MessageError> {
    let [_topic, sequence, payload] = frames else { return Err(MessageError::Frames(frames.len())) };
    match sequence.as_ref().len() {
        8 => read_stat(payload.as_ref()),
        other => Err(MessageError::Sequence(other)),
    }
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
/// As [`read_message`].
pub fn read_stat(payload: &[u8]) -> Result<EngineReading, MessageError> {
    if payload.len() > MESSAGE_BYTES_MAX {
        return Err(MessageError::TooLong(payload.len()));
    }
    let mut input = Input(payload);
    let stat = match input.value(0) {
        Some(Value::Array(items)) => read_array(&mut input, items),
        Some(Value::Map(items)) => read_map(&mut input, items),
        Some(Value::Number(_) | Value::Text(_) | Value::Other) | None => None,
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

fn read_array(input: &mut Input<'_>, items: u32) -> Option<Stat> {
    let (mut stat, mut at) = (Stat::default(), 0);
    for position in 0..items {
        let number = match input.flat_value()? {
            Value::Text(tag) if position == 0 => {
                if tag != b"LoadStat" {
                    return None;
                }
                continue;
            }
            Value::Number(number) => Some(number),
            Value::Text(_) | Value::Array(_) | Value::Map(_) | Value::Other => None,
        };
        match stat.0.get_mut(at) {
            Some(field) => *field = number,
            None => return Some(stat), // what later versions add
        }
        at += 1;
    }
    (at > 0).then_some(stat)
}

fn read_map(input: &mut Input<'_>, items: u32) -> Option<Stat> {
    let (mut stat, mut known) = (Stat::default(), false);
    for _ in 0..items {
        let name = match input.flat_value()? {
            Value::Text(name) => name,
            Value::Number(_) | Value::Array(_) | Value::Map(_) | Value::Other => b"".as_slice(),
        };
        let at = match name {
            b"num_running_reqs" => Some(0),
            b"num_waiting_reqs" => Some(1),
            b"num_tokens" | b"num_used_tokens" => Some(2),
            b"max_total_num_tokens" => Some(3),
            _ => None,
        };
        let value = input.flat_value()?;
        if let Some(field) = at.and_then(|at| stat.0.get_mut(at)) {
            known = true;
            *field = if let Value::Number(number) = value { Some(number) } else { None };
        }
    }
    known.then_some(stat)
}

/// A msgpack value, as far as it matters here.
enum Value<'a> {
    Number(f64),
    Text(&'a [u8]),
    /// So many values follow.
    Array(u32),
    /// So many pairs follow.
    Map(u32),
    Other,
}

/// What is left to read. Every length is held against what is there before it is used.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    /// A big-endian number of `length` bytes, 8 at most.
    fn unsigned(&mut self, length: usize) -> Option<u64> {
        Some(self.take(length)?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn length(&mut self, bytes: usize) -> Option<u32> {
        u32::try_from(self.unsigned(bytes)?).ok()
    }

    /// The next value; what it contains is skipped.
    fn flat_value(&mut self) -> Option<Value<'a>> {
        let value = self.value(0)?;
        self.skip_content(&value, 1)?;
        Some(value)
    }

    fn skip_content(&mut self, value: &Value<'_>, depth: u32) -> Option<()> {
        let values = match value {
            Value::Array(items) => u64::from(*items),
            Value::Map(items) => 2 * u64::from(*items),
            Value::Number(_) | Value::Text(_) | Value::Other => 0,
        };
        for _ in 0..values {
            let value = self.value(depth)?;
            self.skip_content(&value, depth + 1)?;
        }
        Some(())
    }

    /// The next value's head, and all of it where it contains no others. None at the end, and beyond the depth.
    #[expect(clippy::cast_precision_loss, reason = "counts beyond 2^53 are no counts of requests")]
    fn value(&mut self, depth: u32) -> Option<Value<'a>> {
        if depth > DEPTH_MAX {
            return None;
        }
        let kind = *self.take(1)?.first()?;
        let signed = |number: u64, bytes: u32| {
            let shift = 64 - 8 * bytes;
            ((number << shift).cast_signed() >> shift) as f64
        };
        Some(match kind {
            0x00..=0x7f => Value::Number(f64::from(kind)),
            0x80..=0x8f => Value::Map(u32::from(kind & 0x0f)),
            0x90..=0x9f => Value::Array(u32::from(kind & 0x0f)),
            0xa0..=0xbf => Value::Text(self.take(usize::from(kind & 0x1f))?),
            0xc0..=0xc3 => Value::Other,
            0xc4..=0xc6 => {
                let length = self.length(1 << (kind - 0xc4))?;
                self.take(length as usize).map(|_| Value::Other)?
            }
            0xc7..=0xc9 => {
                let length = self.length(1 << (kind - 0xc7))?;
                self.take(length as usize + 1).map(|_| Value::Other)?
            }
            0xca => Value::Number(f64::from(f32::from_bits(self.length(4)?))),
            0xcb => Value::Number(f64::from_bits(self.unsigned(8)?)),
            0xcc..=0xcf => Value::Number(self.unsigned(1 << (kind - 0xcc))? as f64),
            0xd0..=0xd3 => {
                let bytes = 1 << (kind - 0xd0);
                Value::Number(signed(self.unsigned(bytes)?, u32::try_from(bytes).ok()?))
            }
            0xd4..=0xd8 => self.take((1 << (kind - 0xd4)) + 1).map(|_| Value::Other)?,
            0xd9..=0xdb => {
                let length = self.length(1 << (kind - 0xd9))?;
                Value::Text(self.take(length as usize)?)
            }
            0xdc | 0xdd => Value::Array(self.length(2 << (kind - 0xdc))?),
            0xde | 0xdf => Value::Map(self.length(2 << (kind - 0xde))?),
            0xe0..=0xff => Value::Number(f64::from(kind.cast_signed())),
        })
    }
}
