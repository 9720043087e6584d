//! Scanner that finds the keys of a JSON text in one pass and without allocation.

/// The text at the start of a value, with escapes.
pub(super) fn text_of(value: &[u8]) -> Option<&[u8]> {
    value.strip_prefix(b"\"")?.split(|byte| *byte == b'"').next()
}

/// The count at the start of a value, if any.
pub(super) fn number(value: &[u8]) -> Option<u32> {
    let digits = value.iter().take_while(|byte| byte.is_ascii_digit());
    let add = |sum: u32, digit: &u8| sum.saturating_mul(10).saturating_add(u32::from(digit - b'0'));
    value.first().filter(|first| first.is_ascii_digit()).map(|_| digits.fold(0, add))
}

/// A key of an object.
pub(super) struct JsonKey<'a> {
    /// As written, with escapes.
    pub(super) name: &'a [u8],
    /// Number of enclosing objects and lists.
    pub(super) depth: usize,
    /// The text from the start of the value.
    pub(super) value: &'a [u8],
}

/// The keys of a JSON text at every depth, in order. Invalid JSON gives arbitrary keys.
pub(super) struct JsonKeys<'a> {
    pub(super) rest: &'a [u8],
    depth: usize,
    /// Whether the outermost value has ended; nothing after it is read.
    pub(super) is_closed: bool,
}

impl<'a> JsonKeys<'a> {
    pub(super) fn of(json: &'a [u8]) -> Self {
        Self { rest: json, depth: 0, is_closed: false }
    }

    /// Moves behind the next bracket or quote, and returns it.
    fn next_token(&mut self) -> Option<u8> {
        let at = self.rest.iter().position(|byte| matches!(byte, b'{' | b'[' | b'}' | b']' | b'"'))?;
        let token = self.rest[at];
        self.rest = &self.rest[at + 1..];
        Some(token)
    }

    /// Moves behind the end of the current string.
    fn string(&mut self) -> Option<&'a [u8]> {
        let (text, mut at) = (self.rest, 0);
        loop {
            at += text.get(at..)?.iter().position(|byte| matches!(byte, b'"' | b'\\'))?;
            if text[at] == b'"' {
                self.rest = &text[at + 1..];
                return Some(&text[..at]);
            }
            at += 2; // skips the escaped byte
        }
    }
}

impl<'a> Iterator for JsonKeys<'a> {
    type Item = JsonKey<'a>;

    fn next(&mut self) -> Option<JsonKey<'a>> {
        while !self.is_closed {
            match self.next_token()? {
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    self.is_closed = self.depth == 0;
                }
                _ => {
                    let name = self.string()?;
                    if let Some(value) = self.rest.trim_ascii_start().strip_prefix(b":") {
                        return Some(JsonKey { name, depth: self.depth, value: value.trim_ascii_start() });
                    }
                }
            }
        }
        None
    }
}
