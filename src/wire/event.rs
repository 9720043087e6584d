//! Parser of one KV event: the fields of each dialect.
//!
//! Reads events as arrays that start with the tag, or as maps with the tag under `type`, in the layouts of vLLM and
//! SGLang, including shorter and longer ones. Token ids and hashes are read in one pass into reused buffers, within the
//! limits. The decoder interprets the fields.

use super::msgpack::{Cursor, MsgpackItem};
use super::{DecoderLimits, Finding};

/// Event type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tag {
    Stored,
    Removed,
    Cleared,
    /// Declared by the engine as an event without effect.
    #[default]
    Ignored,
}

impl Tag {
    fn of(item: MsgpackItem<'_>) -> Result<Self, Finding> {
        let MsgpackItem::Str(name) = item else { return Err(Finding::WrongType) };
        match name {
            b"BlockStored" => Ok(Self::Stored),
            b"BlockRemoved" => Ok(Self::Removed),
            b"AllBlocksCleared" => Ok(Self::Cleared),
            b"Ignored" => Ok(Self::Ignored),
            _ => Err(Finding::UnknownEvent),
        }
    }
}

/// Field of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EventField {
    BlockHashes,
    ParentBlockHash,
    TokenIds,
    BlockSize,
    Lookahead,
    LoraId,
    LoraName,
    CacheSalt,
    ExtraKeys,
    Medium,
    GroupIdx,
    SpecKind,
    SpecWindow,
    Locality,
    /// Unused or unknown.
    Other,
}

impl EventField {
    /// The field for a key of a map event.
    fn named(tag: Tag, key: &[u8]) -> Self {
        let field = match key {
            b"block_hashes" => Self::BlockHashes,
            b"parent_block_hash" => Self::ParentBlockHash,
            b"token_ids" => Self::TokenIds,
            b"block_size" => Self::BlockSize,
            b"lookahead_token_ids" => Self::Lookahead,
            b"lora_id" => Self::LoraId,
            b"lora_name" => Self::LoraName,
            b"cache_salt" => Self::CacheSalt,
            // TensorRT-LLM has images there, in a form of its own.
            b"extra_keys" | b"mm_keys" => Self::ExtraKeys,
            b"medium" => Self::Medium,
            b"group_idx" => Self::GroupIdx,
            b"kv_cache_spec_kind" => Self::SpecKind,
            b"kv_cache_spec_sliding_window" => Self::SpecWindow,
            b"locality" => Self::Locality,
            _ => Self::Other,
        };
        if field.belongs_to(tag) { field } else { Self::Other }
    }

    /// The field at a position of an array event; the tag is at position 0.
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
            (Tag::Stored, 11) => Self::SpecWindow,
            (Tag::Stored, 12) | (Tag::Removed, 6) => Self::Locality,
            _ => Self::Other,
        }
    }

    /// Whether the field is defined for events with this tag; otherwise its value is ignored.
    fn belongs_to(self, tag: Tag) -> bool {
        match self {
            Self::Locality => tag != Tag::Ignored,
            Self::Medium => tag != Tag::Ignored,
            Self::BlockHashes | Self::GroupIdx | Self::SpecKind => matches!(tag, Tag::Stored | Tag::Removed),
            Self::ParentBlockHash | Self::TokenIds | Self::BlockSize | Self::SpecWindow => tag == Tag::Stored,
            Self::Lookahead | Self::LoraId | Self::LoraName | Self::CacheSalt | Self::ExtraKeys => tag == Tag::Stored,
            Self::Other => true,
        }
    }

    /// Whether another release may use the position for another field: the positions after the original fields of array
    /// events.
    fn in_tail(self) -> bool {
        matches!(
            self,
            Self::LoraName | Self::ExtraKeys | Self::GroupIdx | Self::SpecKind | Self::SpecWindow | Self::Locality
        )
    }
}

/// Encoding of the tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum TokenForm {
    /// No tokens.
    #[default]
    None,
    /// Token ids.
    Ids,
    /// EAGLE pairs of neighbouring tokens.
    Pairs,
}

/// Number lists of one event, reused for the next, and the limits of an event.
#[derive(Debug)]
pub(super) struct Lists {
    /// Engine hashes.
    pub(super) hashes: Vec<u64>,
    /// Token ids, erased before the decoder returns.
    pub(super) tokens: Vec<u32>,
    limits: DecoderLimits,
}

impl Lists {
    /// Capacity kept between batches, in items per list.
    const KEPT: usize = 16 * 1024;

    pub(super) fn new(limits: DecoderLimits) -> Self {
        Self { hashes: Vec::new(), tokens: Vec::new(), limits }
    }

