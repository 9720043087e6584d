//! One event out of its bytes: which field stands where, in each of the dialects.
//!
//! Owns the layouts: an array with the tag first, or a map with the tag as `type`, as vLLM and SGLang have published
//! them, shorter and longer than known. Promises that token ids and hashes are read in one pass, into buffers that
//! are used again, and never more of them than the limits allow. Leaves what the fields mean to the decoder.

use super::msgpack::{Cursor, Item};
use super::{Finding, Limits};

/// What kind of event it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    Stored,
    Removed,
    Cleared,
    /// Says of itself that it means nothing here.
    Ignored,
}

impl Tag {
    fn of(item: Item<'_>) -> Result<Self, Finding> {
        let Item::Str(name) = item else { return Err(Finding::WrongType) };
        match name {
            b"BlockStored" => Ok(Self::Stored),
            b"BlockRemoved" => Ok(Self::Removed),
            b"AllBlocksCleared" => Ok(Self::Cleared),
            b"Ignored" => Ok(Self::Ignored),
            _ => Err(Finding::UnknownEvent),
        }
    }
}

/// What may be known about an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    BlockHashes,
    ParentBlockHash,
    TokenIds,
    BlockSize,
    LoraId,
    LoraName,
    CacheSalt,
    ExtraKeys,
    Medium,
    GroupIdx,
    SpecKind,
    Locality,
    /// Not needed, or not known.
    Other,
}

impl Field {
    /// The field under a key of an event that is a map.
    fn named(tag: Tag, key: &[u8]) -> Self {
        let field = match key {
            b"block_hashes" => Self::BlockHashes,
            b"parent_block_hash" => Self::ParentBlockHash,
            b"token_ids" => Self::TokenIds,
            b"block_size" => Self::BlockSize,
            b"lora_id" => Self::LoraId,
            b"lora_name" => Self::LoraName,
            b"cache_salt" => Self::CacheSalt,
            b"extra_keys" => Self::ExtraKeys,
            b"medium" => Self::Medium,
            b"group_idx" => Self::GroupIdx,
            b"kv_cache_spec_kind" => Self::SpecKind,
            b"locality" => Self::Locality,
            _ => Self::Other,
        };
        if field.belongs_to(tag) { field } else { Self::Other }
    }

    /// The field at a position of an event that is an array, the tag being at 0.
    fn at(tag: Tag, position: u32) -> Self {
        match (tag, position) {
            (Tag::Stored | Tag::Removed, 1) => Self::BlockHashes,
            (Tag::Stored, 2) => Self::ParentBlockHash,
            (Tag::Stored, 3) => Self::TokenIds,
            (Tag::Stored, 4) => Self::BlockSize,
            (Tag::Stored, 5) => Self::LoraId,
            (Tag::Stored, 6) | (Tag::Removed, 2) => Self::Medium,
            (Tag::Stored, 7) => Self::LoraName,
            (Tag::Stored, 8) => Self::ExtraKeys,
            (Tag::Stored, 9) | (Tag::Removed, 3) => Self::GroupIdx,
            (Tag::Stored, 10) | (Tag::Removed, 4) => Self::SpecKind,
            (Tag::Stored, 12) | (Tag::Removed, 6) => Self::Locality,
            _ => Self::Other,
        }
    }

    /// Whether the field says something about such an event; elsewhere it may be anything.
    fn belongs_to(self, tag: Tag) -> bool {
        match self {
            Self::Locality => tag != Tag::Ignored,
            Self::BlockHashes | Self::Medium | Self::GroupIdx | Self::SpecKind => {
                matches!(tag, Tag::Stored | Tag::Removed)
            }
            Self::ParentBlockHash | Self::TokenIds | Self::BlockSize => tag == Tag::Stored,
            Self::LoraId | Self::LoraName | Self::CacheSalt | Self::ExtraKeys => tag == Tag::Stored,
            Self::Other => true,
        }
    }

    /// Whether a new release may have put something else in the field's place: behind the fields that arrays have
    /// always had.
    fn in_tail(self) -> bool {
        matches!(self, Self::LoraName | Self::ExtraKeys | Self::GroupIdx | Self::SpecKind | Self::Locality)
    }
}

/// How tokens came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum TokenForm {
    /// Not at all.
    #[default]
    None,
    /// As ids.
    Ids,
    /// As EAGLE's pairs of neighbours.
    Pairs,
}

