"""A local Ray Serve application with two replicas of an engine model: prompts return to the replica that computed their
prefix, bookings end with the responses, and workers follow the number of replicas.

Exits with 1 after a violation. Ray listens on loopback.
"""

import asyncio
import collections
import concurrent.futures
import json
import os
import sys
import time
import urllib.request

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_ENABLE_TASK_EVENTS": "0", "RAY_AUTH_MODE": "disabled"}

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

BLOCK_SIZE = 16
PREFIX_BLOCKS = 8
FAMILIES = 8
TURNS = 6
REQUESTS = 40


def confirm(what, holds):
    if not holds:
        sys.exit(f"FAILED: {what}")
    print(f"ok: {what}")


@serve.deployment(
    num_replicas=2,
    ray_actor_options={"num_cpus": 0},
    request_router_config=RequestRouterConfig(
        request_router_class="pointsman.ray_serve.PointsmanRequestRouter", request_router_kwargs={"block_size": BLOCK_SIZE}
    ),
)
class Engine:
    """Counts the blocks of a prompt that it has computed before."""

    def __init__(self):
        self.seen = set()

    def record_replica_metadata(self):
        return {"pointsman": {"max_num_batched_tokens": 8192}}

    async def __call__(self, prompt_token_ids, seconds=0.0):
        await asyncio.sleep(seconds)
        prefixes = [tuple(prompt_token_ids[:end]) for end in range(BLOCK_SIZE, len(prompt_token_ids) + 1, BLOCK_SIZE)]
        cached = sum(prefix in self.seen for prefix in prefixes)
        self.seen.update(prefixes)
        return serve.get_replica_context().replica_id.unique_id, cached, len(prefixes)


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Ingress:
    """Calls the engines, and reports the metrics of its router."""

    def __init__(self, engines):
        self.engines = engines

    async def __call__(self, request):
        body = await request.json()
        if body == "metrics":
            import pointsman

            return pointsman.metrics()
        return await self.engines.remote(prompt_token_ids=body["prompt"], seconds=body.get("seconds", 0.0))


def post(body, patience_s=60.0):
    request = urllib.request.Request("http://127.0.0.1:8000/", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=patience_s) as response:
        content = response.read().decode()
    return content if body == "metrics" else json.loads(content)


def together(seconds, patience_s):
    """Results of concurrent requests with different prompts, without those whose client has left."""

    def one(number):
        try:
            return post({"prompt": [100 + number] * 256, "seconds": seconds}, patience_s[number])
        except TimeoutError:
            return None

    with concurrent.futures.ThreadPoolExecutor(len(patience_s)) as pool:
        return [result for result in pool.map(one, range(len(patience_s))) if result]


def reaches(name, value):
    """Whether a metric of the ingress has a value within ten seconds. Gauges are updated at intervals."""
    end = time.monotonic() + 10
    while metric(name) != value and time.monotonic() < end:
        time.sleep(0.1)
    return metric(name) == value


def metric(name):
    rows = [line for line in post("metrics").splitlines() if line.startswith(name)]
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows)


def main():
    print(f"ray {ray.__version__}, Python {sys.version.split()[0]}")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    serve.start(http_options={"host": "127.0.0.1", "port": 8000})
    serve.run(Ingress.bind(Engine.bind()))
    try:
        hits, blocks, by_family = 0, 0, collections.defaultdict(set)
        for turn in range(TURNS):
            for family in range(FAMILIES):
                prompt = [family] * BLOCK_SIZE * PREFIX_BLOCKS + [1000 * turn + family] * BLOCK_SIZE
                replica, cached, total = post({"prompt": prompt})
                by_family[family].add(replica)
                hits, blocks = hits + cached, blocks + total
        best = FAMILIES * (TURNS - 1) * PREFIX_BLOCKS
        print(f"{FAMILIES * TURNS} requests, {hits} of {blocks} blocks cached, {best} possible")
        confirm("each prefix stays at one replica", all(len(replicas) == 1 for replicas in by_family.values()))
        confirm("both replicas serve", len(set.union(*by_family.values())) == 2)
        confirm("all repeated blocks are cached", hits == best)
        confirm("bookings end with their responses", reaches("pointsman_leases", 0))
        confirm("Pointsman has placed the requests", reaches("pointsman_rank_placements_total", FAMILIES * TURNS))

        served = together(seconds=0.5, patience_s=[60] * REQUESTS)
        counts = collections.Counter(replica for replica, _, _ in served)
        print(f"{REQUESTS} concurrent requests: {sorted(counts.values())} by replica")
        confirm("concurrent requests are spread by load", len(served) == REQUESTS and min(counts.values()) >= REQUESTS // 3)
        # Serve cancels a request whose client has left, queued or not.
        served = together(seconds=1.0, patience_s=[60] * (REQUESTS - 10) + [0.5] * 10)
        print(f"{REQUESTS} concurrent requests, 10 clients leave: {len(served)} served")
        confirm("requests whose clients leave end no other", len(served) == REQUESTS - 10)
        confirm("cancelled requests leave no booking", reaches("pointsman_leases", 0))
    finally:
        serve.shutdown()
        ray.shutdown()


main()
