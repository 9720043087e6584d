"""Placements, bookings and cancellation."""

import asyncio
import gc
import os
import subprocess
import sys
import threading

import pytest
from conftest import until

import pointsman
from pointsman import Router, errors

WORKERS = {1: "http://10.0.0.1:8000", 2: {"endpoint": "http://10.0.0.2:8000", "data_parallel_size": 2}}

#: One request at a time per rank until its prefill is reported: later ones wait in the queue.
ONE_AT_A_TIME = {"policy": "kv", "queue": {"classes": [{"name": "default", "busy_prefill_tokens": 1}]}}


def test_a_placement_names_its_rank_and_frees_its_booking(run):
    async def scenario():
        async with Router(block_size=16, workers=WORKERS) as router:
            async with await router.route(range(100), "request-1") as placement:
                assert placement.endpoint in ("http://10.0.0.1:8000", "http://10.0.0.2:8000")
                assert placement.rank in [(1, 0), (2, 0), (2, 1)]
                assert placement.worker == placement.rank[0]
                assert (placement.cached_tokens, placement.request_id) == (0, "request-1")
                assert (placement.rank_at_worker is None) == (placement.worker == 1)
                placement.prefill_completed()
                placement.output_block()
                placement.output_block(0.5)
                with pytest.raises(errors.InvalidArgument, match="1.5") as raised:
                    placement.output_block(1.5)
                assert raised.value.reason == "decay"
                placement.delivered_cached_tokens(0)
                placement.outcome("ok")
                with pytest.raises(ValueError, match="fine"):
                    placement.outcome("fine")
                assert router.health()["leases"] == 1
                assert placement.facts()["cached_tokens"] == 0
            assert placement.is_freed and router.health()["leases"] == 0
            placement.free()
            placement.prefill_completed()
            assert "freed" in repr(placement)

    run(scenario())


def test_a_collected_placement_frees_its_booking(run):
    async def scenario():
        async with Router(block_size=16, workers=WORKERS) as router:
            placement = await router.route([1, 2, 3])
            assert router.health()["leases"] == 1
            del placement
            gc.collect()
            assert router.health()["leases"] == 0
            with await router.route([1, 2, 3]):
                assert router.health()["leases"] == 1
            assert router.health()["leases"] == 0

    run(scenario())


def test_errors_are_classes_with_fields(run):
    async def scenario():
        async with Router(block_size=16) as router:
            with pytest.raises(errors.Unavailable) as no_ranks:
                await router.route([1])
            assert (no_ranks.value.reason, no_ranks.value.http_status) == ("no_ranks", 503)
            await router.upsert_worker(1, {"endpoint": "http://a", "max_model_len": 8})
            with pytest.raises(errors.InvalidArgument) as too_long:
                await router.route(range(9))
            assert (too_long.value.prompt_tokens, too_long.value.max_model_len) == (9, 8)
            placement = await router.route([1], "twice")
            with pytest.raises(errors.AlreadyExists, match="twice") as duplicate:
                await router.route([1], "twice")
            assert duplicate.value.request_id == "twice"
            placement.free()
            with pytest.raises(errors.NotFound) as no_booking:
                router.free("twice")
            assert no_booking.value.fields == {"request_id": "twice"}
            with pytest.raises(errors.NotFound) as pinned:
                await router.route([1], constraints={"pin": {"worker": 7}})
            assert (pinned.value.worker, pinned.value.refused_by) == (7, None)
            with pytest.raises(errors.WorkerError) as unknown:
                await router.remove_worker(7)
            assert (unknown.value.reason, unknown.value.worker) == ("unknown_worker", 7)
            with pytest.raises(ValueError, match="priority"):
                await router.route([1], priority=3)
        with pytest.raises(errors.Unavailable, match="shut down"):
            await router.route([1])
        with pytest.raises(errors.ConfigError) as config:
            await Router(block_size=0, decision_trace=2).start()
        assert len(config.value.problems) == 2
        with pytest.raises(errors.ConfigError, match="blocksize"):
            await Router(blocksize=16).start()
        with pytest.raises(errors.StartError, match="workers.yaml"):
            await Router(discovery=[pointsman.discovery.WatchedFile("workers.yaml")]).start()

    run(scenario())


def test_exceptions_survive_pickling():
    import pickle

    error = errors.ResourceExhausted("full", reason="backpressure", retry_after_seconds=1.5)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.reason, copy.retry_after_seconds) == (
        errors.ResourceExhausted,
        "full",
        "backpressure",
        1.5,
    )


