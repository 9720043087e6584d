"""Logits processor of vLLM that lets a random model finish tasks: each message is noise as reasoning, followed by calls of the
client's shell, or by the end of the task. The number of calls in the prompt selects the turn."""

import json
import pathlib

import tokenizers
import torch
from chat_model import ADDED, CALLS
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

NOISE_TOKENS = 12

# Argument of the tools that run commands.
SHELLS = {"Bash": "command", "exec_command": "cmd", "shell_command": "command"}


class Turns(AdapterLogitsProcessor):
    def __init__(self, config, device, is_pin_memory):
        super().__init__(config, device, is_pin_memory)
        self.tokenizer = tokenizers.Tokenizer.from_file(str(pathlib.Path(config.model_config.tokenizer) / "tokenizer.json"))
        self.call, self.end, self.think = map(self.tokenizer.token_to_id, ["<tool_call>", "<|im_end|>", "<think>"])
        self.n_plain = min(map(self.tokenizer.token_to_id, ADDED))

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        message = None

        def process(prompt, output, logits):
            nonlocal message
            message = message or self.message(prompt)
            forced = message[min(len(output), len(message) - 1)]
            if forced is None:
                logits[: self.end + 1] = logits[self.n_plain :] = -torch.inf
                return logits
            logits = torch.full_like(logits, -torch.inf)
            logits[forced] = 0
            return logits

        return process

    def message(self, prompt):
        """Tokens of a message, with None for noise."""
        made, text = prompt.count(self.call), self.tokenizer.decode(prompt, skip_special_tokens=False)
        shell = next((name for name in SHELLS if f'"name": "{name}"' in text), None)
        said = "Finished."
        if shell and made < CALLS:
            calls = [{"name": shell, "arguments": {SHELLS[shell]: f"echo call-{made + k}"}} for k in range(1 + (made % 3 > 0))]
            said = "One moment." + "".join(f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
        return [self.think, *[None] * NOISE_TOKENS, *self.tokenizer.encode(f"</think>\n{said}").ids, self.end]
