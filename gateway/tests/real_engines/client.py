"""Compares the predictions of the prefix index with the caches of two real engines behind the gateway.

usage: client.py POINTSMAN DIRECTORY REQUESTS SEED ENGINE. ENGINE is `vllm` or `sglang`. Exits with 1 after a wrong
prediction and lists the differences.

Most requests are sequential, so that all events of the previous request have arrived. 5 % of the first half and 10 %
of the second half repeat an earlier prompt exactly, of a length that is a multiple of the block size: the engine then
recomputes the last block and keeps a copy of it. Others continue an earlier prompt and reuse blocks after the copies.
Occasionally three requests that generate the same tokens run concurrently; these are counted and compared afterwards.
Every tenth prompt is also sent to the engine that was not chosen, bypassing the gateway. SIGINT ends the run
early, with a comparison of the requests sent so far.
"""

import collections
import http.client
import json
import pathlib
import random
import signal
import sys
import threading
import time

from fleet import AUTHORIZED, BLOCK, ENGINES, MODEL, VOCABULARY, call, make_model, start_engine, start_gateway, start_sglang


def complete(port, tokens, max_tokens, request_id=None):
    """Sends a completion. Returns the cached tokens reported by the engine."""
    body = {"model": MODEL, "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = call(port, "/v1/completions", body, {"X-Request-Id": request_id} if request_id else None)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens") or 0


def reusable(tokens):
    """Maximum cached tokens of a prompt: the engine always computes the last token."""
    return (len(tokens) - 1) // BLOCK * BLOCK


