//! Msgpack items out of bytes that nobody vouches for.
//!
//! Owns the walk over the bytes. Promises to read within them, to allocate nothing, to take no declared length for
//! granted, and to pass over items of any depth without recursion. Does not know what the items mean.

use rmp::Marker;
use xxhash_rust::xxh3::Xxh3;

use super::Finding;

/// Deepest nesting that can be told from deeper ones.
pub(crate) const NESTING_CAP: usize = 32;

/// Where in eight bytes a number stands that begins with a certain marker.
#[derive(Clone, Copy)]
struct Encoding {
    /// Bits in front of the number.
    drop_front: u8,
    /// Bits around the number, once those in front are gone.
    drop_back: u8,
}

/// By marker; of no meaning for what is no such number.
const ENCODINGS: [Encoding; 256] = {
    let mut encodings = [Encoding { drop_front: 0, drop_back: 56 }; 256];
    encodings[0xcc] = Encoding { drop_front: 8, drop_back: 56 };
    encodings[0xcd] = Encoding { drop_front: 8, drop_back: 48 };
    encodings[0xce] = Encoding { drop_front: 8, drop_back: 32 };
    encodings
};

/// Bytes of such a number with its marker, by marker; 0 for what is none. Apart from the rest, for everything waits for
/// it, and finding a byte in a table of bytes takes the least.
const LENS: [u8; 256] = {
    let mut lens = [0; 256];
    let mut marker = 0;
    while marker < 0x80 {
        lens[marker] = 1;
        marker += 1;
    }
    lens[0xcc] = 2;
    lens[0xcd] = 3;
    lens[0xce] = 5;
    lens
};

impl Encoding {
    fn of(marker: u8) -> Self {
        ENCODINGS[usize::from(marker)]
    }

    /// The number at the beginning of these bytes, which has this encoding.
    fn number(self, bytes: [u8; 8]) -> u32 {
        (u64::from_be_bytes(bytes) << self.drop_front >> self.drop_back) as u32
    }
}