/// What one event brings in numbers. Used again for the next.
#[derive(Debug, Default)]
pub(super) struct Lists {
    /// Engine hashes.
    pub(super) hashes: Vec<u64>,
    /// Token ids, forgotten before the decoder returns.
    pub(super) tokens: Vec<u32>,
}

impl Lists {
    /// Capacity that is worth keeping between batches, in items of each list.
    const KEPT: usize = 16 * 1024;

    /// Forgets the tokens of an event, not only their number: they are what users wrote.
    pub(super) fn wipe(&mut self) {
        self.tokens.fill(0);
        self.tokens.clear();
        self.hashes.clear();
    }

    /// Gives back what a large event made it take.
    pub(super) fn shrink(&mut self) {
        self.tokens.shrink_to(Self::KEPT);
        self.hashes.shrink_to(Self::KEPT);
    }
}

/// One event's fields beside its lists; none where it does not say.
#[derive(Debug)]
pub(super) struct Event<'a> {
    pub(super) tag: Tag,
    has_hashes: bool,
    pub(super) parent: Option<u64>,
    pub(super) token_form: TokenForm,
    pub(super) block_size: Option<u64>,
    /// Any item, at most `lora_name` says more.
    pub(super) lora_id: Option<Cursor<'a>>,
    pub(super) lora_name: Option<&'a str>,
    pub(super) cache_salt: Option<&'a str>,
    pub(super) extra_keys: Option<Cursor<'a>>,
    /// What stands in the place of an adapter's name, and of extra keys, and is neither.
    pub(super) odd_keys: [Option<Cursor<'a>>; 2],
    pub(super) medium: Option<&'a [u8]>,
    pub(super) group_idx: Option<u64>,
    pub(super) spec_kind: Option<&'a [u8]>,
    pub(super) locality: Option<&'a [u8]>,
    /// Hashes that were none.
    pub(super) bad_hashes: u64,
    /// Whether a token was none.
    pub(super) has_bad_token: bool,
    /// Items of another type than stands there, without which the event can be used.
    pub(super) misplaced: u64,
}

impl<'a> Event<'a> {
    /// No event yet.
    pub(super) fn new() -> Self {
        Self {
            tag: Tag::Ignored,
            has_hashes: false,
            parent: None,
            token_form: TokenForm::None,
            block_size: None,
            lora_id: None,
            lora_name: None,
            cache_salt: None,
            extra_keys: None,
            odd_keys: [None; 2],
            medium: None,
            group_idx: None,
            spec_kind: None,
            locality: None,
            bad_hashes: 0,
            has_bad_token: false,
            misplaced: 0,
        }
    }

    /// Reads an event and what it lists, in place: it is large, and most events are short.
    ///
    /// # Errors
    /// Why it cannot be used. The cursor is then somewhere in the event.
    pub(super) fn read(&mut self, cursor: &mut Cursor<'a>, limits: &Limits, lists: &mut Lists) -> Result<(), Finding> {
        lists.wipe();
        let head = cursor.item()?;
        if let Item::Array(len) = head {
            self.read_array(len, cursor, limits, lists)?;
        } else if let Item::Map(pairs) = head {
            self.read_map(pairs, cursor, limits, lists)?;
        } else {
            return Err(Finding::WrongType);
        }
        let is_complete = match self.tag {
            Tag::Stored => self.has_hashes && self.block_size.is_some(),
            Tag::Removed => self.has_hashes,
            Tag::Cleared | Tag::Ignored => true,
        };
        if is_complete { Ok(()) } else { Err(Finding::WrongShape) }
    }

    fn read_array(
        &mut self,
        len: u32,
        cursor: &mut Cursor<'a>,
        limits: &Limits,
        lists: &mut Lists,
    ) -> Result<(), Finding> {
        if len == 0 {
            return Err(Finding::WrongShape);
        }
        self.tag = Tag::of(cursor.item()?)?;
        for position in 1..len {
            let field = Field::at(self.tag, position);
            let start = *cursor;
            match self.read_field(field, cursor, limits, lists) {
                Err(Finding::WrongType) if field.in_tail() => {
                    *cursor = start;
                    cursor.pass(1, limits.nesting_max)?;
                    self.misplaced(field, start)?;
                }
                read => read?,
            }
        }
        Ok(())
    }

    /// Something else stands in the tail of an array than was expected there. SGLang has put a map with the salt where
    /// vLLM has the adapter's name.
    fn misplaced(&mut self, field: Field, at: Cursor<'a>) -> Result<(), Finding> {
        let mut cursor = at;
        if field == Field::LoraName
            && let Item::Map(1) = cursor.item()?
            && cursor.item()? == Item::Str(b"cache_salt")
            && let Ok(salt) = optional(&mut cursor, text)
        {
            self.cache_salt = salt;
        } else if field == Field::LoraName {
            self.odd_keys[0] = Some(at);
        } else {
            self.misplaced += 1;
        }
        Ok(())
    }

