//! Keys of `pointsman top`, and the screen that they control.
//!
//! On a terminal, input is read without line editing and echo until the [`Screen`] is dropped. Ctrl-C stays a signal.

use std::io::{self, Write as _};

use tokio::sync::mpsc;

/// A command by a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// Ends the display.
    Quit,
    /// Scrolls by lines, downwards if positive.
    Move(isize),
    /// Scrolls by screens.
    Page(isize),
}

/// The key of the bytes that one press sends.
fn key_of(bytes: &[u8]) -> Option<Key> {
    Some(match bytes {
        b"q" | b"Q" | b"\x1b" | b"\x03" | b"\x04" => Key::Quit,
        b"j" | b"\x1b[B" | b"\x1bOB" | b"\n" | b"\r" => Key::Move(1),
        b"k" | b"\x1b[A" | b"\x1bOA" => Key::Move(-1),
        b" " | b"\x06" | b"\x1b[6~" => Key::Page(1),
        b"b" | b"\x02" | b"\x1b[5~" => Key::Page(-1),
        b"g" | b"\x1b[H" | b"\x1b[1~" | b"\x1bOH" => Key::Move(isize::MIN),
        b"G" | b"\x1b[F" | b"\x1b[4~" | b"\x1bOF" => Key::Move(isize::MAX),
        _ => return None,
    })
}

/// The keys of the bytes of one read: a sequence begins with escape, and several keys may arrive together.
fn keys_of(bytes: &[u8]) -> Vec<Key> {
    let (mut keys, mut rest) = (Vec::new(), bytes);
    while !rest.is_empty() {
        let is_end = |byte: &u8| byte.is_ascii_alphabetic() && *byte != b'O' || *byte == b'~';
        let length = match rest {
            [b'\x1b', b'[' | b'O', sequence @ ..] => sequence.iter().position(is_end).map_or(rest.len(), |end| end + 3),
            _ => 1,
        };
        let (key, after) = rest.split_at(length);
        keys.extend(key_of(key));
        rest = after;
    }
    keys
}

/// The keys that are pressed from now on; none without a terminal as input.
pub fn read_keys() -> mpsc::Receiver<Key> {
    let (sender, keys) = mpsc::channel(64);
    // A thread of its own, because a read cannot be cancelled: it ends with the process.
    std::thread::spawn(move || {
        use std::io::Read as _;
        let (mut input, mut bytes) = (io::stdin(), [0; 64]);
        while let Ok(length) = input.read(&mut bytes)
            && length > 0
        {
            for key in keys_of(&bytes[..length]) {
                if sender.blocking_send(key).is_err() {
                    return;
                }
            }
        }
    });
    keys
}

/// Columns and rows of the terminal of the output, else of 140 columns.
pub fn size() -> (usize, usize) {
    const DEFAULT: (usize, usize) = (140, 50);
    if let Ok(size) = rustix::termios::tcgetwinsize(io::stdout())
        && size.ws_col > 0
        && size.ws_row > 0
    {
        return (size.ws_col.into(), size.ws_row.into());
    }
    DEFAULT
}

/// The alternate screen without line wrapping, cursor and echo, until dropped.
#[derive(Debug)]
pub struct Screen {
    /// Attributes of the input before; absent if it is no terminal.
    before: Option<rustix::termios::Termios>,
}

impl Screen {
    /// Enters it.
    ///
    /// # Errors
    /// A closed output.
    pub fn enter() -> io::Result<Self> {
        io::stdout().write_all(b"\x1b[?1049h\x1b[?7l\x1b[?25l")?;
        Ok(Self { before: unbuffered() })
    }
}

/// Turns line editing and echo off. Returns the attributes before; `None` if the input is no terminal.
fn unbuffered() -> Option<rustix::termios::Termios> {
    use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
    let before = tcgetattr(io::stdin()).ok()?;
    let mut attributes = before.clone();
    attributes.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
    tcsetattr(io::stdin(), OptionalActions::Now, &attributes).ok()?;
    Some(before)
}

impl Drop for Screen {
    fn drop(&mut self) {
        let mut output = io::stdout();
        // The terminal may be gone.
        let _ = output.write_all(b"\x1b[?25h\x1b[?7h\x1b[?1049l");
        let _ = output.flush();
        if let Some(before) = &self.before {
            let _ = rustix::termios::tcsetattr(io::stdin(), rustix::termios::OptionalActions::Now, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_recognized_alone_and_together() {
        for (bytes, expected) in [
            (&b"q"[..], &[Key::Quit][..]),
            (b"\x1b", &[Key::Quit]),
            (b"\x1b[A", &[Key::Move(-1)]),
            (b"\x1bOB", &[Key::Move(1)]),
            (b"\x1b[6~\x1b[5~", &[Key::Page(1), Key::Page(-1)]),
            (b"jjk", &[Key::Move(1), Key::Move(1), Key::Move(-1)]),
            (b"\x1b[1;5C", &[]),
            (b"\x1b[", &[]),
            (b"xyz", &[]),
        ] {
            assert_eq!(keys_of(bytes), expected, "{bytes:?}");
        }
    }
}
