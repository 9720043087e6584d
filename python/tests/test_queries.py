"""Events, queries, workers and metrics."""

import json

import pytest
from conftest import until

import pointsman
from pointsman import Router, block_hashes, cleared, discovery, errors, removed, stored

TOKENS = list(range(100))


def test_events_steer_requests_to_the_rank_that_caches_the_prompt(run):
    async def scenario():
        async with Router(block_size=16, workers={n: f"http://{n}" for n in range(1, 5)}) as router:
            hashes = block_hashes(TOKENS, 16)
            await router.apply_events([stored(3, hashes, range(500, 506))])
            async with await router.route(TOKENS) as placement:
                assert (placement.worker, placement.cached_tokens) == (3, 96)
            scores = await router.overlap_scores(TOKENS)
            assert [row["device_blocks"] for row in scores["ranks"]] == [0, 0, 6, 0]
            found = await router.find_best_match(TOKENS)
            assert found["rank"] == {"worker": 3, "rank": 0} and router.health()["leases"] == 0
            explanation = await router.explain(TOKENS)
            assert explanation["chosen"] == {"worker": 3, "rank": 0}
            assert [row["cached_tokens"] for row in explanation["ranks"]] == [0, 0, 96, 0]
            json.dumps(explanation)
            loads = await router.potential_loads(TOKENS)
            assert [load["rank"] for load in loads] == [(n, 0) for n in range(1, 5)]
            assert loads[2]["potential_prefill_tokens"] == 4 and loads[0]["potential_prefill_tokens"] == 100
            await router.apply_events([removed((3, 0), range(502, 506))])
            await router.flush()
            assert [row["device_blocks"] for row in (await router.overlap_scores(TOKENS))["ranks"]] == [0, 0, 2, 0]
            await router.apply_events([cleared((3, 0))])
            assert [row["device_blocks"] for row in (await router.overlap_scores(TOKENS))["ranks"]] == [0, 0, 0, 0]
            with pytest.raises(ValueError, match="events"):
                await router.apply_events([{"rank": 3}])

    run(scenario())


def test_recorded_decisions_are_speculative_entries(run):
    async def scenario():
        config = {"events": {"mode": "off"}}
        async with Router(config, block_size=16, workers={1: "http://1", 2: "http://2"}) as router:
            await router.record_routing_decision(TOKENS, (2, 0))
            await router.flush()
            assert (await router.find_best_match(TOKENS))["rank"] == {"worker": 2, "rank": 0}
            with pytest.raises(errors.NotFound) as unknown:
                await router.record_routing_decision(TOKENS, (9, 0))
            assert unknown.value.rank == (9, 0)

    run(scenario())


def test_options_reach_the_router(run):
    async def scenario():
        workers = {1: {"endpoint": "http://a", "taints": ["large"]}, 2: {"endpoint": "http://b", "lora_adapters": ["x"]}}
        async with Router(block_size=16, workers=workers) as router:
            for options, worker in (
                ({"constraints": {"required_taints": ["large"]}}, 1),
                ({"constraints": {"pin": {"worker": 2}}}, 2),
                ({"lora_name": "x"}, 2),
            ):
                async with await router.route(TOKENS, **options) as placement:
                    assert placement.worker == worker, options
            salted = await router.find_best_match(TOKENS, cache_salt="s", routing_hashes=True)
            assert salted["routing_hashes"]["block_hashes"] == block_hashes(TOKENS, 16, cache_salt="s")

    run(scenario())


def test_workers_are_added_drained_and_removed(run, tmp_path):
    async def scenario():
        file = tmp_path / "workers.toml"
        file.write_text('[[workers]]\nid = 7\nurl = "http://10.0.0.7:8000"\n')
        sources = [discovery.WatchedFile(file)]
        async with Router(block_size=16, min_initial_workers=1, discovery=sources) as router:
            assert router.workers() == {7: [(7, 0)]} and router.eligible_ranks() == 1
            await router.upsert_worker(1, {"endpoint": "http://1", "data_parallel_size": 2})
            assert router.workers()[1] == [(1, 0), (1, 1)]
            await router.cordon_worker(1)
            assert router.eligible_ranks() == 1
            await router.uncordon_worker(1)
            assert router.eligible_ranks() == 3
            assert await router.drain_worker(1, 1.0) == 0
            assert list(router.workers()) == [7]
            await router.upsert_worker(2, "http://2")
            await router.remove_worker(2)
            with pytest.raises(ValueError, match="endpiont"):
                await router.upsert_worker(2, {"endpiont": "http://2"})
            file.write_text("[[workers]]\nid = 8\nurl = \"http://10.0.0.8:8000\"\n")
            await until(lambda: list(router.workers()) == [8])

    run(scenario())


def test_reports_and_metrics_count_placements(run):
    async def scenario():
        async with Router(block_size=16, pool="counted", workers={1: "http://1"}) as router:
            async with await router.route(TOKENS):
                (report,) = router.rank_reports()
                assert (report["rank"], report["active_requests"], report["placements"]) == ((1, 0), 1, 1)
                assert report["prefill_tokens"] <= 100
            health = router.health()
            assert (health["state"], health["ranks"], health["restarts"]) == ("serving", 1, 0)
            page = pointsman.metrics()
            assert "# TYPE pointsman_" in page and 'pool="counted"' in page
        assert router.health()["state"] == "stopped"

    run(scenario())


def test_a_followed_response_reports_its_progress(run):
    async def scenario():
        async with Router(block_size=2, workers={1: "http://1"}) as router:
            async with await router.route(TOKENS) as placement:
                reader = router.follow(placement, "text/event-stream; charset=utf-8")
                for n in range(5):
                    reader.read(b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % n)
                assert reader.output_tokens == 5 and not reader.is_complete
                assert router.rank_reports()[0]["prefill_tokens"] == 0
                usage = b'{"prompt_tokens":100,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":64}}'
                reader.read(b'data: {"choices":[],"usage":' + usage + b"}\n\ndata: [DONE]\n\n")
                reader.end()
                assert (reader.is_complete, reader.cached_tokens) == (True, 64)
                assert router.rank_reports()[0]["delivered_tokens"] in (0, 64)

    run(scenario())