    fn read_map(
        &mut self,
        pairs: u32,
        cursor: &mut Cursor<'a>,
        limits: &Limits,
        lists: &mut Lists,
    ) -> Result<(), Finding> {
        self.tag = find_tag(pairs, *cursor, limits)?;
        for _ in 0..pairs {
            let start = *cursor;
            let field = if let Item::Str(key) = cursor.item()? {
                Field::named(self.tag, key)
            } else {
                // Nobody's key. It may be a whole array.
                *cursor = start;
                cursor.pass(1, limits.nesting_max)?;
                Field::Other
            };
            self.read_field(field, cursor, limits, lists)?;
        }
        Ok(())
    }

    fn read_field(
        &mut self,
        field: Field,
        cursor: &mut Cursor<'a>,
        limits: &Limits,
        lists: &mut Lists,
    ) -> Result<(), Finding> {
        match field {
            Field::BlockHashes => self.read_hashes(cursor, limits, &mut lists.hashes)?,
            Field::ParentBlockHash => {
                let parent = cursor.item()?;
                self.parent = if parent == Item::Nil { None } else { Some(hash(parent).ok_or(Finding::BadHash)?) };
            }
            Field::TokenIds => self.read_tokens(cursor, limits, &mut lists.tokens)?,
            Field::BlockSize => self.block_size = optional(cursor, number)?,
            Field::LoraId => self.lora_id = anything(cursor, limits)?,
            Field::LoraName => self.lora_name = optional(cursor, text)?,
            Field::CacheSalt => self.cache_salt = optional(cursor, text)?,
            Field::ExtraKeys => {
                let is_array = matches!({ *cursor }.item()?, Item::Array(_));
                let keys = anything(cursor, limits)?;
                (self.extra_keys, self.odd_keys[1]) = if is_array { (keys, None) } else { (None, keys) };
            }
            Field::Medium => self.medium = optional(cursor, bytes)?,
            Field::GroupIdx => self.group_idx = optional(cursor, number)?,
            Field::SpecKind => self.spec_kind = optional(cursor, bytes)?,
            Field::Locality => self.locality = optional(cursor, bytes)?,
            Field::Other => cursor.pass(1, limits.nesting_max)?,
        }
        Ok(())
    }

    /// Reads the hashes of an event. A bad one ends a store's list, for what follows it has lost its place; of a
    /// removal it costs itself.
    fn read_hashes(&mut self, cursor: &mut Cursor<'a>, limits: &Limits, hashes: &mut Vec<u64>) -> Result<(), Finding> {
        let Item::Array(len) = cursor.item()? else { return Err(Finding::WrongType) };
        let len = len as usize;
        if len > limits.hashes_max {
            return Err(Finding::TooLarge);
        }
        self.has_hashes = true;
        hashes.clear();
        // No more than there are bytes for, whatever the array says of its length.
        hashes.reserve(len.min(cursor.bytes_left()));
        for position in 0..len {
            let start = *cursor;
            if let Some(hash) = hash(cursor.item()?) {
                hashes.push(hash);
                continue;
            }
            self.bad_hashes += 1;
            *cursor = start;
            if self.tag == Tag::Stored {
                return cursor.pass((len - position) as u64, limits.nesting_max);
            }
            cursor.pass(1, limits.nesting_max)?;
        }
        Ok(())
    }

    /// Reads ids, or pairs as the ids they stand for: one more than there are pairs. A bad one ends the list.
    fn read_tokens(&mut self, cursor: &mut Cursor<'a>, limits: &Limits, tokens: &mut Vec<u32>) -> Result<(), Finding> {
        let Item::Array(len) = cursor.item()? else { return Err(Finding::WrongType) };
        let len = len as usize;
        if len > limits.tokens_max {
            return Err(Finding::TooLarge);
        }
        tokens.clear();
        self.token_form = match { *cursor }.item() {
            _ if len == 0 => TokenForm::None,
            Ok(Item::Array(_)) => TokenForm::Pairs,
            _ => TokenForm::Ids,
        };
        let good = match self.token_form {
            TokenForm::None => 0,
            TokenForm::Ids => read_ids(len, cursor, tokens)?,
            TokenForm::Pairs => read_pairs(len, cursor, tokens)?,
        };
        self.has_bad_token = good < len;
        cursor.pass((len - good) as u64, limits.nesting_max)
    }
}

