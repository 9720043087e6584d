"""The endpoint picker with a real Envoy beside the gateway's own listener.

equality: the same conversations through both paths, each with fresh engines: hit rates, predicted and delivered cached
tokens, and requests per data-parallel rank.
cost: CPU time of the picker's process per request, for short and long prompts, as text and as token ids, for further
turns of conversations and for new prompts. A measurement without limits.

usage: compare.py POINTSMAN ENVOY [equality] [cost]     (default: both)
"""

import collections
import datetime
import http.client
import json
import os
import pathlib
import queue
import random
import re
import sys
import tempfile
import threading
import time

from fleet import Fleet
from loopback import PATIENCE_S, check, get, until
from vocabulary import Vocabulary

SEED = 7
PATHS = ("gateway", "picker")


class Client:
    """One connection that stays open."""

    def __init__(self, port):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)

    def post(self, path, request, request_id):
        headers = {"content-type": "application/json", "x-request-id": request_id}
        self.connection.request("POST", path, json.dumps(request), headers)
        response = self.connection.getresponse()
        answer = response.read()
        check(response.status == 200, f"{request_id}: {response.status} {answer[:300]}")
        return answer


def port_of(fleet, path):
    return fleet.gateway if path == "gateway" else fleet.proxy


def in_threads(count, work, items):
    """Calls `work(item, thread_idx)` for each item, in order, from `count` threads."""
    waiting = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    failures = []

    def loop(idx):
        try:
            while not failures:
                work(waiting.get_nowait(), idx)
        except queue.Empty:
            pass
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=loop, args=(idx,)) for idx in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# Equality.

ENGINES, RANKS_PER_ENGINE, BLOCK_SIZE, BLOCKS_PER_RANK = 4, 2, 64, 384
OUTPUT_TOKENS = 24
CONVERSATIONS, TURNS, CLIENTS = 128, 8, 16
# Requests one by one leave nothing to chance. Concurrent ones depend on the speed of the machine; the policy `random`
# would be 0.3 lower.
HIT_RATE_DIFFERENCE_MAX = {"one_by_one": 0.01, "at_once": 0.1}
# Assumed time between the end of a request and its KV events in the index. It only names reasons: a loaded machine
# takes longer.
EVENT_LAG_S = 0.1


def conversations(rng, count, turns):
    """Prompts of each conversation as token ids. Conversations share one of four system prompts."""
    tokens = lambda length: [rng.randrange(131_072) for _ in range(length)]
    systems = [tokens(1_500) for _ in range(4)]
    for _ in range(count):
        prompt, prompts = list(rng.choice(systems)), []
        for _ in range(turns):
            prompt = prompt + tokens(rng.randint(200, 600))
            prompts.append(prompt)
            prompt = prompt + tokens(OUTPUT_TOKENS)  # the answer, as the client sends it back
        yield prompts


def completion(prompt):
    return {"model": "chat", "prompt": prompt, "max_tokens": OUTPUT_TOKENS}


