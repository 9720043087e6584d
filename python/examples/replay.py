"""Replays a trace through a router without engines, and reports hit rate and load by rank.

usage: replay.py TRACE [RANKS] [PLOT.png]

Each line of the trace is a JSON object in Mooncake's format: ``timestamp`` in milliseconds, ``input_length`` in tokens,
and ``hash_ids``, the ids of the prompt's blocks of 512 tokens. A request stays on its rank until the trace has advanced by
its ``output_length`` at 20 ms per token. The index is speculative: it assumes that ranks cache what they were sent. The plot
needs the package ``matplotlib``.
"""

import asyncio
import heapq
import json
import sys

import numpy

from pointsman import Router

BLOCK_SIZE = 512
MS_PER_TOKEN = 20.0


def tokens_of(request):
    """Token ids that are equal where the ids of the blocks are equal."""
    ids = numpy.repeat(numpy.array(request["hash_ids"], dtype=numpy.uint32), BLOCK_SIZE)
    return ids[: request["input_length"]]


async def replay(trace, ranks):
    """Cached and total prompt tokens, and placements and prompt tokens by rank."""
    workers = {number: f"http://rank-{number}" for number in range(ranks)}
    cached_tokens = prompt_tokens = 0
    by_rank = {number: [0, 0] for number in range(ranks)}
    running: list = []
    async with Router(block_size=BLOCK_SIZE, events={"mode": "off"}, workers=workers) as router:
        for number, request in enumerate(trace):
            while running and running[0][0] <= request["timestamp"]:
                heapq.heappop(running)[2].free()
            placement = await router.route(tokens_of(request))
            placement.prefill_completed()
            end_ms = request["timestamp"] + MS_PER_TOKEN * request["output_length"]
            heapq.heappush(running, (end_ms, number, placement))
            cached_tokens += placement.cached_tokens
            prompt_tokens += request["input_length"]
            by_rank[placement.worker][0] += 1
            by_rank[placement.worker][1] += request["input_length"]
        for _, _, placement in running:
            placement.free()
    return cached_tokens, prompt_tokens, by_rank


def plot(by_rank, hit_rate, path):
    from matplotlib import pyplot

    pyplot.bar(list(by_rank), [tokens for _, tokens in by_rank.values()])
    pyplot.title(f"hit rate {hit_rate:.3f}")
    pyplot.xlabel("rank")
    pyplot.ylabel("prompt tokens")
    pyplot.savefig(path)


def main(path, ranks="8", image=None):
    with open(path) as lines:
        trace = [json.loads(line) for line in lines]
    cached_tokens, prompt_tokens, by_rank = asyncio.run(replay(trace, int(ranks)))
    hit_rate = cached_tokens / max(prompt_tokens, 1)
    print(f"requests {len(trace)}, hit rate {hit_rate:.4f}")
    for rank, (placements, tokens) in by_rank.items():
        print(f"rank {rank}: {placements} placements, {tokens} prompt tokens")
    if image:
        plot(by_rank, hit_rate, image)


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 4:
        print(next(line for line in __doc__.splitlines() if line.startswith("usage: ")), file=sys.stderr)
        sys.exit(2)
    main(*sys.argv[1:])
