"""Uses of the module for type checkers. A line with `type: ignore` must be an error, because unused ones are errors."""

from __future__ import annotations

from array import array

import pointsman
from pointsman import Router, discovery, errors
from pointsman.results import Explanation
from pointsman.settings import RequestOptions, RouterSettings


async def correct() -> None:
    settings: RouterSettings = {"policy": {"name": "kv", "temperature": 0.2}, "discovery": {"interval_ms": 100}}
    router = Router(settings, block_size=16, workers=["http://a", {"endpoint": "http://b", "data_parallel_size": 2}])
    Router(workers={1: "http://a"}, queue={"classes": [{"name": "a", "order": "wspt"}]}, policy="round_robin")
    Router(discovery=[discovery.ProbedUrls(["http://a"], worker={"taints": ["x"]})], events={"mode": "auto"})
    await router.start(timeout=None)
    options: RequestOptions = {"lora_name": "x", "constraints": {"pin": {"worker": 1}}}
    async with await router.route(array("I", [1]), "request", **options) as placement:
        endpoint: str = placement.endpoint
        print(endpoint, placement.facts()["overlap"]["device_blocks"])
    await router.route(messages=[{"role": "user", "content": "Hello"}], tools=None, strict_priority=1)
    explanation: Explanation = await router.explain("Hello", session_id="s")
    print(explanation["ranks"][0]["latency_terms"], router.health()["problems"], router.rank_reports()[0]["placements"])
    assert (await router.overlap_scores([1]))["shared_cache"] is None
    await router.apply_events([pointsman.stored(1, pointsman.block_hashes([1], 16))])


async def wrong(router: Router) -> None:
    await router.route([1], prioritty=3)  # type: ignore[call-arg]
    await router.route([1], deadline_ms="5")  # type: ignore[arg-type]
    await router.route([1], constraints={"pinn": {"worker": 1}})  # type: ignore[typeddict-unknown-key]
    Router(block_siz=16)  # type: ignore[call-arg]
    Router(block_size="16")  # type: ignore[arg-type]
    Router({"queue": {"thresold": 1.0}})  # type: ignore[arg-type]
    Router(queue={"order": "random"})  # type: ignore[typeddict-item]
    Router(policy="best")  # type: ignore[arg-type]
    Router(workers=[{"endpiont": "http://a"}])  # type: ignore[list-item]
    Router(discovery=["http://a"])  # type: ignore[list-item]
    await router.start(timeout="5")  # type: ignore[arg-type]
    router.health()["leasess"]  # type: ignore[typeddict-item]
    (await router.explain([1]))["ranks"][0]["costs"]  # type: ignore[typeddict-item]
    try:
        await router.start()
    except errors.StartTimout:  # type: ignore[attr-defined]
        pass
