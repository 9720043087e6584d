"""Measurements of the module, for wheels of the profile ``dist``.

usage: measure.py latency [REQUESTS]   time and CPU of ``await router.route`` with 4,096 tokens, by type of tokens and tasks
       measure.py cancel [REQUESTS]    bookings and memory after requests of which 5 % are cancelled
"""

import array
import asyncio
import random
import resource
import sys
import time

import numpy

from pointsman import Router

WORKERS = {number: f"http://{number}" for number in range(8)}
PROMPT = [random.Random(1).randrange(100_000) for _ in range(4096)]


def quantiles_us(times_ns):
    times_ns.sort()
    return times_ns[len(times_ns) // 2] / 1e3, times_ns[len(times_ns) * 99 // 100] / 1e3


async def latency(requests):
    async with Router(block_size=16, workers=WORKERS) as router:
        for kind, tokens in (
            ("numpy uint32", numpy.array(PROMPT, dtype=numpy.uint32)),
            ("array I", array.array("I", PROMPT)),
            ("numpy int64", numpy.array(PROMPT)),
            ("list", PROMPT),
        ):
            for tasks in (1, 16):
                times_ns = []

                async def ask(count):
                    for _ in range(count):
                        began = time.perf_counter_ns()
                        placement = await router.route(tokens)
                        times_ns.append(time.perf_counter_ns() - began)
                        placement.prefill_completed()
                        placement.free()
                        await asyncio.sleep(0)

                cpu = time.process_time_ns()
                await asyncio.gather(*(ask(requests // tasks) for _ in range(tasks)))
                cpu_us = (time.process_time_ns() - cpu) / 1e3 / len(times_ns)
                median_us, p99_us = quantiles_us(times_ns)
                print(f"{kind:12} {tasks:2} tasks: {median_us:6.1f} us median, {p99_us:6.1f} us p99, {cpu_us:6.1f} us CPU")


def resident_mib():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 2**20


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
                print(f"{(batch + 1) * 500} requests: {router.health()['leases']} bookings, {resident_mib():.1f} MiB")
        print(f"{requests} requests, {cancelled} cancelled: {router.health()['leases']} bookings, {resident_mib():.1f} MiB")


if __name__ == "__main__":
    command, requests = sys.argv[1], int((sys.argv[2:] or ["100000"])[0])
    asyncio.run({"latency": latency, "cancel": cancel}[command](requests))