def test_waiting_requests_are_placed_in_order_and_cancellation_frees_them(run):
    async def scenario():
        async with Router(ONE_AT_A_TIME, block_size=16, workers={1: "http://a"}) as router:
            first = await router.route(range(100), "first")
            waiting = [asyncio.create_task(router.route(range(100), f"waiting-{n}")) for n in range(3)]
            await until(lambda: router.health()["leases"] == 4)
            await asyncio.sleep(0)
            assert not any(task.done() for task in waiting)
            waiting[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting[0]
            await until(lambda: router.health()["leases"] == 3)
            first.free()
            second = await waiting[1]
            assert second.request_id == "waiting-1"
            # A result that has arrived is freed as well, if its task is cancelled before it continues.
            waiting[2].cancel()
            second.free()
            with pytest.raises(asyncio.CancelledError):
                await waiting[2]
            await until(lambda: router.health()["leases"] == 0)
            with pytest.raises(errors.ResourceExhausted) as full:
                busy = await router.route(range(100))
                await router.route(range(100), do_not_queue=True)
            assert full.value.reason == "backpressure" and full.value.retry_after_seconds >= 0
            busy.free()
            with pytest.raises(errors.DeadlineExceeded) as late:
                busy = await router.route(range(100))
                await router.route(range(100), deadline_ms=20)
            assert late.value.waited_seconds >= 0.02
            busy.free()

    run(scenario())


def test_a_placement_that_arrives_after_the_cancellation_is_freed(run):
    async def scenario():
        async with Router(ONE_AT_A_TIME, block_size=16, workers={1: "http://a"}) as router:
            for round_number in range(50):
                first = await router.route(range(100))
                task = asyncio.create_task(router.route(range(100)))
                await until(lambda: router.health()["leases"] == 2)
                first.free()
                if round_number % 2:
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    (await task).free()  # it had ended before
                except asyncio.CancelledError:
                    pass
                await until(lambda: router.health()["leases"] == 0)

    run(scenario())


def test_two_loops_in_two_threads_share_a_router():
    router = Router(ONE_AT_A_TIME, block_size=16, workers={1: "http://a", 2: "http://b"})
    asyncio.run(router.start())
    failures = []

    def serve():
        async def requests():
            for n in range(200):
                async with await router.route(range(n)):
                    await asyncio.sleep(0)

        try:
            asyncio.run(requests())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and router.health()["leases"] == 0
    asyncio.run(router.shutdown())


def test_calls_before_the_start_are_errors():
    with pytest.raises(RuntimeError, match="async with"):
        Router().workers()


def child(code: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a new interpreter, in development mode and with warnings as errors."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


IN_FLIGHT = """
import asyncio
from pointsman import Router

async def main():
    asyncio.get_running_loop().slow_callback_duration = 60  # development mode reports slow steps
    router = await Router({"policy": "kv", "queue": {"classes": [{"name": "default", "busy_prefill_tokens": 1}]}}, block_size=16,
                          workers={1: "http://a"}).start()
    first = await router.route(range(100))
    waiting = [asyncio.ensure_future(router.route(range(100))) for _ in range(50)]
    await asyncio.sleep(0.01)
    print("in flight", router.health()["leases"])
    return router, first, waiting
"""


def test_the_interpreter_exits_with_requests_in_flight():
    ended = child(IN_FLIGHT + "kept = asyncio.run(main())")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "in flight 51\n", "")
    # The loop is neither closed nor emptied: asyncio reports the tasks, nothing else happens.
    ended = child(IN_FLIGHT + "loop = asyncio.new_event_loop(); kept = loop.run_until_complete(main()); raise SystemExit(3)")
    assert (ended.returncode, ended.stdout) == (3, "in flight 51\n")
    ended = child(IN_FLIGHT + "import os\nasync def leave():\n    await main()\n    os._exit(4)\nasyncio.run(leave())")
    assert (ended.returncode, ended.stdout) in [(4, "in flight 51\n"), (4, "")]


FORKED = """
import asyncio, gc, os, sys, warnings
from pointsman import Router, errors
warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads

async def main():
    router = await Router(block_size=16, workers={1: "http://a"}).start()
    return router, await router.route([1, 2, 3])

router, placement = asyncio.run(main())
pid = os.fork()
if pid == 0:
    for call in (router.health, placement.prefill_completed, placement.free, lambda: asyncio.run(Router().start())):
        try:
            call()
        except errors.ForkError as error:
            assert error.parent_pid == os.getppid(), error
        else:
            sys.exit("no error")
    del router, placement
    gc.collect()
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), router.health()["leases"])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_is_refused_and_exits():
    ended = child(FORKED)
    assert (ended.returncode, ended.stdout) == (0, "0 1\n"), ended.stderr
