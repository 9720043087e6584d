"""Measures parallel tasks of Claude Code and Codex. Their contexts exceed the caches of four scripted engines.

usage: oversubscribed.py POINTSMAN_BINARY DIRECTORY_OF_THE_AGENTS [AGENTS_OF_EACH [BLOCKS [ROUNDS]]]. Prints a line for each round
with and without holds, which alternate. `twice` counts tokens that an engine had computed before. Exits with 1 if a task fails.
"""

import collections
import contextlib
import itertools
import json
import pathlib
import random
import statistics
import string
import sys
import threading
import time

import msgpack
import zmq

import engine
from engine import MODEL, SHELLS, TOOL_TURNS, Call, Engine, Fleet
from loopback import serve
from programs import AGENTS, result_of, start

PATIENCE_S = 900
PROMPT = "This is the task of agent-{}. Run the commands that it needs, then report."
# Words of each of the two commands of a turn, which its result repeats. Claude Code rejects commands of 10,000 characters.
WORDS = 700
CONFIGS = {
    "placed at once": "",
    "held": '[[models.router.queue.classes]]\nname = "agents"\nprogram_hold_ms = 600_000',
}
TITLES = ["tasks/hour", "mean s", "last s", "computed", "twice"]


class SmallEngine(Engine):
    """Evicts the least recently used blocks, those of one prompt from its end, as vLLM does with blocks that no request uses.
    Publishes its KV events as vLLM does."""

    def __init__(self, fleet):
        super().__init__(fleet)
        self.blocks, self.seen, self.computed, self.twice = collections.OrderedDict(), set(), 0, 0
        self.publisher, self.sent = zmq.Context.instance().socket(zmq.XPUB), 0
        self.events = f"tcp://127.0.0.1:{self.publisher.bind_to_random_port('tcp://127.0.0.1')}"

    def tokens_of(self, words):
        tokens = Engine.tokens_of(words)
        self.fleet.tokenized.add(hash(tuple(tokens)))
        return tokens

    def publish(self, *events):
        payload = msgpack.packb([time.time(), [event for event in events if event[1]], 0])
        self.publisher.send_multipart([b"", self.sent.to_bytes(8, "big"), payload])
        self.sent += 1

    def prefill(self, words):
        with self.prefilling:
            size, tokens = engine.BLOCK, Engine.tokens_of(words)
            self.fleet.unknown += hash(tuple(tokens)) not in self.fleet.tokenized
            parts = [tuple(tokens[end - size : end]) for end in range(size, len(tokens) + 1, size)]
            blocks = list(itertools.accumulate(parts, lambda before, part: hash((before, part)), initial=0))[1:]
            blocks = [block % (1 << 63) for block in blocks]
            cached = sum(1 for _ in itertools.takewhile(self.blocks.__contains__, blocks))
            missing = blocks[cached:]
            self.computed += len(missing) * size
            self.twice += sum(block in self.seen for block in missing) * size
            self.seen.update(missing)
            time.sleep(len(missing) * size / engine.PREFILL_TOKENS_PER_SECOND + engine.STEP_SECONDS)
            for block in reversed(blocks):
                self.blocks[block] = None
                self.blocks.move_to_end(block)
            evicted = [self.blocks.popitem(last=False)[0] for _ in range(len(self.blocks) - self.fleet.blocks_max)]
            stored = tokens[cached * size : len(blocks) * size]
            parent = blocks[cached - 1] if cached else None
            self.publish(["BlockStored", missing, parent, stored, size, None], ["BlockRemoved", evicted])


class SmallFleet(Fleet):
    def __init__(self, stack, blocks_max):
        self.blocks_max, self.tokenized, self.unknown = blocks_max, set(), 0
        super().__init__(stack)

    def calls(self, agent, n, shell):
        if n == TOOL_TURNS:
            return []
        letters, calls = random.Random(f"{agent} {n}"), []
        for k in range(2):
            text = " ".join("".join(letters.choices(string.ascii_lowercase, k=4)) for _ in range(WORDS))
            calls.append(Call(f"call-{agent}-{n}-{k}", k, shell, {SHELLS[shell]: f"echo {text}"}, text[-30:]))
        return calls


def run(binary, agents, config, count, blocks_max):
    """Runs all tasks at once. Returns the figures of TITLES, and the problems."""
    with contextlib.ExitStack() as stack:
        fleet = SmallFleet(stack, blocks_max)
        model = ["[[models]]", f'name = "{MODEL}"', "[models.router]", f"block_size = {engine.BLOCK}"]
        tokens = ["[models.tokens]", "engine_timeout_ms = 20_000", "wait_ms = 20_000"]
        workers = [f'[[models.workers]]\nurl = "{url}"\nprobe = true\nkv_events = {{ endpoint = "{one.events}" }}'
                   for url, one in zip(fleet.urls(), fleet.engines)]
        port, _ = serve(binary, stack, ['log_level = "error"', *model, *tokens, *workers, config])
        if not all(one.publisher.poll(20_000) for one in fleet.engines):
            return [0] * len(TITLES), ["the gateway has not subscribed to the events of all engines"]
        began, url, ends = time.monotonic(), f"http://127.0.0.1:{port}", {}
        names = [name for name in ("claude", "codex") for _ in range(count)]
        started = [start(stack, AGENTS[name], agents, url, MODEL, PROMPT.format(number), {}) for number, name in enumerate(names)]
        problems = fleet.problems

        def wait(number, process, home):
            code, out, err = result_of(process, home, began + PATIENCE_S)
            ends[number] = time.monotonic() - began
            if code != 0 or f"Finished by agent-{number}." not in out:
                problems.append(f"agent {number} ended with {code}\n{out[-700:]}\n{err[-700:]}")

        waiting = [threading.Thread(target=wait, args=(number, *one)) for number, one in enumerate(started)]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()
        if len(ends) < len(names):
            problems.append(f"{len(names) - len(ends)} tasks have no result")
        computed, twice = (sum(getattr(one, name) for one in fleet.engines) for name in ("computed", "twice"))
        if fleet.unknown:
            problems.append(f"{fleet.unknown} prompts have other tokens than the engines returned for them")
    last = max(ends.values())
    return [len(ends) * 3_600 / last, statistics.mean(ends.values()), last, computed, twice], problems


def main(binary, agents, count="8", blocks="3_000", rounds="3"):
    engine.PREFILL_TOKENS_PER_SECOND, engine.CONTEXT_TOKENS = 8_000, 200_000
    engine.Engine = SmallEngine
    engine.PAGES["vllm"]["/metrics"] = f'vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="{int(blocks)}"}} 1.0\n'
    print(f"{'':16}" + "".join(f"{title:>12}" for title in TITLES), flush=True)
    problems = []
    for _ in range(int(rounds)):
        for name, config in CONFIGS.items():
            figures, failed = run(binary, pathlib.Path(agents).resolve(), config, int(count), int(blocks))
            print(f"{name:16}" + "".join(f"{figure:>12,.0f}" for figure in figures), flush=True)
            problems += [f"{name}: {problem}" for problem in failed]
    if problems:
        raise SystemExit("\n".join(f"FAILED: {problem}" for problem in problems))


main(*sys.argv[1:])
