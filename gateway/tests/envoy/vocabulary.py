"""A tokenizer file of realistic size whose tokens equal those of the mock engine, for texts of its words.

The mock engine's tokens are hashes of words with their leading space. The BPE model here merges each word letter by
letter into one token with that hash as its id. A newline is a special token, so the gateway's tokenizer cache can cut
there. The tokenizer of the gateway's tests has 558 tokens, too few: a prompt would have half the text per token.
"""

import json
import pathlib
import random

TEMPLATE = (
    "{% for message in messages %}{{ message.role + '\\n' + message.content + '\\n' }}{% endfor %}"
    "{{ 'assistant\\n' }}"
)
BASE = pathlib.Path(__file__).parent.parent / "data/tokens/tokenizer.json"
WORDS, HASH_BITS = 12_000, 17
SPACE = "Ġ"  # a space in byte-level BPE


def mock_token(piece):
    value = 0x811C9DC5
    for byte in piece.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return (value ^ value >> HASH_BITS) & (1 << HASH_BITS) - 1


class Vocabulary:
    def __init__(self):
        rng = random.Random(1)
        self.ids = {piece: mock_token(piece) for piece in ("\n", "user", "system", "assistan", "t")}
        used, self.words = set(self.ids.values()), []
        while len(self.words) < WORDS:
            syllables = rng.choices((1, 2, 3), (2, 5, 3))[0]
            word = "".join(rng.choice("bcdfghklmnprstvwz") + rng.choice("aeiou") for _ in range(syllables))
            word = " " + word + rng.choice(("", "n", "r", "s", "t"))
            token = mock_token(word)
            if token not in used and word not in self.ids:
                used.add(token)
                self.ids[word] = token
                self.words.append(word)
        # Frequencies as in natural language (Zipf).
        self.weights = [1 / (idx + 3) for idx in range(WORDS)]

    def text(self, rng, tokens):
        return "".join(rng.choices(self.words, self.weights, k=tokens))

    def write(self, directory):
        """Writes tokenizer.json and its chat template."""
        tokenizer = json.loads(BASE.read_text())
        pieces = {piece.replace(" ", SPACE): token for piece, token in self.ids.items()}
        merges = {}
        # The pieces without a space come last: within words, merges of words precede theirs.
        for piece in sorted(pieces, key=lambda piece: (not piece.startswith(SPACE), piece)):
            for end in range(2, len(piece) + 1):
                merges[piece[: end - 1], piece[end - 1]] = None
        bytes_alone = [token for token in tokenizer["model"]["vocab"] if len(token) == 1]
        vocab, free = dict(pieces), iter(range(1 << HASH_BITS, 1 << 20))
        for token in [*bytes_alone, *(left + right for left, right in merges)]:
            if token not in vocab:
                vocab[token] = next(free)
        tokenizer["model"] |= {"vocab": vocab, "merges": [list(pair) for pair in merges]}
        newline = {name: False for name in ("single_word", "lstrip", "rstrip", "normalized")}
        tokenizer["added_tokens"] = [{"id": vocab["\n"], "content": "\n", "special": True, **newline}]
        tokenizer["post_processor"] = None
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
        (directory / "chat_template.jinja").write_text(TEMPLATE)
        return len(vocab)
