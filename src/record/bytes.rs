//! Numbers, texts and lists of a record as bytes.
//!
//! Small numbers take one byte. A reader returns `None` for bytes that no writer produces, and allocates no more than
//! the bytes justify.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use crate::protocol::{BlockHash, EngineHash, Generation, Slot, Timestamp, WorkerId};

/// Unread bytes, and the largest `u64` of a [`Recorded`] value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a>(&'a [u8], u64);

impl<'a> Reader<'a> {
    /// Numbers of tokens and blocks are so small that sums of them do not overflow.
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes, 1 << 48)
    }

    /// Numbers of which no sums are formed.
    pub(crate) fn with_any_numbers(bytes: &'a [u8]) -> Self {
        Self(bytes, u64::MAX)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The unread bytes.
    pub(crate) fn rest(self) -> &'a [u8] {
        self.0
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*taken)
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(crate) fn word(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0_u32..64).step_by(7) {
            let byte = self.u8()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                // Each number has one form: its shortest.
                return (shift == 0 || (1..=u8::MAX >> shift.saturating_sub(56)).contains(&byte)).then_some(number);
            }
        }
        None
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        u32::try_from(self.number()?).ok()
    }

    pub(crate) fn count(&mut self) -> Option<u64> {
        self.number().filter(|count| *count <= self.1)
    }

    pub(crate) fn usize(&mut self) -> Option<usize> {
        usize::try_from(self.number()?).ok()
    }

    pub(crate) fn signed(&mut self) -> Option<i64> {
        let number = self.number()?;
        Some((number >> 1).cast_signed() ^ -(number & 1).cast_signed())
    }

    /// Length of a list whose elements have at least one byte each.
    pub(crate) fn length(&mut self) -> Option<usize> {
        self.usize().filter(|length| *length <= self.0.len())
    }

    pub(crate) fn text(&mut self) -> Option<&'a str> {
        let length = self.length()?;
        std::str::from_utf8(self.bytes(length)?).ok()
    }

    pub(crate) fn list<T>(&mut self, mut read: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let length = self.length()?;
        (0..length).map(|_| read(self)).collect()
    }

    /// The inverse of [`put_words`].
    pub(crate) fn words<const N: usize>(&mut self) -> Option<[u64; N]> {
        let mask = self.number()?;
        let mut words = [0; N];
        for (at, word) in words.iter_mut().enumerate() {
            if mask >> at & 1 == 1 {
                *word = self.word()?;
            }
        }
        Some(words)
    }
}

#[inline]
pub(crate) fn put_number(to: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        to.push(number as u8 | 0x80);
        number >>= 7;
    }
    to.push(number as u8);
}

#[inline]
pub(crate) fn put_signed(to: &mut Vec<u8>, number: i64) {
    put_number(to, ((number << 1) ^ (number >> 63)).cast_unsigned());
}

#[inline]
pub(crate) fn put_word(to: &mut Vec<u8>, word: u64) {
    to.extend_from_slice(&word.to_le_bytes());
}

pub(crate) fn put_text(to: &mut Vec<u8>, text: &str) {
    put_number(to, text.len() as u64);
    to.extend_from_slice(text.as_bytes());
}

/// Words that are not 0, after a bit set of their positions.
pub(crate) fn put_words<const N: usize>(to: &mut Vec<u8>, words: &[u64; N]) {
    let mask = words.iter().rev().fold(0, |mask, word| mask << 1 | u64::from(*word != 0));
    put_number(to, mask);
    words.iter().filter(|word| **word != 0).for_each(|word| put_word(to, *word));
}

/// A value that a record contains, with one description of its bytes for writing and reading.
pub(crate) trait Recorded: Sized {
    fn put(&self, to: &mut Vec<u8>);