/// Reads ids up to the first bad one, and says how many there were. No more room than there are bytes for is made,
/// whatever the array says of its length.
fn read_ids(len: usize, cursor: &mut Cursor<'_>, tokens: &mut Vec<u32>) -> Result<usize, Finding> {
    tokens.resize(len.min(cursor.bytes_left()), 0);
    let mut good = 0;
    while good < len {
        good += cursor.small_numbers(&mut tokens[good..]);
        if good == len {
            break;
        }
        // One in an unusual encoding, or near the end of the bytes, or none.
        let start = *cursor;
        let (Some(token), Some(to)) = (token(cursor.item()?), tokens.get_mut(good)) else {
            *cursor = start;
            break;
        };
        *to = token;
        good += 1;
    }
    tokens.truncate(good);
    Ok(good)
}

/// Reads pairs up to the first bad one, and says how many there were.
fn read_pairs(len: usize, cursor: &mut Cursor<'_>, tokens: &mut Vec<u32>) -> Result<usize, Finding> {
    // A pair takes three bytes at least.
    tokens.reserve(len.min(cursor.bytes_left() / 3) + 1);
    for position in 0..len {
        let start = *cursor;
        if !read_pair(cursor, tokens)? {
            *cursor = start;
            return Ok(position);
        }
    }
    Ok(len)
}

/// The tag of an event that is a map. It comes first, but nothing says that it must.
fn find_tag(pairs: u32, mut cursor: Cursor<'_>, limits: &Limits) -> Result<Tag, Finding> {
    for _ in 0..pairs {
        let start = cursor;
        if cursor.item()? == Item::Str(b"type") {
            return Tag::of(cursor.item()?);
        }
        cursor = start;
        cursor.pass(2, limits.nesting_max)?;
    }
    Err(Finding::WrongShape)
}

/// Appends a pair of neighbours to the tokens that the pairs before it stand for. False if it is no such pair.
fn read_pair(cursor: &mut Cursor<'_>, tokens: &mut Vec<u32>) -> Result<bool, Finding> {
    if cursor.item()? != Item::Array(2) {
        return Ok(false);
    }
    let (Some(first), Some(second)) = (token(cursor.item()?), token(cursor.item()?)) else { return Ok(false) };
    match tokens.last() {
        None => tokens.push(first),
        Some(last) if *last == first => {}
        Some(_) => return Ok(false),
    }
    tokens.push(second);
    Ok(true)
}

/// A block hash in any of its forms, so that all forms of one agree: of a binary one the last eight bytes, which is
/// what vLLM makes of it where it publishes integers.
fn hash(item: Item<'_>) -> Option<u64> {
    match item {
        Item::Uint(hash) => Some(hash),
        Item::Neg(hash) => Some(hash.cast_unsigned()),
        Item::Bin(bytes) => bytes.last_chunk().map(|bytes| u64::from_be_bytes(*bytes)),
        Item::Nil | Item::Bool(_) | Item::Float(_) | Item::Str(_) | Item::Ext(_) | Item::Array(_) | Item::Map(_) => {
            None
        }
    }
}

fn token(item: Item<'_>) -> Option<u32> {
    if let Item::Uint(token) = item { u32::try_from(token).ok() } else { None }
}

fn number(item: Item<'_>) -> Option<u64> {
    if let Item::Uint(number) = item { Some(number) } else { None }
}

fn bytes(item: Item<'_>) -> Option<&[u8]> {
    if let Item::Str(bytes) = item { Some(bytes) } else { None }
}

fn text(item: Item<'_>) -> Option<&str> {
    bytes(item).and_then(|bytes| str::from_utf8(bytes).ok())
}

/// A value, or nil for none.
fn optional<'a, T>(cursor: &mut Cursor<'a>, read: impl FnOnce(Item<'a>) -> Option<T>) -> Result<Option<T>, Finding> {
    let item = cursor.item()?;
    if item == Item::Nil { Ok(None) } else { Ok(Some(read(item).ok_or(Finding::WrongType)?)) }
}

/// Where an item begins that is read later, or nil for none.
fn anything<'a>(cursor: &mut Cursor<'a>, limits: &Limits) -> Result<Option<Cursor<'a>>, Finding> {
    let start = *cursor;
    cursor.pass(1, limits.nesting_max)?;
    let is_nil = { start }.item()? == Item::Nil;
    Ok((!is_nil).then_some(start))
}
