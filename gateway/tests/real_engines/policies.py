"""Compares policies on real vLLM servers behind the gateway: hit rate, time to first token, and end-to-end time.

usage: policies.py POINTSMAN DIRECTORY REPETITIONS SEED [ENGINES]. Exits with 1 if a request fails.

The workload is a number of concurrent clients. Each client runs conversations: every turn sends the whole context of the
conversation, which starts with one of a few system prompts, waits for the streamed answer, and thinks. A repetition runs
the same conversations under each policy, in rotating order. Each run has empty caches and a new gateway, so learned
speeds are learned again. The first turns of a run are sent and not measured. The hit rate is from vLLM's own counters of
prefix cache queries and hits in tokens.

The engines and the client share the cores of one machine, so absolute times mean little. Ratios within a repetition do.
"""

import concurrent.futures
import http.client
import json
import os
import pathlib
import random
import statistics
import sys
import threading
import time

from fleet import BLOCK, ENGINES, MODEL, VOCABULARY, call, make_model, start_engine, start_gateway

POLICIES = ["round_robin", "kv", "latency"]
# Large enough that the computation of a prompt takes most of the time to its first token.
SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4}
SYSTEMS = 6  # system prompts
SYSTEM_TOKENS = 12 * BLOCK
CLIENTS_PER_ENGINE = 6
CONVERSATIONS_PER_CLIENT = 4
TURNS = 6
TURN_TOKENS = (4 * BLOCK, 8 * BLOCK)
OUTPUT_TOKENS = 24
THINK_SECONDS = 1.0  # mean
WARMUP_SHARE = 0.15


class Conversation:
    """Conversation with fixed random turns; answers depend on the model alone."""

    def __init__(self, dice, systems):
        self.tokens = list(dice.choice(systems))
        self.turns = [words(dice, dice.randint(*TURN_TOKENS)) for _ in range(TURNS)]
        self.pauses = [dice.expovariate(1 / THINK_SECONDS) for _ in range(TURNS)]


def words(dice, count):
    return [dice.randint(2, VOCABULARY - 1) for _ in range(count)]


def stream(port, tokens):
    """Sends a completion. Returns time to first token, end-to-end time, and output tokens."""
    body = {"model": MODEL, "prompt": tokens, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    begun = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status} {answer.read()[:500]!r}")
    first, output = None, []
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        choices = json.loads(line[6:]).get("choices")
        if choices and choices[0].get("text"):
            first = first or time.monotonic()
            # The text of token n is "w" and n - 2.
            output += [int(word[1:]) + 2 for word in choices[0]["text"].split() if word[1:].isdigit()]
    if first is None:
        raise RuntimeError("a stream ended without a token")
    return first - begun, time.monotonic() - begun, output


def counters(engines):
    """Tokens that were looked up in the prefix caches, and those found, over all engines."""
    sums = {"vllm:prefix_cache_queries_total": 0.0, "vllm:prefix_cache_hits_total": 0.0}
    for _, port, _ in engines:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/metrics")
        for line in connection.getresponse().read().decode().splitlines():
            name = line.split("{")[0].split(" ")[0]
            if name in sums:
                sums[name] += float(line.rsplit(" ", 1)[1])
    return list(sums.values())


def reset(engines):
    for _, port, _ in engines:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", "/reset_prefix_cache")
        status = connection.getresponse().status
        if status != 200:
            sys.exit(f"/reset_prefix_cache: {status}")


def run(binary, directory, engines, policy, seed):
    """One run of the workload under a policy. Returns its figures."""
    gateway, listen, _, _ = start_gateway(binary, directory, engines, policy)
    try:
        gateway.wait_for(listen, "/ready", 120)
        reset(engines)
        time.sleep(1)  # the gateway receives the events of the reset
        before = counters(engines)
        taken = drive(listen, len(engines), seed)
        queries, hits = (after - earlier for after, earlier in zip(counters(engines), before))
    finally:
        gateway.stop()
    firsts, ends = sorted(first for first, _ in taken), [end for _, end in taken]
    return {
        "TTFT mean": statistics.mean(firsts),
        "TTFT p99": firsts[min(len(firsts) - 1, int(len(firsts) * 0.99))],
        "end-to-end mean": statistics.mean(ends),
        "hit rate": hits / queries,
    }


def drive(port, engines, seed):
    """Sends the workload. Returns the times of the measured requests."""
    dice = random.Random(seed)
    systems = [words(dice, SYSTEM_TOKENS) for _ in range(SYSTEMS)]
    clients = CLIENTS_PER_ENGINE * engines
    plans = [[Conversation(dice, systems) for _ in range(CONVERSATIONS_PER_CLIENT)] for _ in range(clients)]
    warmup = int(clients * CONVERSATIONS_PER_CLIENT * TURNS * WARMUP_SHARE)
    times, lock = [], threading.Lock()

    def converse(plan):
        for conversation in plan:
            for turn, pause in zip(conversation.turns, conversation.pauses):
                time.sleep(pause)
                conversation.tokens += turn
                first, end, output = stream(port, conversation.tokens)
                conversation.tokens += output
                with lock:
                    times.append((first, end))

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(converse, plan) for plan in plans]:
            done.result()
    return times[warmup:]


def report(runs):
    """Prints medians and, for each policy, ratios to the first one within a repetition: median, minimum and maximum."""
    figures = list(runs[0][POLICIES[0]])
    print(f"\n{len(runs)} repetitions; median, and in brackets the ratio to {POLICIES[0]}: median (minimum to maximum)")
    print("| policy | " + " | ".join(figures) + " |\n|" + "---|" * (len(figures) + 1))
    for policy in POLICIES:
        cells = []
        for figure in figures:
            values = [run[policy][figure] for run in runs]
            value = statistics.median(values)
            cell = f"{value:.3f}" if figure == "hit rate" else f"{value * 1e3:.0f} ms"
            if policy != POLICIES[0]:
                ratios = [run[policy][figure] / run[POLICIES[0]][figure] for run in runs]
                cell += f" [{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})]"
            cells.append(cell)
        print(f"| `{policy}` | " + " | ".join(cells) + " |")


def main():
    binary, directory, repetitions, seed = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    count = int(sys.argv[5]) if len(sys.argv) > 5 else ENGINES
    directory = directory / "policies"
    make_model(directory / "model", SIZES)
    processes, runs = [], []
    try:
        engines = [start_engine(directory, n, is_resettable=True) for n in range(count)]
        processes += [engine[0] for engine in engines]
        for process, port, _ in engines:
            process.wait_for(port, "/health", 900)
        for _, port, _ in engines:  # the first requests compile kernels
            call(port, "/v1/completions", {"model": MODEL, "prompt": [2] * 600, "max_tokens": 4})
        print(f"{count} vLLM servers, {os.cpu_count()} cores, seed {seed}", flush=True)
        for repetition in range(repetitions):
            order = POLICIES[repetition % len(POLICIES):] + POLICIES[: repetition % len(POLICIES)]
            figures = {policy: run(binary, directory, engines, policy, seed + repetition) for policy in order}
            for policy in order:
                shown = ", ".join(f"{name} {value:.3f}" for name, value in figures[policy].items())
                print(f"repetition {repetition + 1}, {policy}: {shown}", flush=True)
            runs.append(figures)
        report(runs)
    finally:
        for process in reversed(processes):
            process.stop()


main()