    fn read(from: &mut Reader<'_>) -> Option<Self>;
}

/// Implements [`Recorded`] for structs: the given fields in this order, and values of all others. `unless` names a test for
/// the default, which takes one byte.
macro_rules! recorded {
    ($($name:ident $(unless $is_default:ident)? { $($field:tt),+ $(; $($other:tt)+)? })+) => {$(
        impl $crate::record::bytes::Recorded for $name {
            #[inline]
            fn put(&self, to: &mut Vec<u8>) {
                $(if self.$is_default() {
                    return to.push(0);
                }
                to.push(1);)?
                $($crate::record::bytes::Recorded::put(&self.$field, to);)+
            }

            fn read(from: &mut $crate::record::bytes::Reader<'_>) -> Option<Self> {
                $(if !<bool as $crate::record::bytes::Recorded>::read(from)? {
                    return Some(Self::default()).filter(Self::$is_default);
                })?
                Some(Self { $($field: $crate::record::bytes::Recorded::read(from)?,)+ $($($other)+)? })
            }
        }
    )+};
}
pub(crate) use recorded;

/// Implements [`Recorded`] for enums: a byte for the variant, and its fields.
macro_rules! recorded_variants {
    ($($name:ident { $($tag:literal => $variant:ident { $($field:ident),* })+ })+) => {$(
        impl $crate::record::bytes::Recorded for $name {
            fn put(&self, to: &mut Vec<u8>) {
                match self {
                    $(Self::$variant { $($field),* } => {
                        to.push($tag);
                        $($crate::record::bytes::Recorded::put($field, to);)*
                    })+
                }
            }

            fn read(from: &mut $crate::record::bytes::Reader<'_>) -> Option<Self> {
                Some(match from.u8()? {
                    $($tag => Self::$variant { $($field: $crate::record::bytes::Recorded::read(from)?),* },)+
                    _ => return None,
                })
            }
        }
    )+};
}
pub(crate) use recorded_variants;

/// Implements [`Recorded`] by two expressions.
macro_rules! values {
    ($($type:ty: $value:ident, $to:ident => $put:expr, $read:expr;)+) => {$(
        impl Recorded for $type {
            #[inline]
            fn put(&self, $to: &mut Vec<u8>) {
                let $value = self;
                $put;
            }

            fn read(from: &mut Reader<'_>) -> Option<Self> {
                $read(from)
            }
        }
    )+};
}
pub(crate) use values;

values! {
    u32: number, to => put_number(to, (*number).into()), Reader::u32;
    u64: count, to => put_number(to, *count), Reader::count;
    usize: number, to => put_number(to, *number as u64), Reader::usize;
    f64: number, to => put_word(to, number.to_bits()), |from: &mut Reader<'_>| from.word().map(f64::from_bits);
    bool: flag, to => to.push((*flag).into()), |from: &mut Reader<'_>| from.u8().filter(|byte| *byte < 2).map(|byte| byte == 1);
    u8: byte, to => to.push(*byte), Reader::u8;
    NonZeroU32: number, to => put_number(to, number.get().into()), |from: &mut Reader<'_>| NonZeroU32::new(from.u32()?);
    EngineHash: hash, to => put_word(to, hash.0), |from: &mut Reader<'_>| from.word().map(EngineHash);
    BlockHash: hash, to => put_word(to, hash.0), |from: &mut Reader<'_>| from.word().map(BlockHash);
    Duration: duration, to => put_number(to, u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)),
        |from: &mut Reader<'_>| from.number().map(Duration::from_nanos);
    Timestamp: at, to => put_number(to, at.0), |from: &mut Reader<'_>| from.number().map(Timestamp);
    WorkerId: worker, to => put_number(to, worker.0), |from: &mut Reader<'_>| from.number().map(WorkerId);
    Slot: slot, to => put_number(to, slot.0.into()), |from: &mut Reader<'_>| from.u32().map(Slot);
    Generation: number, to => put_number(to, number.0.into()), |from: &mut Reader<'_>| from.u32().map(Generation);
    String: text, to => put_text(to, text), |from: &mut Reader<'_>| from.text().map(str::to_owned);
    BTreeMap<String, f64>: map, to => {
        put_number(to, map.len() as u64);
        map.iter().for_each(|(name, number)| {
            put_text(to, name);
            number.put(to);
        });
    }, |from: &mut Reader<'_>| Some(from.list(Recorded::read)?.into_iter().collect());
    Arc<str>: text, to => put_text(to, text), |from: &mut Reader<'_>| from.text().map(Arc::from);
}

macro_rules! lists {
    ($($list:ty where $item:ident: $($bound:path),+;)+) => {$(
        impl<$item: Recorded $(+ $bound)+> Recorded for $list {
            fn put(&self, to: &mut Vec<u8>) {
                put_number(to, self.len() as u64);
                self.iter().for_each(|item| item.put(to));
            }

            fn read(from: &mut Reader<'_>) -> Option<Self> {
                Some(from.list(Recorded::read)?.into_iter().collect())
            }
        }
    )+};
}

lists! {
    Vec<T> where T: Sized;
    VecDeque<T> where T: Sized;
    BTreeSet<T> where T: Ord;
    SmallVec<[T; 2]> where T: Sized;
}

impl<T: Recorded> Recorded for Option<T> {
    fn put(&self, to: &mut Vec<u8>) {
        self.is_some().put(to);
        self.iter().for_each(|value| value.put(to));
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        if bool::read(from)? { T::read(from).map(Some) } else { Some(None) }
    }
}

macro_rules! pointers {
    ($($pointer:ident)+) => {$(
        impl<T: Recorded> Recorded for $pointer<T> {
            fn put(&self, to: &mut Vec<u8>) {
                T::put(self, to);
            }

            fn read(from: &mut Reader<'_>) -> Option<Self> {
                T::read(from).map($pointer::new)
            }
        }
    )+};
}

pointers! { Arc Box }

impl<A: Recorded, B: Recorded> Recorded for (A, B) {
    fn put(&self, to: &mut Vec<u8>) {
        self.0.put(to);
        self.1.put(to);
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        Some((A::read(from)?, B::read(from)?))
    }
}

impl<const N: usize> Recorded for [u32; N] {
    fn put(&self, to: &mut Vec<u8>) {
        self.iter().for_each(|word| word.put(to));
    }

    fn read(from: &mut Reader<'_>) -> Option<Self> {
        let mut words = [0; N];
        for word in &mut words {
            *word = from.u32()?;
        }
        Some(words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endless_numbers_and_missing_bytes_are_refused() {
        assert_eq!(Reader::new(&[0xff; 20]).number(), None);
        assert_eq!(Reader::new(&[0x80]).number(), None);
        assert_eq!(Reader::new(&[0x80, 0]).number(), None);
        let most = [&[0xff; 9][..], &[1]].concat();
        assert_eq!(Reader::new(&most).number(), Some(u64::MAX));
        assert_eq!(Reader::new(&[&[0xff; 9][..], &[2]].concat()).number(), None);
        assert_eq!(Reader::new(&[9, b'a']).text(), None);
    }
}