    /// Overwrites the tokens of an event, since they encode user text, and clears the lists.
    pub(super) fn wipe(&mut self) {
        self.tokens.fill(0);
        self.tokens.clear();
        self.hashes.clear();
    }

    /// Frees the memory of large events.
    pub(super) fn shrink(&mut self) {
        self.tokens.shrink_to(Self::KEPT);
        self.hashes.shrink_to(Self::KEPT);
    }
}

/// Fields of one event without its lists; `None` for absent fields.
#[derive(Debug, Default)]
pub(super) struct WireEvent<'a> {
    pub(super) tag: Tag,
    has_hashes: bool,
    pub(super) parent: Option<u64>,
    pub(super) token_form: TokenForm,
    pub(super) block_size: Option<u64>,
    /// The tokens behind each block.
    lookahead: Option<Cursor<'a>>,
    /// Any item; ignored if `lora_name` is set.
    pub(super) lora_id: Option<Cursor<'a>>,
    pub(super) lora_name: Option<&'a str>,
    pub(super) cache_salt: Option<&'a str>,
    pub(super) extra_keys: Option<Cursor<'a>>,
    /// Items of an unexpected type in the fields of the adapter name and of the extra keys.
    pub(super) odd_keys: [Option<Cursor<'a>>; 2],
    pub(super) medium: Option<&'a [u8]>,
    pub(super) group_idx: Option<u64>,
    pub(super) spec_kind: Option<&'a [u8]>,
    /// Sliding window of the group in tokens.
    pub(super) spec_window: Option<u64>,
    pub(super) locality: Option<&'a [u8]>,
    /// Number of invalid hashes.
    pub(super) bad_hashes: u64,
    /// Whether a token was invalid.
    pub(super) has_bad_token: bool,
    /// Items of an unexpected type in fields that the event does not require.
    pub(super) misplaced: u64,
}

