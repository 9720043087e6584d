"""Compares the predictions of the module with the caches of two real vLLM servers, then sends chats through the example
gateway.

usage: check.py DIRECTORY REQUESTS SEED. Exits with 1 after a wrong prediction, and lists the differences.

vLLM before 0.31 does not report its event endpoints over HTTP, so a file of workers has them. Requests are sequential; each follows after
the index has all blocks of the last one.
"""

import asyncio
import json
import pathlib
import random
import sys
import time

import aiohttp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from fleet import BLOCK, ENGINES, MODEL, VOCABULARY, Process, free_port, make_model, start_engine

from pointsman import Router, discovery, metrics

EXAMPLE = pathlib.Path(__file__).parent.parent.parent / "examples/gateway.py"
PATIENCE_S = 60
CHATS = 20


async def until(what, condition):
    end = time.monotonic() + PATIENCE_S
    while not await condition():
        if time.monotonic() > end:
            sys.exit(f"FAILED: timeout: {what}")
        await asyncio.sleep(0.005)


class Prompts:
    """Prompts that start with one of a few system prompts, continue an earlier prompt, or repeat one."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        self.systems = [self.words(BLOCK * self.dice.randint(2, 6)) for _ in range(8)]
        self.recent = []

    def words(self, count):
        return [self.dice.randint(2, VOCABULARY - 1) for _ in range(count)]

    def next(self):
        draw = self.dice.random()
        if draw < 0.1 and self.recent:
            return self.dice.choice(self.recent)
        start = self.dice.choice(self.recent) if draw < 0.4 and self.recent else self.dice.choice(self.systems)
        if len(start) > 30 * BLOCK:
            return self.next()
        tokens = start + self.words(self.dice.randint(1, 6 * BLOCK))
        self.recent = [*self.recent[-20:], tokens]
        return tokens


async def complete(router, client, tokens, max_tokens, stream):
    """Predicted and delivered cached tokens of a completion, and its rank."""
    body = {"model": MODEL, "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with await router.route(tokens) as placement:
        async with client.post(f"{placement.endpoint}/v1/completions", json=body) as found:
            found.raise_for_status()
            reader = router.follow(placement, found.content_type)
            async for chunk in found.content.iter_any():
                reader.read(chunk)
            reader.end()
        placement.outcome("ok")
    assert reader.output_tokens == max_tokens, (reader.output_tokens, max_tokens)
    # The engine always computes the last token.
    return min(placement.cached_tokens, (len(tokens) - 1) // BLOCK * BLOCK), reader.cached_tokens, placement.rank


async def compare(file, count, seed):
    prompts, differences, hits, prompt_tokens, by_rank = Prompts(seed), [], 0, 0, {}
    sources = [discovery.WatchedFile(file)]
    async with Router(block_size=BLOCK, min_initial_workers=ENGINES, discovery=sources) as router, aiohttp.ClientSession() as client:

        async def is_live():
            return f'pointsman_kv_sources{{pool="default",state="live"}} {ENGINES}' in metrics()

        await complete(router, client, prompts.words(BLOCK), 1, False)
        for number in range(count):
            tokens = prompts.next()
            predicted, delivered, rank = await complete(router, client, tokens, prompts.dice.randint(1, 8), number % 2 == 0)
            by_rank[rank] = by_rank.get(rank, 0) + 1
            hits, prompt_tokens = hits + delivered, prompt_tokens + len(tokens)
            if predicted != delivered:
                differences.append(f"request {number}, {len(tokens)} tokens: predicted {predicted}, delivered {delivered}")

            async def is_indexed():
                rows = (await router.overlap_scores(tokens))["ranks"]
                blocks = {(row["rank"]["worker"], row["rank"]["rank"]): row["device_blocks"] for row in rows}
                return blocks[rank] >= len(tokens) // BLOCK

            await until(f"the blocks of request {number} are indexed", is_indexed)
        await until("the event streams are live", is_live)
        leases = router.health()["leases"]
    print(f"{count} requests by rank {by_rank}, hit rate {hits / prompt_tokens:.4f}, {len(differences)} wrong predictions")
    for difference in differences:
        print("DIFFERENT:", difference)
    return not differences and leases == 0


async def serve(port):
    async with aiohttp.ClientSession() as client:

        async def answers(text):
            body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, "ignore_eos": True}
            try:
                async with client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as found:
                    return found.status == 200 and (await found.json())["usage"]["completion_tokens"] == 4
            except aiohttp.ClientConnectorError:
                return False

        await until("the example gateway answers", lambda: answers("w1"))
        served = [await answers(" ".join(f"w{word}" for word in range(number, number + 80))) for number in range(CHATS)]
    print(f"example gateway: {sum(served)} of {CHATS} chats answered")
    return all(served)


def make_tokenizer(directory):
    """A tokenizer of bytes with a chat template, in the form that the model's class reads."""
    words = ["<unk>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"w{number}" for number in range(len(words), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def main(directory, count, seed):
    directory = pathlib.Path(directory)
    make_model(directory / "model")
    make_tokenizer(directory / "model")
    processes = []
    try:
        engines = [start_engine(directory, n) for n in range(ENGINES)]
        processes += [engine[0] for engine in engines]
        for process, port, _ in engines:
            process.wait_for(port, "/health", 900)
        declared = [{"url": f"http://127.0.0.1:{port}", "kv_events": events} for _, port, events in engines]
        (directory / "workers.json").write_text(json.dumps({"workers": declared}))
        is_right = asyncio.run(compare(directory / "workers.json", int(count), int(seed)))
        urls = [worker["url"] for worker in declared]
        port = free_port()
        processes.append(Process([sys.executable, str(EXAMPLE), str(BLOCK), str(port), *urls], directory / "example.log"))
        sys.exit(0 if asyncio.run(serve(port)) and is_right else 1)
    finally:
        for process in reversed(processes):
            process.stop()


main(*sys.argv[1:])