class Prompts:
    """Generator of conversations that start with one of a few system prompts."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        self.systems = [self.words(BLOCK * self.dice.randint(2, 6)) for _ in range(10)]
        self.whole = collections.deque(maxlen=40)  # prompts of complete blocks
        self.recent = collections.deque(maxlen=40)

    def words(self, count):
        return [self.dice.randint(2, VOCABULARY - 1) for _ in range(count)]

    def next(self, repeats):
        draw = self.dice.random()
        if draw < repeats and self.whole:
            return "repeated", self.dice.choice(self.whole)
        if draw < repeats + 0.3 and self.recent:
            kind, tokens = "continued", self.dice.choice(self.recent)
        else:
            kind, tokens = "new", self.dice.choice(self.systems)
        count = self.dice.randint(1, 8 * BLOCK)
        if self.dice.random() < 0.4:
            count += -(len(tokens) + count) % BLOCK
        tokens = tokens + self.words(count)
        if len(tokens) > 40 * BLOCK:
            return self.next(repeats)
        (self.whole if len(tokens) % BLOCK == 0 else self.recent).append(tokens)
        if len(tokens) % BLOCK == 0:
            self.recent.append(tokens)
        return kind, tokens


def at_once(port, prompts, n):
    """Sends three concurrent requests that generate the same two blocks."""
    tokens = prompts.words(BLOCK * 2 + 5)
    ids = [f"burst-{n}-{copy}" for copy in range(3)]
    threads = [threading.Thread(target=complete, args=(port, tokens, 2 * BLOCK + 8, name)) for name in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(ids)


def overlaps(admin, tokens):
    """Indexed blocks of a prompt by rank."""
    return call(admin, f"/admin/models/{MODEL}/overlap", {"tokens": tokens}, AUTHORIZED)["overlap"]["ranks"]


def blocks_of(metrics_port):
    connection = http.client.HTTPConnection("127.0.0.1", metrics_port, timeout=10)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    return [line for line in lines if line.startswith(("pointsman_kv_event_blocks_total", "pointsman_kv_events_refused_total"))]


def main():
    binary, directory, count, seed = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    start = {"vllm": start_engine, "sglang": start_sglang}[sys.argv[5]]
    make_model(directory / "model")
    processes = []
    try:
        engines = [start(directory, n) for n in range(ENGINES)]
        processes += [engine[0] for engine in engines]
        for process, port, _ in engines:
            process.wait_for(port, "/health", 900)
        gateway, listen, admin, access = start_gateway(binary, directory, engines)
        processes.append(gateway)
        gateway.wait_for(listen, "/ready", 120)
        sys.exit(compare(listen, admin, access, engines, count, Prompts(seed)))
    finally:
        for process in reversed(processes):
            process.stop()


def compare(listen, admin, access, engines, count, prompts):
    begun, sent, asked, others = time.monotonic(), 0, {}, collections.Counter()
    differences, kinds = [], collections.Counter()
    log, is_stopped = None, threading.Event()
    signal.signal(signal.SIGINT, lambda *_: is_stopped.set())
    ports = {f"http://127.0.0.1:{port}": port for _, port, _ in engines}
    ids = worker_ids(admin)
    while sent < count and not is_stopped.is_set():
        if sent % 250 == 0:
            print(f"{sent} requests, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        repeats = 0.05 if sent < count // 2 else 0.10
        if sent % 60 == 59:
            sent += at_once(listen, prompts, sent)
            time.sleep(0.1)
            continue
        kind, tokens = prompts.next(repeats)
        name = f"request-{sent}"
        known = overlaps(admin, tokens) if sent % 10 == 0 else None
        complete(listen, tokens, prompts.dice.randint(1, 4), name)
        asked[name] = (kind, tokens)
        sent += 1
        time.sleep(0.01)  # waits for the last events
        if known is None:
            continue
        log = log or access.open()
        chosen = line_of(log, name)["worker"]
        for url, port in ports.items():
            if url != chosen:
                predicted = min(overlap_of(known, ids[url]) * BLOCK, reusable(tokens))
                delivered = complete(port, tokens, 1)
                others["equal" if predicted == delivered else "different"] += 1
                if predicted != delivered:
                    differences.append(f"{name} ({kind}, {len(tokens)} tokens), asked of {url} too: "
                                       f"index {predicted}, engine {delivered}")
                time.sleep(0.01)
    time.sleep(1)
    table = collections.defaultdict(collections.Counter)
    for line in map(json.loads, access.read_text().splitlines()):
        name = line.get("request_id")
        if name not in asked:
            kinds["concurrent, not compared"] += str(name).startswith("burst-")
            continue
        kind, tokens = asked[name]
        predicted, delivered = line["predicted_cached_tokens"] or 0, line["cached_tokens"] or 0
        outcome = "equal" if predicted == delivered else "different"
        table[kind][outcome] += 1
        table[kind]["hits"] += delivered > 0
        if outcome == "different":
            differences.append(f"{name} ({kind}, {len(tokens)} tokens): index {predicted}, engine {delivered}")
    compared = sum(row["equal"] + row["different"] for row in table.values())
    print(f"{sent} requests in {time.monotonic() - begun:.0f} s, {kinds['concurrent, not compared']} of them concurrent")
    print(f"{'prompts':<12} {'requests':>9} {'with hits':>9} {'equal':>7} {'different':>9}")
    for kind, row in sorted(table.items()):
        print(f"{kind:<12} {row['equal'] + row['different']:>9} {row['hits']:>9} {row['equal']:>7} {row['different']:>9}")
    print(f"also sent to the other engine: {others['equal']} equal, {others['different']} different")
    for line in blocks_of(listen):
        print(line)
    for line in differences:
        print("DIFFERENT:", line)
    if compared != len(asked):
        print(f"of {len(asked)} requests only {compared} are in the access log")
        return 1
    return int(bool(differences))


def worker_ids(admin):
    connection = http.client.HTTPConnection("127.0.0.1", admin, timeout=10)
    connection.request("GET", f"/admin/models/{MODEL}/workers", headers=AUTHORIZED)
    workers = json.loads(connection.getresponse().read())["workers"]
    return {worker["config"]["endpoint"]: worker["id"] for worker in workers}


def overlap_of(known, worker):
    """Device blocks of the only rank of a worker."""
    return sum(row["device_blocks"] for row in known if row["rank"]["worker"] == worker)


def line_of(log, name):
    """Access log line of the request, written at its end."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        line = log.readline()
        if line.endswith("\n"):
            line = json.loads(line)
            if line.get("request_id") == name:
                return line
        elif line:
            log.seek(log.tell() - len(line.encode()))
        else:
            time.sleep(0.005)
    sys.exit(f"{name} is not in the access log")


main()
