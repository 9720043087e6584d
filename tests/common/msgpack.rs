//! Msgpack encoder for valid and invalid payloads of publishers.

/// One item.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Msg {
    Nil,
    Bool(bool),
    Uint(u64),
    Int(i64),
    Float(f64),
    Str(String),
    Bin(Vec<u8>),
    Array(Vec<Msg>),
    Map(Vec<(Msg, Msg)>),
    /// Raw bytes, written unchanged.
    Raw(Vec<u8>),
}

impl From<u64> for Msg {
    fn from(number: u64) -> Self {
        Self::Uint(number)
    }
}

impl From<&str> for Msg {
    fn from(text: &str) -> Self {
        Self::Str(text.to_owned())
    }
}

impl From<Option<&str>> for Msg {
    fn from(text: Option<&str>) -> Self {
        text.map_or(Self::Nil, Self::from)
    }
}

impl<T: Into<Msg>, const N: usize> From<[T; N]> for Msg {
    fn from(items: [T; N]) -> Self {
        items.into_iter().collect()
    }
}

impl<T: Into<Msg>> FromIterator<T> for Msg {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        Self::Array(items.into_iter().map(Into::into).collect())
    }
}

impl Msg {
    /// A map with string keys.
    pub(crate) fn named<'a>(pairs: impl IntoIterator<Item = (&'a str, Msg)>) -> Self {
        Self::Map(pairs.into_iter().map(|(key, value)| (key.into(), value)).collect())
    }

    /// The item's bytes, in the shortest encoding.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.write(&mut bytes);
        bytes
    }

    fn write(&self, to: &mut Vec<u8>) {
        match self {
            Self::Nil => to.push(0xc0),
            Self::Bool(value) => to.push(0xc2 + u8::from(*value)),
            Self::Uint(number) => match *number {
                0..0x80 => to.push(*number as u8),
                0x80..0x100 => to.extend([0xcc, *number as u8]),
                0x100..0x1_0000 => head(to, 0xcd, &(*number as u16).to_be_bytes()),
                0x1_0000..0x1_0000_0000 => head(to, 0xce, &(*number as u32).to_be_bytes()),
                0x1_0000_0000.. => head(to, 0xcf, &number.to_be_bytes()),
            },
            Self::Int(number) => match i32::try_from(*number) {
                Ok(number) => head(to, 0xd2, &number.to_be_bytes()),
                Err(_) => head(to, 0xd3, &number.to_be_bytes()),
            },
            Self::Float(value) => head(to, 0xcb, &value.to_be_bytes()),
            Self::Str(text) => {
                match text.len() {
                    len @ 0..32 => to.push(0xa0 | len as u8),
                    len => head(to, 0xda, &(len as u16).to_be_bytes()),
                }
                to.extend(text.as_bytes());
            }
            Self::Bin(data) => head(to, 0xc5, &[&(data.len() as u16).to_be_bytes()[..], data].concat()),
            Self::Array(items) => {
                match items.len() {
                    len @ 0..16 => to.push(0x90 | len as u8),
                    len @ 16..0x1_0000 => head(to, 0xdc, &(len as u16).to_be_bytes()),
                    len => head(to, 0xdd, &(len as u32).to_be_bytes()),
                }
                items.iter().for_each(|item| item.write(to));
            }
            Self::Map(pairs) => {
                match pairs.len() {
                    len @ 0..16 => to.push(0x80 | len as u8),
                    len => head(to, 0xde, &(len as u16).to_be_bytes()),
                }
                for (key, value) in pairs {
                    key.write(to);
                    value.write(to);
                }
            }
            Self::Raw(bytes) => to.extend(bytes),
        }
    }
}

fn head(to: &mut Vec<u8>, marker: u8, rest: &[u8]) {
    to.push(marker);
    to.extend(rest);
}

/// A batch of events, without a rank.
pub(crate) fn batch(events: impl IntoIterator<Item = Msg>) -> Vec<u8> {
    Msg::Array(vec![Msg::Float(1.5), events.into_iter().collect()]).bytes()
}
