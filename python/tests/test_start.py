"""Starts that fail, health before the start, and log events."""

import asyncio
import json
import logging
import re
import socket

import pytest
from conftest import until
from mock_engines import engines, free_port

from pointsman import Router, discovery, errors


def unreachable():
    return discovery.ProbedUrls([f"http://127.0.0.1:{free_port()}"])


def test_a_start_without_engines_is_an_exception_with_the_reason(run):
    async def scenario():
        source = unreachable()
        router = Router(min_initial_workers=1, discovery=[source])
        with pytest.raises(errors.StartTimeout) as missed:
            await router.start(timeout=0.2)
        error = missed.value
        assert (error.reason, error.registered, error.wanted) == ("timeout", 0, 1)
        assert len(error.problems) == 1 and source.urls[0] in error.problems[0], error.problems
        assert error.problems[0] in str(error)
        assert router.health()["state"] == "not_started"

    run(scenario())


def test_an_engine_that_never_responds_is_named(run):
    async def scenario():
        with socket.create_server(("127.0.0.1", 0)) as silent:
            source = discovery.ProbedUrls([f"http://127.0.0.1:{silent.getsockname()[1]}"])
            with pytest.raises(errors.StartTimeout) as missed:
                await Router(min_initial_workers=1, discovery=[source]).start(timeout=0.1)
            assert missed.value.problems == [f"no response yet from {source.urls[0]}"]

    run(scenario())


def test_a_start_waits_for_engines_that_come_later(run):
    async def scenario():
        with engines(1) as urls:
            router = Router(min_initial_workers=1, discovery=[discovery.ProbedUrls(urls)])
            async with await router.start(timeout=None):
                assert await router.start() is router
                assert router.health()["state"] == "serving" and router.eligible_ranks() == 1

    run(scenario())


def test_health_names_problems_before_and_during_the_start(run):
    async def scenario():
        source = unreachable()
        router = Router(min_initial_workers=1, discovery=[source])
        assert router.health()["state"] == "not_started"
        start = asyncio.create_task(router.start())
        await until(lambda: router.health()["problems"] != [])
        health = router.health()
        assert health["state"] == "starting" and source.urls[0] in health["problems"][0]
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert router.health()["state"] == "not_started"

    run(scenario())


def test_a_request_without_engines_names_the_reason(run):
    async def scenario():
        source = unreachable()
        async with Router(discovery=[source]) as router:
            await until(lambda: router.health()["problems"] != [])
            with pytest.raises(errors.Unavailable) as empty:
                await router.route([1])
            assert empty.value.reason == "no_ranks" and source.urls[0] in str(empty.value)

    run(scenario())


def test_log_events_are_records_of_logging(run, caplog):
    caplog.set_level(logging.INFO, "pointsman")

    async def scenario():
        source = unreachable()
        async with Router(pool="logged", workers={7: "http://10.0.0.7:8000"}, discovery=[source]):
            await until(lambda: any("discovery source failed" in record.getMessage() for record in caplog.records))
            failed = next(record for record in caplog.records if "failed" in record.getMessage())
            assert (failed.name, failed.levelname, failed.fields["pool"]) == ("pointsman", "WARNING", "logged")
            assert source.urls[0] in failed.getMessage() and failed.pathname.endswith(".rs")
            await until(lambda: any("worker joined" in record.getMessage() for record in caplog.records))

    run(scenario())


def test_sampled_decisions_are_records_of_logging(run, caplog):
    caplog.set_level(logging.INFO, "pointsman")

    async def scenario():
        async with Router(block_size=16, workers=["http://a"], decision_trace=1.0) as router:
            (await router.route(range(100))).free()
            await until(lambda: any("decision sampled" in record.getMessage() for record in caplog.records))
            sampled = next(record for record in caplog.records if "decision sampled" in record.getMessage())
            assert json.loads(sampled.fields["record"])["prompt_tokens"] == 100

    run(scenario())


def test_the_level_of_the_logger_applies_from_the_next_start(run, caplog):
    async def joined(level):
        caplog.set_level(level, "pointsman")
        caplog.clear()
        source = unreachable()
        async with Router(workers=["http://10.0.0.7:8000"], discovery=[source]):
            # The events of one start arrive in order, and this one follows.
            await until(lambda: any("failed" in record.getMessage() for record in caplog.records))
            return any("joined" in record.getMessage() for record in caplog.records)

    assert [run(joined(level)) for level in (logging.WARNING, logging.INFO, logging.WARNING)] == [False, True, False]


def test_wrong_settings_are_named(run):
    async def refused(*arguments, **settings):
        with pytest.raises(errors.ConfigError) as config:
            await Router(*arguments, **settings).start()
        assert config.value.problems == [str(config.value)]
        return str(config.value)

    async def scenario():
        assert "block_size: " in await refused(block_size="16")
        assert "queue.threshold: " in await refused(queue={"threshold": "1"})
        assert "queue.classes[0].quantum_tokens: " in await refused(queue={"classes": [{"name": "a", "quantum_tokens": -1}]})
        assert re.search("policy.*temperature", await refused(policy={"name": "kv", "temperature": "hot"}))
        assert "index.bytes_max: " in await refused({"index": {"bytes_max": 1.5}})
        async with Router(workers=["http://a"]) as router:
            with pytest.raises(ValueError, match="deadline_ms: "):
                await router.route([1], deadline_ms="soon")
            with pytest.raises(ValueError, match="constraints.pin.worker: "):
                await router.route([1], constraints={"pin": {"worker": "one"}})
            with pytest.raises(ValueError, match="timeout is -1"):
                await Router(workers=["http://a"]).start(-1)

    run(scenario())


def test_workers_are_urls_in_a_list_or_by_id(run):
    async def scenario():
        async with Router(workers=["http://a:1", {"endpoint": "http://b:1"}]) as router:
            names = sorted(placement.endpoint for placement in [await router.route([n]) for n in range(2)])
            assert len(router.workers()) == 2 and set(names) <= {"http://a:1", "http://b:1"}
            with pytest.raises(ValueError, match='"10.0.0.1:8000", must begin with a scheme'):
                await router.upsert_worker(1, "10.0.0.1:8000")
        for workers, error, text in (
            ({1: "10.0.0.1:8000"}, ValueError, '"10.0.0.1:8000", must begin with a scheme'),
            (["localhost"], ValueError, '"localhost", must begin with a scheme'),
            ([{"endpoint": "10.0.0.1:8000"}], ValueError, '"10.0.0.1:8000", must begin with a scheme'),
            (["http://"], ValueError, "must begin with a scheme"),
            ({"one": "http://a"}, TypeError, "worker id one"),
            (["http://a", "http://a"], ValueError, "http://a"),
        ):
            with pytest.raises(error, match=text):
                await Router(workers=workers).start()
        with pytest.raises(TypeError, match="workers is a text"):
            Router(workers="http://a")
        with pytest.raises(TypeError, match="sources of pointsman.discovery"):
            Router(discovery=["http://a"])
        with pytest.raises(errors.StartError, match="10.0.0.1:8000"):
            await Router(discovery=[discovery.ProbedUrls("10.0.0.1:8000")]).start()

    run(scenario())


def test_the_block_size_is_that_of_the_engines(run):
    async def scenario():
        with engines(1, "--block-size", "32") as urls:
            async with Router(min_initial_workers=1, discovery=[discovery.ProbedUrls(urls)]) as router:
                assert router.block_size == 32

    run(scenario())
