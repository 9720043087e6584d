//! Seeded mutations of valid inputs, without coverage feedback.

use crate::test_support::mix;

/// Longest input, in bytes.
const BYTES_MAX: usize = 4 << 10;

/// Numbers at which formats change their meaning, little-endian.
const EDGES: [u64; 9] = [0, 1, 0x7f, 0x80, 0xff, 0xffff, 0x7fff_ffff, 0xffff_ffff, u64::MAX];

/// Source of inputs. Equal seeds give equal inputs.
#[derive(Clone, Debug)]
pub struct Mutations {
    corpus: Vec<Vec<u8>>,
    state: u64,
}

impl Mutations {
    /// Mutations of `corpus`.
    #[must_use]
    pub fn new(corpus: Vec<Vec<u8>>, seed: u64) -> Self {
        Self { corpus, state: mix(seed) }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.state = mix(self.state);
        usize::try_from(self.state % (bound.max(1) as u64)).unwrap_or(0)
    }

    /// The next input: a seed with one to eight changes.
    pub fn next_input(&mut self) -> Vec<u8> {
        let seed = self.below(self.corpus.len());
        let mut input = self.corpus.get(seed).cloned().unwrap_or_default();
        for _ in 0..=self.below(8) {
            self.change(&mut input);
        }
        input.truncate(BYTES_MAX);
        input
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let at = self.below(input.len() + 1);
        let length = (1 + self.below(16)).min(input.len() - at);
        let byte = self.below(256).to_le_bytes()[0];
        match self.below(7) {
            0 if at < input.len() => input[at] ^= 1 << self.below(8),
            1 if at < input.len() => input[at] = byte,
            2 => input.insert(at, byte),
            3 => drop(input.drain(at..at + length)),
            4 => input.truncate(at),
            5 => {
                let part = input[at..at + length].to_vec();
                let to = self.below(input.len() + 1);
                let copies = 1 + self.below(8);
                let _ = input.splice(to..to, part.repeat(copies)).count();
            }
            _ => {
                let edge = EDGES[self.below(EDGES.len())].to_le_bytes();
                let width = [1, 2, 4, 8][self.below(4)].min(input.len() - at);
                input[at..at + width].copy_from_slice(&edge[..width]);
                if self.below(2) == 0 {
                    input[at..at + width].reverse();
                }
            }
        }
    }
}