impl<'a> WireEvent<'a> {
    /// Parses an event and its lists in place: the struct is large, and most events are short.
    ///
    /// # Errors
    /// The reason for which the event is unusable. The cursor is then at any position inside the event.
    pub(super) fn read(&mut self, cursor: &mut Cursor<'a>, lists: &mut Lists) -> Result<(), Finding> {
        lists.wipe();
        let head = cursor.item()?;
        if let MsgpackItem::Array(len) = head {
            self.read_array(len, cursor, lists)?;
        } else if let MsgpackItem::Map(pairs) = head {
            self.read_map(pairs, cursor, lists)?;
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

    /// The token behind the last block, which vLLM publishes apart from those of the blocks if it hashes EAGLE pairs.
    pub(super) fn next_token(&self, limits: &DecoderLimits) -> Option<u32> {
        let mut cursor = self.lookahead?;
        let MsgpackItem::Array(blocks @ 1..) = cursor.item().ok()? else { return None };
        cursor.pass(u64::from(blocks - 1), limits.nesting_max).ok()?;
        let MsgpackItem::Array(1..) = cursor.item().ok()? else { return None };
        token(cursor.item().ok()?)
    }

    /// The fields of an unreadable removal at `cursor` that decide which blocks it is about. `None` if they are unreadable,
    /// too.
    #[cold]
    pub(super) fn skimmed_removal(mut cursor: Cursor<'a>, limits: &DecoderLimits) -> Option<Self> {
        let mut event = Self::default();
        let head = cursor.item().ok()?;
        let (MsgpackItem::Array(len) | MsgpackItem::Map(len)) = head else { return None };
        for position in 0..len {
            let field = if let MsgpackItem::Map(_) = head {
                let mut key = cursor;
                cursor.pass(1, limits.nesting_max).ok()?;
                let MsgpackItem::Str(name) = key.item().ok()? else { return None };
                EventField::named(Tag::Removed, name)
            } else {
                EventField::at(Tag::Removed, position)
            };
            match field {
                EventField::Medium => event.medium = optional(&mut cursor, bytes).ok()?,
                EventField::GroupIdx => event.group_idx = optional(&mut cursor, number).ok()?,
                EventField::SpecKind => event.spec_kind = optional(&mut cursor, bytes).ok()?,
                EventField::Locality => event.locality = optional(&mut cursor, bytes).ok()?,
                _ => _ = cursor.pass(1, limits.nesting_max),
            }
        }
        Some(event)
    }

    fn read_array(&mut self, len: u32, cursor: &mut Cursor<'a>, lists: &mut Lists) -> Result<(), Finding> {
        if len == 0 {
            return Err(Finding::WrongShape);
        }
        self.tag = Tag::of(cursor.item()?)?;
        for position in 1..len {
            let field = EventField::at(self.tag, position);
            let start = *cursor;
            match self.read_field(field, cursor, lists) {
                Err(Finding::WrongType) if field.in_tail() => {
                    *cursor = start;
                    cursor.pass(1, lists.limits.nesting_max)?;
                    self.misplaced(field, start)?;
                }
                read => read?,
            }
        }
        Ok(())
    }

    /// Handles an item of an unexpected type at the end of an array event. SGLang publishes a map with the salt at the
    /// position of vLLM's adapter name.
    fn misplaced(&mut self, field: EventField, at: Cursor<'a>) -> Result<(), Finding> {
        let mut cursor = at;
        if field == EventField::LoraName
            && let MsgpackItem::Map(1) = cursor.item()?
            && cursor.item()? == MsgpackItem::Str(b"cache_salt")
            && let Ok(salt) = optional(&mut cursor, text)
        {
            self.cache_salt = salt;
        } else if field == EventField::LoraName {
            self.odd_keys[0] = Some(at);
        } else {
            self.misplaced += 1;
        }
        Ok(())
    }

    fn read_map(&mut self, pairs: u32, cursor: &mut Cursor<'a>, lists: &mut Lists) -> Result<(), Finding> {
        self.tag = find_tag(pairs, *cursor, &lists.limits)?;
        for _ in 0..pairs {
            let start = *cursor;
            let field = if let MsgpackItem::Str(key) = cursor.item()? {
                EventField::named(self.tag, key)
            } else {
                // Unknown key, possibly a nested item.
                *cursor = start;
                cursor.pass(1, lists.limits.nesting_max)?;
                EventField::Other
            };
            self.read_field(field, cursor, lists)?;
        }
        Ok(())
    }

    fn read_field(&mut self, field: EventField, cursor: &mut Cursor<'a>, lists: &mut Lists) -> Result<(), Finding> {
        match field {
            EventField::BlockHashes => self.read_hashes(cursor, lists)?,
            EventField::ParentBlockHash => {
                let parent = cursor.item()?;
                self.parent =
                    if parent == MsgpackItem::Nil { None } else { Some(hash(parent).ok_or(Finding::BadHash)?) };
            }
            EventField::TokenIds => self.read_tokens(cursor, lists)?,
            EventField::BlockSize => self.block_size = optional(cursor, number)?,
            EventField::Lookahead => self.lookahead = deferred(cursor, &lists.limits)?,
            EventField::LoraId => self.lora_id = deferred(cursor, &lists.limits)?,
            EventField::LoraName => self.lora_name = optional(cursor, text)?,
            EventField::CacheSalt => self.cache_salt = optional(cursor, text)?,
            EventField::ExtraKeys => {
                let is_array = matches!({ *cursor }.item()?, MsgpackItem::Array(_));
                let keys = deferred(cursor, &lists.limits)?;
                (self.extra_keys, self.odd_keys[1]) = if is_array { (keys, None) } else { (None, keys) };
            }
            EventField::Medium => self.medium = optional(cursor, bytes)?,
            EventField::GroupIdx => self.group_idx = optional(cursor, number)?,
            EventField::SpecKind => self.spec_kind = optional(cursor, bytes)?,
            EventField::SpecWindow => self.spec_window = optional(cursor, number)?,
            EventField::Locality => self.locality = optional(cursor, bytes)?,
            EventField::Other => cursor.pass(1, lists.limits.nesting_max)?,
        }
        Ok(())
    }

    /// Reads the hashes of an event. In a store, an invalid hash ends the list, because the following blocks lose their
    /// position. In a removal, only the invalid hash is skipped.
    fn read_hashes(&mut self, cursor: &mut Cursor<'a>, lists: &mut Lists) -> Result<(), Finding> {
        let MsgpackItem::Array(len) = cursor.item()? else { return Err(Finding::WrongType) };
        let len = len as usize;
        if len > lists.limits.hashes_max {
            return Err(Finding::TooLarge);
        }
        self.has_hashes = true;
        lists.hashes.clear();
        // Reserves at most one hash per remaining byte, independent of the declared array length.
        lists.hashes.reserve(len.min(cursor.bytes_left()));
        for position in 0..len {
            let start = *cursor;
            if let Some(hash) = hash(cursor.item()?) {
                lists.hashes.push(hash);
                continue;
            }
            self.bad_hashes += 1;
            *cursor = start;
            if self.tag == Tag::Stored {
                return cursor.pass((len - position) as u64, lists.limits.nesting_max);
            }
            cursor.pass(1, lists.limits.nesting_max)?;
        }
        Ok(())
    }

    /// Reads token ids, or converts pairs to ids: one id more than pairs. An invalid token ends the list.
    fn read_tokens(&mut self, cursor: &mut Cursor<'a>, lists: &mut Lists) -> Result<(), Finding> {
        let MsgpackItem::Array(len) = cursor.item()? else { return Err(Finding::WrongType) };
        let len = len as usize;
        if len > lists.limits.tokens_max {
            return Err(Finding::TooLarge);
        }
        lists.tokens.clear();
        self.token_form = match { *cursor }.item() {
            _ if len == 0 => TokenForm::None,
            Ok(MsgpackItem::Array(_)) => TokenForm::Pairs,
            _ => TokenForm::Ids,
        };
        let good = match self.token_form {
            TokenForm::None => 0,
            TokenForm::Ids => read_ids(len, cursor, &mut lists.tokens)?,
            TokenForm::Pairs => read_pairs(len, cursor, &mut lists.tokens)?,
        };
        self.has_bad_token = good < len;
        cursor.pass((len - good) as u64, lists.limits.nesting_max)
    }
}

/// Reads token ids up to the first invalid one and returns their number. Allocates at most one id per remaining byte,
/// independent of the declared array length.
fn read_ids(len: usize, cursor: &mut Cursor<'_>, tokens: &mut Vec<u32>) -> Result<usize, Finding> {
    tokens.resize(len.min(cursor.bytes_left()), 0);
    let mut good = 0;
    while good < len {
        good += cursor.small_numbers(&mut tokens[good..]);
        if good == len {
            break;
        }
        // An id in an uncommon encoding or near the end of the bytes, or an invalid item.
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

/// Reads pairs up to the first invalid one and returns their number.
fn read_pairs(len: usize, cursor: &mut Cursor<'_>, tokens: &mut Vec<u32>) -> Result<usize, Finding> {
    // A pair has at least three bytes.
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

/// Tag of a map event. Usually the first key, but its position is not specified.
fn find_tag(pairs: u32, mut cursor: Cursor<'_>, limits: &DecoderLimits) -> Result<Tag, Finding> {
    for _ in 0..pairs {
        let start = cursor;
        if cursor.item()? == MsgpackItem::Str(b"type") {
            return Tag::of(cursor.item()?);
        }
        cursor = start;
        cursor.pass(2, limits.nesting_max)?;
    }
    Err(Finding::WrongShape)
}

/// Appends a pair of neighbouring tokens to the tokens of the previous pairs. Returns false if the item is not such a
/// pair.
fn read_pair(cursor: &mut Cursor<'_>, tokens: &mut Vec<u32>) -> Result<bool, Finding> {
    if cursor.item()? != MsgpackItem::Array(2) {
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

/// Block hash in any encoding. Equal hashes are equal in all encodings: of a binary hash, the last eight bytes count,
/// as in vLLM's integer hashes.
fn hash(item: MsgpackItem<'_>) -> Option<u64> {
    match item {
        MsgpackItem::Uint(hash) => Some(hash),
        MsgpackItem::Neg(hash) => Some(hash.cast_unsigned()),
        MsgpackItem::Bin(bytes) => bytes.last_chunk().map(|bytes| u64::from_be_bytes(*bytes)),
        MsgpackItem::Nil
        | MsgpackItem::Bool(_)
        | MsgpackItem::Float(_)
        | MsgpackItem::Str(_)
        | MsgpackItem::Ext(_)
        | MsgpackItem::Array(_)
        | MsgpackItem::Map(_) => None,
    }
}

fn token(item: MsgpackItem<'_>) -> Option<u32> {
    if let MsgpackItem::Uint(token) = item { u32::try_from(token).ok() } else { None }
}

fn number(item: MsgpackItem<'_>) -> Option<u64> {
    if let MsgpackItem::Uint(number) = item { Some(number) } else { None }
}

fn bytes(item: MsgpackItem<'_>) -> Option<&[u8]> {
    if let MsgpackItem::Str(bytes) = item { Some(bytes) } else { None }
}

fn text(item: MsgpackItem<'_>) -> Option<&str> {
    bytes(item).and_then(|bytes| str::from_utf8(bytes).ok())
}

/// A value, or `None` for nil.
fn optional<'a, T>(
    cursor: &mut Cursor<'a>,
    read: impl FnOnce(MsgpackItem<'a>) -> Option<T>,
) -> Result<Option<T>, Finding> {
    let item = cursor.item()?;
    if item == MsgpackItem::Nil { Ok(None) } else { Ok(Some(read(item).ok_or(Finding::WrongType)?)) }
}

/// Start of an item for later parsing, or `None` for nil.
fn deferred<'a>(cursor: &mut Cursor<'a>, limits: &DecoderLimits) -> Result<Option<Cursor<'a>>, Finding> {
    let start = *cursor;
    cursor.pass(1, limits.nesting_max)?;
    let is_nil = { start }.item()? == MsgpackItem::Nil;
    Ok((!is_nil).then_some(start))
}
