"""Open-loop client of the race: seeded sessions over keep-alive connections.

Sessions arrive as a Poisson process. A turn is sent after the answer of the turn before and a pause. Times are those of
the wall clock.
"""

import asyncio
import contextlib
import json
import math
import random
import time

import uvloop

# Sessions per second, shared system prompts with their range of tokens, range of turns, medians of user tokens in the
# first and in later turns, median of output tokens, mean pause in seconds, KV blocks of an engine, and sessions that
# arrive together.
CHAT = dict(
    rate=7,
    systems=16,
    system=(600, 1800),
    turns=(2, 7),
    first=300,
    later=120,
    output=90,
    pause=3,
    blocks=4096,
    burst=1,
)
WORKLOADS = {
    "chat": CHAT,
    "one_prompt": {**CHAT, "systems": 1, "system": (1500, 1501)},
    "small_caches": {**CHAT, "rate": 5.5, "blocks": 1400},
    "agents": {
        **CHAT,
        **dict(rate=2, systems=6, system=(2500, 5000), turns=(6, 14), first=400, later=350, output=40, pause=0.5),
    },
    "documents": {
        **CHAT,
        **dict(
            rate=1.5,
            systems=24,
            system=(8000, 16000),
            turns=(1, 3),
            first=60,
            later=60,
            output=60,
            pause=2,
            blocks=8192,
        ),
    },
    "bursts": {**CHAT, "burst": 12},
    "saturation": {**CHAT, "rate": 11},
}


SPELLED = 4096  # number of words of letters


def words(rng, count):
    return "".join(f" t{rng.randrange(131_072)}" for _ in range(count))


def spelled(number):
    """A word of letters, one piece for patterns of real tokenizers."""
    return " " + "".join(chr(97 + number // 26**at % 26) for at in range(4))


def spread(rng, median, sigma, least, most):
    return int(min(most, max(least, median * math.exp(rng.gauss(0, sigma)))))


def sessions(load, seed, seconds):
    """Arrival, system prompt and turns (user text, output tokens, pause) of each session."""
    rng = random.Random(seed)
    systems = [words(rng, rng.randrange(*load["system"])) for _ in range(load["systems"])]
    weights = [1 / (1 + at) for at in range(len(systems))]  # Zipf
    arrival, burst = 0.0, load["burst"]
    while True:
        arrival += rng.expovariate(load["rate"] / burst)
        if arrival > seconds:
            return
        for _ in range(burst):
            turns = [
                (
                    words(rng, spread(rng, load["later" if at else "first"], 1.0, 8, 4000)),
                    spread(rng, load["output"], 0.7, 4, 400),
                    rng.expovariate(1 / load["pause"]),
                )
                for at in range(rng.randrange(load["turns"][0], load["turns"][1] + 1))
            ]
            yield arrival, rng.choices(systems, weights)[0], turns


class Client:
    """Keep-alive connections to one port."""

    def __init__(self, port):
        self.port, self.free = port, []

    async def chat(self, messages, output_tokens):
        """Streams one chat. Returns its text, time to the first token, gaps between tokens and total, in seconds."""
        body = {"model": "mock", "messages": messages, "max_tokens": output_tokens, "stream": True}
        data = json.dumps(body).encode()
        started = last = time.perf_counter()
        reader, writer = (
            self.free.pop() if self.free else await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        )
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: race\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(data), data)
        )
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200") or b"transfer-encoding: chunked" not in head:
            writer.close()
            raise ConnectionError(head.decode(errors="replace")[:200])
        text, first, gaps, rest = [], None, [], b""
        while size := int((await reader.readline()).split(b";")[0], 16):
            rest += (await reader.readexactly(size + 2))[:-2]
            *events, rest = rest.split(b"\n\n")
            for event in events:
                if not event.startswith(b"data: {"):
                    continue
                choices = json.loads(event[6:]).get("choices")
                piece = choices and choices[0].get("delta", {}).get("content")
                if piece:
                    now = time.perf_counter()
                    if first is None:
                        first = now - started
                    else:
                        gaps.append(now - last)
                    last = now
                    text.append(piece)
        await reader.readline()
        self.free.append((reader, writer))
        if first is None:
            raise ConnectionError("no token")
        return "".join(text), first, gaps, time.perf_counter() - started


async def play(port, load, seed, seconds):
    """Results (arrival, first, gaps, total) of all requests of a workload, and the number of failed ones."""
    client, started, results, failed = Client(port), time.perf_counter(), [], 0
    clock = lambda: time.perf_counter() - started

    async def session(arrival, system, turns):
        nonlocal failed
        await asyncio.sleep(max(0, arrival - clock()))
        messages = [{"role": "system", "content": system}]
        for user, output, pause in turns:
            if clock() > seconds:
                return
            messages.append({"role": "user", "content": user})
            at = clock()
            try:
                text, *times = await asyncio.wait_for(client.chat(messages, output), 120)
            except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.TimeoutError):
                failed += 1
                return
            results.append((at, *times))
            messages.append({"role": "assistant", "content": text})
            await asyncio.sleep(pause)

    await asyncio.gather(*[session(*one) for one in sessions(load, seed, seconds)])
    return results, failed


async def steady(ports, rate, count, prompt_words, output, seed):
    """Results of single chats at a constant mean rate, for the cost of one request."""
    rng, clients, started, results = random.Random(seed), [Client(port) for port in ports], time.perf_counter(), []
    text = lambda count: "".join(spelled(rng.randrange(SPELLED)) for _ in range(count))
    systems = [text(2 * prompt_words // 3) for _ in range(8)]

    async def one(number, arrival, user):
        await asyncio.sleep(max(0, arrival - (time.perf_counter() - started)))
        messages = [{"role": "system", "content": systems[number % 8]}, {"role": "user", "content": user}]
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError):
            _, *times = await clients[number % len(clients)].chat(messages, output)
            results.append((arrival, *times))

    arrival, tasks = 0.0, []
    for number in range(count):
        arrival += rng.expovariate(rate)
        tasks.append(one(number, arrival, text(prompt_words // 3)))
    await asyncio.gather(*tasks)
    return results, count - len(results)


def run(coroutine):
    return uvloop.run(coroutine)
