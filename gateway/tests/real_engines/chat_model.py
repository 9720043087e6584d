"""A random model for agents, with a tokenizer for any text and with tools in its chat template. `turns.py` plays its messages."""

import json
import pathlib

import tokenizers
from fleet import TINY, VOCABULARY, make_model

CONTEXT_TOKENS = 1 << 16
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
CALLS, MESSAGES = 12, 9  # of a task: one and two calls by turns, and the end

TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning %}<think>{{ message.reasoning }}</think>
{% endif %}{% if message.role == "tool" %}<tool_response>
{{ message.content }}
</tool_response>{% else %}{{ message.content or "" }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_chat_model(directory):
    """A random model with a tokenizer for any text, and with tools in its template."""
    make_model(directory, TINY | {"max_position_embeddings": CONTEXT_TOKENS, "eos_token_id": SPECIAL.index("<|im_end|>")})
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    size = VOCABULARY - len(ADDED)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(path) for path in sorted(pathlib.Path("docs").glob("*.md"))], trainer)
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in ADDED])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