/// One scalar, or the head of an array or map whose items follow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Item<'a> {
    Nil,
    Bool(bool),
    Uint(u64),
    /// Below zero.
    Neg(i64),
    Float(f64),
    /// UTF-8 or not.
    Str(&'a [u8]),
    Bin(&'a [u8]),
    /// Type and data.
    Ext(&'a [u8]),
    /// Number of items.
    Array(u32),
    /// Number of pairs.
    Map(u32),
}

impl Item<'_> {
    fn signed(value: i64) -> Self {
        u64::try_from(value).map_or(Self::Neg(value), Self::Uint)
    }
}

/// A place in the bytes. A copy of it is a way back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(crate) fn bytes_left(&self) -> usize {
        self.rest.len()
    }

    /// Reads the next scalar or head.
    ///
    /// # Errors
    /// [`Finding::Truncated`] and [`Finding::Malformed`], both the end of all reading.
    pub(crate) fn item(&mut self) -> Result<Item<'a>, Finding> {
        let [marker] = self.fixed()?;
        Ok(match Marker::from_u8(marker) {
            Marker::FixPos(value) => Item::Uint(value.into()),
            Marker::FixNeg(value) => Item::signed(value.into()),
            Marker::Null => Item::Nil,
            Marker::Reserved => return Err(Finding::Malformed),
            Marker::False => Item::Bool(false),
            Marker::True => Item::Bool(true),
            Marker::U8 => Item::Uint(u8::from_be_bytes(self.fixed()?).into()),
            Marker::U16 => Item::Uint(u16::from_be_bytes(self.fixed()?).into()),
            Marker::U32 => Item::Uint(u32::from_be_bytes(self.fixed()?).into()),
            Marker::U64 => Item::Uint(u64::from_be_bytes(self.fixed()?)),
            Marker::I8 => Item::signed(i8::from_be_bytes(self.fixed()?).into()),
            Marker::I16 => Item::signed(i16::from_be_bytes(self.fixed()?).into()),
            Marker::I32 => Item::signed(i32::from_be_bytes(self.fixed()?).into()),
            Marker::I64 => Item::signed(i64::from_be_bytes(self.fixed()?)),
            Marker::F32 => Item::Float(f32::from_be_bytes(self.fixed()?).into()),
            Marker::F64 => Item::Float(f64::from_be_bytes(self.fixed()?)),
            Marker::FixStr(len) => Item::Str(self.take(len.into())?),
            Marker::Str8 => Item::Str(self.take_u8(0)?),
            Marker::Str16 => Item::Str(self.take_u16(0)?),
            Marker::Str32 => Item::Str(self.take_u32(0)?),
            Marker::Bin8 => Item::Bin(self.take_u8(0)?),
            Marker::Bin16 => Item::Bin(self.take_u16(0)?),
            Marker::Bin32 => Item::Bin(self.take_u32(0)?),
            Marker::FixExt1 => Item::Ext(self.take(2)?),
            Marker::FixExt2 => Item::Ext(self.take(3)?),
            Marker::FixExt4 => Item::Ext(self.take(5)?),
            Marker::FixExt8 => Item::Ext(self.take(9)?),
            Marker::FixExt16 => Item::Ext(self.take(17)?),
            Marker::Ext8 => Item::Ext(self.take_u8(1)?),
            Marker::Ext16 => Item::Ext(self.take_u16(1)?),
            Marker::Ext32 => Item::Ext(self.take_u32(1)?),
            Marker::FixArray(len) => Item::Array(len.into()),
            Marker::Array16 => Item::Array(u16::from_be_bytes(self.fixed()?).into()),
            Marker::Array32 => Item::Array(u32::from_be_bytes(self.fixed()?)),
            Marker::FixMap(len) => Item::Map(len.into()),
            Marker::Map16 => Item::Map(u16::from_be_bytes(self.fixed()?).into()),
            Marker::Map32 => Item::Map(u32::from_be_bytes(self.fixed()?)),
        })
    }

    /// Passes over so many items with all that is in them. Where arrays and maps lie more than `nesting_max` levels inside
    /// each other, and [`NESTING_CAP`] at most, it goes on, but says so.
    ///
    /// # Errors
    /// As [`Cursor::item`]; or [`Finding::TooDeep`], with the items passed.
    pub(crate) fn pass(&mut self, count: u64, nesting_max: usize) -> Result<(), Finding> {
        // Mostly it is one scalar, for which no levels need be laid out.
        let start = *self;
        if count == 1 && !matches!(self.item()?, Item::Array(_) | Item::Map(_)) {
            return Ok(());
        }
        *self = start;
        let nesting_max = nesting_max.min(NESTING_CAP);
        // Items still to pass in each open level; what lies too deep is counted in with the deepest. Every head takes
        // a byte, so no count outgrows the bytes times 2^33.
        let mut left = [0_u64; NESTING_CAP + 1];
        left[0] = count;
        let mut depth = 0;
        let mut too_deep = false;
        loop {
            left[depth] -= self.pass_numbers(left[depth]);
            if left[depth] == 0 {
                match depth {
                    0 if too_deep => return Err(Finding::TooDeep),
                    0 => return Ok(()),
                    _ => depth -= 1,
                }
                continue;
            }
            left[depth] -= 1;
            let n_items = match self.item()? {
                Item::Array(len) => u64::from(len),
                Item::Map(pairs) => 2 * u64::from(pairs),
                Item::Nil | Item::Bool(_) | Item::Uint(_) | Item::Neg(_) | Item::Float(_) => 0,
                Item::Str(_) | Item::Bin(_) | Item::Ext(_) => 0,
            };
            if n_items > 0 && depth < nesting_max {
                depth += 1;
            } else if n_items > 0 {
                too_deep = true;
            }
            left[depth] += n_items;
        }
    }

    /// Passes over nils and numbers in their usual encodings, up to `count_max` of them, and says how many. Most of
    /// what is passed over is tokens.
    fn pass_numbers(&mut self, count_max: u64) -> u64 {
        let mut rest = self.rest;
        let mut count = 0;
        while count < count_max {
            rest = match rest {
                [0x00..=0x7f | 0xc0, rest @ ..] | [0xcd, _, _, rest @ ..] | [0xce, _, _, _, _, rest @ ..] => rest,
                _ => break,
            };
            count += 1;
        }
        self.rest = rest;
        count
    }

    /// Reads numbers below 2^32 in the encodings that token ids come in into `numbers`, in pairs, and says how many they
    /// were. What stops it before the slice is full is for [`Cursor::item`] to look at.
    ///
    /// How long an id is cannot be foreseen, so nothing branches on it: a table says which bits of the next eight bytes
    /// are the number. What takes the time is finding where the next one begins. Hence pairs: how long the second is,
    /// is looked up for each place where it may begin, while the first one's length is still being looked up. That
    /// makes 3.6 ns an id of 4.7, on a busy machine, ids spread over a vocabulary of 150,000.
    pub(crate) fn small_numbers(&mut self, numbers: &mut [u32]) -> usize {
        let mut rest = self.rest;
        let mut count = 0;
        for pair in numbers.chunks_exact_mut(2) {
            let Some(chunk) = rest.first_chunk::<16>() else { break };
            let len = |marker: u8| LENS[usize::from(marker)];
            // A byte each, by the first one's length less one; none is four long.
            let second_lens = [chunk[1], chunk[2], chunk[3], 0xc0, chunk[5], 0xc0, 0xc0, 0xc0].map(len);
            let Some(place) = usize::from(len(chunk[0])).checked_sub(1) else { break };
            let second_len = (u64::from_le_bytes(second_lens) >> (8 * place)) as u8;
            let Some(second) = chunk[place + 1..].first_chunk() else { break };
            if second_len == 0 {
                break;
            }
            pair[0] = Encoding::of(chunk[0]).number(*chunk.first_chunk().expect("8 of 16"));
            pair[1] = Encoding::of(second[0]).number(*second);
            rest = &rest[place + 1 + usize::from(second_len)..];
            count += 2;
        }
        self.rest = rest;
        count
    }

    /// Feeds one item with all that is in it to a hash: equal items, equal bytes, however they were encoded, and
    /// no item is the beginning of another. Does not mind how deep it goes.
    ///
    /// # Errors
    /// As [`Cursor::item`].
    pub(crate) fn digest(&mut self, hasher: &mut Xxh3) -> Result<(), Finding> {
        let mut left = 1_u64;
        while left > 0 {
            left -= 1;
            match self.item()? {
                Item::Nil => hasher.update(&[0]),
                Item::Bool(value) => hasher.update(&[1, value.into()]),
                Item::Uint(value) => digest_number(hasher, 2, value),
                Item::Neg(value) => digest_number(hasher, 3, value.cast_unsigned()),
                Item::Float(value) => digest_number(hasher, 4, value.to_bits()),
                Item::Str(bytes) => digest_bytes(hasher, 5, bytes),
                Item::Bin(bytes) => digest_bytes(hasher, 6, bytes),
                Item::Ext(bytes) => digest_bytes(hasher, 7, bytes),
                Item::Array(len) => {
                    digest_number(hasher, 8, len.into());
                    left += u64::from(len);
                }
                Item::Map(pairs) => {
                    digest_number(hasher, 9, pairs.into());
                    left += 2 * u64::from(pairs);
                }
            }
        }
        Ok(())
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Finding> {
        let (taken, rest) = self.rest.split_at_checked(len).ok_or(Finding::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    /// Takes as many bytes as the next byte says, and `more`.
    fn take_u8(&mut self, more: usize) -> Result<&'a [u8], Finding> {
        let len = u8::from_be_bytes(self.fixed()?);
        self.take(usize::from(len) + more)
    }

    fn take_u16(&mut self, more: usize) -> Result<&'a [u8], Finding> {
        let len = u16::from_be_bytes(self.fixed()?);
        self.take(usize::from(len) + more)
    }

    fn take_u32(&mut self, more: usize) -> Result<&'a [u8], Finding> {
        let len = u32::from_be_bytes(self.fixed()?);
        self.take((len as usize).saturating_add(more))
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N], Finding> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(Finding::Truncated)?;
        self.rest = rest;
        Ok(*taken)
    }
}

