"""Measurements of the module, for wheels of the profile ``dist``.

usage: measure.py latency [REQUESTS]   time and CPU of ``await router.route`` with 4,096 tokens, by type of tokens and tasks,
                                       alternately with ``pointsman-bench replay`` (POINTSMAN_BENCH or the PATH) on them
       measure.py copy [TOKENS]        time and memory of the conversion of tokens, by their type
       measure.py cancel [REQUESTS]    bookings and memory after requests of which 5 % are cancelled
"""

import array
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

import numpy

from pointsman import Router, block_hashes

WORKERS = {number: f"http://{number}" for number in range(8)}
PROMPT = [random.Random(1).randrange(100_000) for _ in range(4096)]
ROUNDS = 5

KINDS = {
    "numpy uint32": lambda tokens: numpy.array(tokens, dtype=numpy.uint32),
    "array I": lambda tokens: array.array("I", tokens),
    "numpy int64": lambda tokens: numpy.array(tokens, dtype=numpy.int64),
    "list": list,
}


def quantiles_us(times_ns):
    times_ns = sorted(times_ns)
    return times_ns[len(times_ns) // 2] / 1e3, times_ns[len(times_ns) * 99 // 100] / 1e3


async def python_times(router, tokens, requests, tasks):
    times_ns = []

    async def ask(count):
        for _ in range(count):
            began = time.perf_counter_ns()
            placement = await router.route(tokens)
            times_ns.append(time.perf_counter_ns() - began)
            placement.prefill_completed()
            placement.free()
            await asyncio.sleep(0)

    await asyncio.gather(*(ask(requests // tasks) for _ in range(tasks)))
    return times_ns


def rust_figures(trace, requests, tasks):
    """Median, p99 and CPU time of a closed loop over one prompt of this length, without Python, in microseconds."""
    fleet = ["--workers", str(len(WORKERS)), "--block-size", "16", "--inflight", str(tasks), "--clients", str(tasks), "--take-turns"]
    bench = os.environ.get("POINTSMAN_BENCH", "pointsman-bench")
    # Half of the requests are for warm-up.
    run = [bench, "replay", "--json", "--trace", trace, "--limit", str(2 * requests), *fleet]
    report = json.loads(subprocess.run(run, check=True, stdout=subprocess.PIPE).stdout)
    return report["route_us"]["p50"], report["route_us"]["p99"], report["router_cpu_us_per_request"]


def write_trace(path, requests):
    """Writes a trace in Mooncake's format with requests of one prompt."""
    line = json.dumps({"timestamp": 0, "input_length": len(PROMPT), "output_length": 1, "hash_ids": list(range(len(PROMPT) // 512))})
    with open(path, "w") as trace:
        trace.writelines(line + "\n" for _ in range(requests))


async def latency(requests):
    part = requests // ROUNDS
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as trace:
        write_trace(trace.name, 2 * part)
        async with Router(block_size=16, workers=WORKERS) as router:
            await python_times(router, PROMPT, 2000, 1)
            for tasks in (1, 16):
                callers = {kind: convert(PROMPT) for kind, convert in KINDS.items()}
                rust, times, cpu_us = [], {name: [] for name in callers}, dict.fromkeys(callers, 0)
                for _ in range(ROUNDS):
                    rust.append(rust_figures(trace.name, part, tasks))
                    for name, tokens in callers.items():
                        cpu = time.process_time_ns()
                        times[name] += await python_times(router, tokens, part, tasks)
                        cpu_us[name] += (time.process_time_ns() - cpu) / 1e3
                native = [statistics.median(figures) for figures in zip(*rust)]
                print(f"{tasks:2} tasks, Rust        : {native[0]:6.1f} us median, {native[1]:6.1f} us p99, {native[2]:6.1f} us CPU")
                for name, times_ns in times.items():
                    median, p99 = quantiles_us(times_ns)
                    cpu = cpu_us[name] / len(times_ns)
                    over = f"{median - native[0]:+6.1f} / {p99 - native[1]:+6.1f} us over Rust"
                    print(f"{tasks:2} tasks, {name:12}: {median:6.1f} us median, {p99:6.1f} us p99, {cpu:6.1f} us CPU {over}")


def copy(count):
    """Converts the tokens of a prompt for the hashes of two blocks. Each type has a process of its own."""
    if len(sys.argv) <= 3:
        for kind in KINDS:
            subprocess.run([sys.executable, __file__, "copy", str(count), kind], check=True)
        return
    kind = sys.argv[3]
    prompt = KINDS[kind](PROMPT)
    times = []
    for _ in range(2000):
        began = time.perf_counter_ns()
        block_hashes(prompt, 2048)
        times.append(time.perf_counter_ns() - began)
    large = KINDS[kind](numpy.arange(count) % 100_000)
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # the peak is now the present size
    before = status_bytes("VmHWM")
    block_hashes(large, count // 2)
    grown = status_bytes("VmHWM") - before
    print(f"{kind:12}: 4096 tokens in {quantiles_us(times)[0]:6.1f} us, {grown / count:4.1f} bytes of memory per token")


def status_bytes(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name + ":"))


async def cancel(requests):
    # The record of decisions fills its limit, 32 MiB by default, within 150,000 requests.
    recorder = {"bytes_max": 1 << 20}
    config = {"policy": "kv", "recorder": recorder, "queue": {"classes": [{"name": "default", "busy_prefill_tokens": 65_536}]}}
    tokens, rng, cancelled = numpy.array(PROMPT, dtype=numpy.uint32), random.Random(2), 0

    async def serve(router):
        async with await router.route(tokens) as placement:
            await asyncio.sleep(0)
            placement.prefill_completed()

    async with Router(config, block_size=16, workers=WORKERS) as router:
        for batch in range(requests // 500):
            tasks = [asyncio.create_task(serve(router)) for _ in range(500)]
            await asyncio.sleep(0)
            chosen = rng.sample(tasks, 25)
            for task in chosen:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            cancelled += sum(isinstance(result, asyncio.CancelledError) for result in results)
            failed = [r for r in results if r is not None and not isinstance(r, asyncio.CancelledError)]
            assert not failed, failed[0]
            if batch % (requests // 5000) == 0:
                print(f"{(batch + 1) * 500} requests: {router.health()['leases']} bookings, {status_bytes('VmRSS') / 2**20:.1f} MiB")
        print(f"{requests} requests, {cancelled} cancelled: {router.health()['leases']} bookings, {status_bytes('VmRSS') / 2**20:.1f} MiB")


if __name__ == "__main__":
    command, given = sys.argv[1], sys.argv[2:]
    if command == "copy":
        copy(int(given[0]) if given else 1 << 24)
    else:
        asyncio.run({"latency": latency, "cancel": cancel}[command](int(given[0]) if given else 100_000))