class Request:
    """A served request, from the access log, with its prompt."""

    def __init__(self, line, prompt):
        self.id, self.prompt = line["request_id"], prompt
        self.rank = (line["worker"].rsplit(":", 1)[1], line["rank"])
        self.tokens, self.delivered = line["prompt_tokens"], line["cached_tokens"]
        self.predicted = line["predicted_cached_tokens"]
        self.end = datetime.datetime.fromisoformat(line["timestamp"].replace("Z", "+00:00")).timestamp()
        self.start = self.end - line["duration_ms"] / 1000

    def stored_blocks(self):
        return -(-(self.tokens + OUTPUT_TOKENS) // BLOCK_SIZE) - self.delivered // BLOCK_SIZE

    def common_tokens(self, other):
        """Common prefix of the prompts, in tokens of whole blocks."""
        pairs = zip(self.prompt[::BLOCK_SIZE], other.prompt[::BLOCK_SIZE])
        equal = next((idx for idx, (one, two) in enumerate(pairs) if one != two), None)
        equal = min(len(self.prompt), len(other.prompt)) // BLOCK_SIZE if equal is None else equal
        return equal * BLOCK_SIZE


def reason(request, requests):
    """Probable cause of another number of cached tokens than predicted; `None` if there is none.

    A request races with this one if both ran on the same rank and it, or its events, had not ended when this one began.

    in_flight: more was delivered, and a racing request has at least that prefix in common.
    evicted: less was delivered, the rank had stored more blocks than its memory holds, and racing requests stored at
    least as many blocks as are missing.
    """
    others = [other for other in requests if other.rank == request.rank and other is not request]
    before = [other for other in others if other.start < request.end]
    racing = [other for other in before if other.end + EVENT_LAG_S > request.start]
    if request.delivered > request.predicted:
        return "in_flight" if any(request.common_tokens(other) >= request.delivered for other in racing) else None
    stored = lambda some: sum(other.stored_blocks() for other in some)
    is_full = stored([*before, request]) > BLOCKS_PER_RANK
    missing = (request.predicted - request.delivered) // BLOCK_SIZE
    return "evicted" if is_full and stored(racing) >= missing else None


def stored_blocks(fleet):
    of_result = lambda result: fleet.metric(f'pointsman_kv_event_blocks_total{{pool="chat",result="{result}"') or 0
    return of_result("stored") + of_result("copy")


def requests_per_rank(fleet):
    counts = {}
    for port in fleet.engines:
        page = get(port, "/metrics")[1]
        for rank, count in re.findall(r'^vllm:request_success_total\{engine="(\d+)".*\} (\d+)$', page, re.M):
            counts[str(port), int(rank)] = int(count)
    return counts


def one_by_one(fleet, port):
    """Interleaved conversations, one request at a time, each after the events of the one before."""
    rounds = zip(*conversations(random.Random(SEED), 12, 5))
    client, prompts, stored = Client(port), {}, 0
    for turn, prompts_of_turn in enumerate(rounds):
        for idx, prompt in enumerate(prompts_of_turn):
            request_id = f"one-{idx}-{turn}"
            prompts[request_id] = prompt
            answer = json.loads(client.post("/v1/completions", completion(prompt), request_id))
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            stored += (len(prompt) + OUTPUT_TOKENS - 1) // BLOCK_SIZE - cached // BLOCK_SIZE
            fleet.at_rest()
            until("the events are read", lambda: stored_blocks(fleet) >= stored)
    return prompts


def at_once(fleet, port):
    """Conversations of concurrent clients."""
    clients = [Client(port) for _ in range(CLIENTS)]
    items = list(enumerate(conversations(random.Random(SEED + 1), CONVERSATIONS, TURNS)))
    prompts = {f"many-{idx}-{turn}": prompt for idx, turns in items for turn, prompt in enumerate(turns)}

    def converse(item, thread_idx):
        idx, turns = item
        for turn, prompt in enumerate(turns):
            clients[thread_idx].post("/v1/completions", completion(prompt), f"many-{idx}-{turn}")

    in_threads(CLIENTS, converse, items)
    return prompts


def equality(pointsman, envoy):
    flags = ["--data-parallel-size", str(RANKS_PER_ENGINE), "--kv-blocks", str(BLOCKS_PER_RANK), "--time-scale", "4"]
    rates, unexpected = collections.defaultdict(dict), []
    for path in PATHS:
        with Fleet(pointsman, envoy, engines=ENGINES, engine_flags=flags, block_size=BLOCK_SIZE) as fleet:
            check(fleet.rank_count == ENGINES * RANKS_PER_ENGINE, f"ranks: {fleet.rank_count}")
            prompts = {}
            for part in (one_by_one, at_once):
                began = time.monotonic()
                of_part = part(fleet, port_of(fleet, path))
                took = time.monotonic() - began
                prompts.update(of_part)
                fleet.at_rest()
                until("the access log is written", lambda: len(fleet.access()) == len(prompts))
                requests = [Request(line, prompts[line["request_id"]]) for line in fleet.access()]
                new = [request for request in requests if request.id in of_part]
                different = [request for request in new if request.predicted != request.delivered]
                reasons = collections.Counter()
                for request in different:
                    if part is one_by_one:
                        unexpected.append((path, request))
                    reasons[reason(request, requests)] += 1
                tokens = sum(request.tokens for request in new)
                delivered = sum(request.delivered for request in new) / tokens
                predicted = sum(request.predicted for request in new) / tokens
                rates[part][path] = delivered
                per_rank = collections.Counter(request.rank for request in new)
                shares = [per_rank[rank] / len(new) for rank in requests_per_rank(fleet)]
                print(
                    f"{part.__name__}, {path}: {len(new)} requests in {took:.1f} s, {tokens} prompt tokens, "
                    f"hit rate delivered {delivered:.2%}, predicted {predicted:.2%}; "
                    f"predicted = delivered for {1 - len(different) / len(new):.1%}, others {dict(reasons)}; "
                    f"requests per rank {min(shares):.1%} to {max(shares):.1%}", flush=True
                )
            served = collections.Counter(request.rank for request in requests)
            counted = collections.Counter(requests_per_rank(fleet))
            check(served == counted, f"each rank served the requests in the access log: {served}, {counted}")
            stats = fleet.stats()
            if path == "picker":
                check(stats["streams_failed"] == 0, f"no stream failed: {stats}")
                check(stats["streams_started"] == len(prompts), f"one stream per request: {stats}")
    for path, request in unexpected:
        print(f"unexpected: {path}, {request.id}: {vars(request) | {'prompt': len(request.prompt)}}")
    check(not unexpected, "predicted cached tokens of requests one by one are delivered")
    for part, by_path in rates.items():
        difference = abs(by_path["gateway"] - by_path["picker"])
        check(difference <= HIT_RATE_DIFFERENCE_MAX[part.__name__], f"{part.__name__}: hit rates differ by {difference:.2%}")
        print(f"{part.__name__}: hit rates of gateway and picker differ by {difference:.2%}")


# Cost.

COST_ENGINES, COST_BLOCK_SIZE, COST_CLIENTS, REPEATS = 4, 16, 4, 3
# llm-d's published load.
REQUESTS_PER_SECOND = 98.7
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def cpu_seconds(process):
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


class Chat:
    """A conversation as text."""

    path = "/v1/chat/completions"

    def __init__(self, vocabulary, rng):
        self.vocabulary, self.rng, self.messages = vocabulary, rng, []

    def grow(self, tokens):
        """Adds about this number of tokens, the last message from the user."""
        if not self.messages:
            self.add("system", min(tokens // 2, 2_000))
            tokens -= min(tokens // 2, 2_000)
        while tokens > 1_000:
            self.add("user", 400)
            self.add("assistant", 600)
            tokens -= 1_000
        if self.messages[-1]["role"] == "user":
            self.add("assistant", tokens // 2)
            tokens -= tokens // 2
        self.add("user", tokens)

    def add(self, role, tokens):
        self.messages.append({"role": role, "content": self.vocabulary.text(self.rng, max(1, tokens - 3))})

    def request(self):
        return {"model": "chat", "messages": self.messages}


class Ids:
    """A conversation as token ids."""

    path = "/v1/completions"

    def __init__(self, _, rng):
        self.rng, self.prompt = rng, []

    def grow(self, tokens):
        self.prompt += [self.rng.randrange(131_072) for _ in range(tokens)]

    def request(self):
        return {"model": "chat", "prompt": self.prompt}


class Case:
    """A kind of requests: `requests` in all, `turns` per conversation after a first one that is not measured."""

    def __init__(self, name, form, tokens, requests, turns=0, added=0, **more):
        self.name, self.form, self.tokens, self.requests = name, form, tokens, requests
        self.turns, self.added, self.more = turns, added, {"max_tokens": 16, **more}

    def start(self, vocabulary, rng):
        """A new conversation; its mean length over the measured turns is `tokens`."""
        conversation = self.form(vocabulary, rng)
        conversation.grow(self.tokens - self.added * (self.turns + 1) // 2)
        return conversation


CASES = [
    Case("text, new prompts", Chat, 1_000, 600),
    Case("text, further turns", Chat, 1_000, 600, turns=20, added=40),
    Case("token ids, new prompts", Ids, 1_000, 600),
    Case("token ids, further turns", Ids, 1_000, 600, turns=20, added=40),
    Case("text, new prompts", Chat, 100_000, 20),
    Case("text, further turns", Chat, 100_000, 40, turns=10, added=500),
    Case("token ids, new prompts", Ids, 100_000, 20),
    Case("token ids, further turns", Ids, 100_000, 40, turns=10, added=500),
    Case("text, new prompts, 1 streamed token", Chat, 1_000, 600, stream=True, max_tokens=1),
    Case("text, new prompts, 257 streamed tokens", Chat, 1_000, 100, stream=True, max_tokens=257),
]


def measure(fleet, vocabulary, path, case, seed):
    """CPU seconds per request of the gateway's process and of Envoy, and the hit rates predicted and delivered."""
    rng = random.Random(seed)
    clients = [Client(port_of(fleet, path)) for _ in range(COST_CLIENTS)]

    def send(conversation, idx, request_id):
        clients[idx].post(conversation.path, conversation.request() | case.more, request_id)

    per_conversation = max(1, case.turns)
    conversations = [case.start(vocabulary, rng) for _ in range(case.requests // per_conversation)]
    if case.turns:
        in_threads(COST_CLIENTS, lambda conversation, idx: send(conversation, idx, "first"), conversations)

    def converse(conversation, idx):
        for _ in range(per_conversation):
            if case.turns:
                conversation.grow(case.added)
            send(conversation, idx, f"measured-{seed}")

    fleet.at_rest()
    time.sleep(0.3)  # events
    processes = (fleet.gateway_process, fleet.envoy)
    before = [cpu_seconds(process) for process in processes]
    in_threads(COST_CLIENTS, converse, conversations)
    fleet.at_rest()
    time.sleep(0.3)
    cpu = [(cpu_seconds(process) - start) / case.requests for process, start in zip(processes, before)]
    of_case = lambda: [line for line in fleet.access() if line["request_id"] == f"measured-{seed}"]
    until("the access log is written", lambda: len(of_case()) == case.requests)
    lines = of_case()
    tokens = sum(line["prompt_tokens"] for line in lines)
    hits = [sum(line.get(name, 0) for line in lines) / tokens for name in ("predicted_cached_tokens", "cached_tokens")]
    return cpu, hits, tokens / case.requests


def cost(pointsman, envoy):
    vocabulary = Vocabulary()
    flags = ["--time-scale", "0", "--max-model-len", "400000", "--kv-blocks", str((1 << 19) // COST_BLOCK_SIZE)]
    with tempfile.TemporaryDirectory() as directory:
        entries = vocabulary.write(pathlib.Path(directory))
        tokens = f'[models.tokens]\ntokenizer_file = "{directory}/tokenizer.json"\nparity_check = false\n'
        with Fleet(pointsman, envoy, COST_ENGINES, flags, COST_BLOCK_SIZE, tokens) as fleet:
            before = cpu_seconds(fleet.gateway_process)
            time.sleep(5)
            idle = (cpu_seconds(fleet.gateway_process) - before) / 5
            print(f"tokenizer of {entries} tokens, {COST_ENGINES} engines, blocks of {COST_BLOCK_SIZE} tokens")
            print(f"CPU per request, minimum to maximum of {REPEATS} runs; cores at {REQUESTS_PER_SECOND} requests/s by the")
            print(f"minimum; CPU of the idle process: {idle:.1%} of a core", flush=True)
            for number, case in enumerate(CASES):
                for path in PATHS:
                    seeds = [f"{SEED}-{number}-{path}-{run}" for run in range(REPEATS)]
                    runs = [measure(fleet, vocabulary, path, case, seed) for seed in seeds]
                    gateway = sorted(cpu[0] for cpu, _, _ in runs)
                    proxy = min(cpu[1] for cpu, _, _ in runs)
                    _, (predicted, delivered), length = runs[-1]
                    print(
                        f"{case.tokens} tokens ({length:.0f}), {case.name}, {path}: "
                        f"{gateway[0] * 1000:.2f} to {gateway[-1] * 1000:.2f} ms, "
                        f"{gateway[0] * REQUESTS_PER_SECOND:.2f} cores; Envoy {proxy * 1000:.2f} ms; "
                        f"hit rate predicted {predicted:.1%}, delivered {delivered:.1%}", flush=True
                    )
            texts = fleet.metric('pointsman_gateway_tokens_total{model="mock",source="local"')
            untokenized = fleet.metric('pointsman_gateway_tokens_total{model="mock",source="none"')
            print(f"prompts by the local tokenizer: {texts:.0f}; without tokens: {untokenized or 0:.0f}")


def main():
    parts = {"equality": equality, "cost": cost}
    for name in sys.argv[3:] or parts:
        parts[name](*sys.argv[1:3])


main()