fn digest_number(hasher: &mut Xxh3, kind: u8, value: u64) {
    hasher.update(&[kind]);
    hasher.update(&value.to_le_bytes());
}

/// With the length in front, so that two strings are not one longer one.
pub(crate) fn digest_bytes(hasher: &mut Xxh3, kind: u8, bytes: &[u8]) {
    digest_number(hasher, kind, bytes.len() as u64);
    hasher.update(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(bytes: &[u8]) -> Result<Item<'_>, Finding> {
        Cursor::new(bytes).item()
    }

    #[test]
    fn scalars_of_each_width_are_read() {
        assert_eq!(item(&[0x7f]), Ok(Item::Uint(127)));
        assert_eq!(item(&[0xff]), Ok(Item::Neg(-1)));
        assert_eq!(item(&[0xcd, 1, 2]), Ok(Item::Uint(258)));
        assert_eq!(item(&[0xd3, 0, 0, 0, 0, 0, 0, 0, 5]), Ok(Item::Uint(5)), "signed, but not below zero");
        assert_eq!(item(&[0xd1, 0xff, 0xfe]), Ok(Item::Neg(-2)));
        assert_eq!(item(&[0xca, 0x3f, 0x80, 0, 0]), Ok(Item::Float(1.0)));
        assert_eq!(item(&[0xa2, b'a', b'b']), Ok(Item::Str(b"ab")));
        assert_eq!(item(&[0xc4, 1, 9]), Ok(Item::Bin(&[9])));
        assert_eq!(item(&[0xd4, 7, 9]), Ok(Item::Ext(&[7, 9])));
        assert_eq!(item(&[0xdf, 0, 0, 1, 0]), Ok(Item::Map(256)));
    }

    #[test]
    fn what_is_not_there_is_not_read() {
        for bytes in [&[][..], &[0xcd, 1], &[0xdb, 0xff, 0xff, 0xff, 0xff, 1], &[0xc9, 0xff, 0xff, 0xff, 0xff]] {
            assert_eq!(item(bytes), Err(Finding::Truncated), "{bytes:?}");
        }
        assert_eq!(item(&[0xc1]), Err(Finding::Malformed));
    }

    #[test]
    fn runs_of_numbers_end_at_the_first_other_item() {
        let numbers = [1, 0x7f, 0x80, 0xff, 0x100, 0xffff, 0x1_0000, u32::MAX, 5, 0x1234, 0x12_3456, 0];
        let encoded = |number: u32| match number.to_be_bytes() {
            [0, 0, 0, d @ ..0x80] => vec![d],
            [0, 0, 0, d] => vec![0xcc, d],
            [0, 0, c, d] => vec![0xcd, c, d],
            bytes => [&[0xce][..], &bytes].concat(),
        };
        for first in 0..numbers.len() {
            for second in 0..numbers.len() {
                let (a, b) = (numbers[first], numbers[second]);
                let bytes = [encoded(a), encoded(b), encoded(a), vec![0xc0; 16]].concat();
                let mut cursor = Cursor::new(&bytes);
                let mut read = [0; 4];
                assert_eq!((cursor.small_numbers(&mut read), &read[..2]), (2, &[a, b][..]));
                assert_eq!(cursor.item(), Ok(Item::Uint(a.into())));
                assert_eq!(cursor.item(), Ok(Item::Nil));
            }
        }
    }

    #[test]
    fn items_are_passed_whole() {
        let mut cursor =
            Cursor::new(&[0x92, 0x81, 0xa1, b'k', 0x93, 1, 0xc0, 0xc2, 0xcf, 1, 2, 3, 4, 5, 6, 7, 8, 0x2a]);
        assert_eq!(cursor.pass(1, 3), Ok(()));
        assert_eq!(cursor.item(), Ok(Item::Uint(42)));
        assert_eq!(Cursor::new(&[0xdd, 0xff, 0xff, 0xff, 0xff, 1]).pass(1, 3), Err(Finding::Truncated));
    }

    #[test]
    fn what_lies_too_deep_is_passed_and_told() {
        let nested = |depth: usize| [vec![0x91; depth], vec![0x01, 0x2a]].concat();
        for (depth, passed) in [(3, Ok(())), (4, Err(Finding::TooDeep)), (100_000, Err(Finding::TooDeep))] {
            let bytes = nested(depth);
            let mut cursor = Cursor::new(&bytes);
            assert_eq!(cursor.pass(1, 3), passed, "{depth} levels");
            assert_eq!(cursor.item(), Ok(Item::Uint(42)), "{depth} levels");
        }
    }

    #[test]
    fn digests_tell_items_apart_but_not_encodings() {
        let digest = |bytes: &[u8]| {
            let mut hasher = Xxh3::with_seed(2);
            Cursor::new(bytes).digest(&mut hasher).expect("whole");
            hasher.digest()
        };
        assert_eq!(digest(&[0x05]), digest(&[0xcd, 0, 5]));
        assert_eq!(digest(&[0xa1, b'a']), digest(&[0xd9, 1, b'a']));
        assert_ne!(digest(&[0xa1, b'a']), digest(&[0xc4, 1, b'a']));
        assert_ne!(digest(&[0x92, 0xa1, b'a', 0xa1, b'b']), digest(&[0x91, 0xa2, b'a', b'b']));
    }
}
