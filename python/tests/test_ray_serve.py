"""The request router of Ray Serve, without a cluster. Without the package ``ray``, its base class is a stub here."""

import asyncio
import importlib
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import pytest

from pointsman import Router, block_hashes, stored

BLOCK_SIZE = 16
PROMPT = list(range(100))


@dataclass(frozen=True)
class StubReplicaID:
    unique_id: str

    def to_full_id_str(self):
        return f"SERVE_REPLICA::app#engine#{self.unique_id}"


@dataclass
class StubReplica:
    replica_id: StubReplicaID
    routing_stats: dict[str, Any] = field(default_factory=dict)
    replica_metadata: dict[str, Any] = field(default_factory=dict)


class StubRequestRouter:
    """The parts of Serve's class that the router calls."""

    def __init__(self, **settings):
        self.curr_replicas = {}
        self.full = set()
        self.initialize_state(**settings)

    def update_replicas(self, replicas):
        self.curr_replicas = {replica.replica_id: replica for replica in replicas}

    def select_available_replicas(self, candidates):
        return [replica for replica in candidates if replica.replica_id not in self.full]


@pytest.fixture
def module(monkeypatch):
    """The module over the stub, also where ray is installed."""
    names = {"RequestRouter": StubRequestRouter, "ReplicaID": StubReplicaID, "RunningReplica": StubReplica}
    stub = types.SimpleNamespace(PendingRequest=object, **names)
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "ray.serve.request_router", stub)
    monkeypatch.delitem(sys.modules, "pointsman.ray_serve", raising=False)
    yield importlib.import_module("pointsman.ray_serve")
    sys.modules.pop("pointsman.ray_serve", None)


def pending(number, *args, **kwargs):
    metadata = types.SimpleNamespace(
        request_id=f"http-{number}", internal_request_id=f"internal-{number}", multiplexed_model_id="", session_id=""
    )
    context = types.SimpleNamespace(should_backoff=False)
    future = asyncio.get_running_loop().create_future()
    return types.SimpleNamespace(args=args, kwargs=kwargs, metadata=metadata, routing_context=context, future=future)


def started(module, count=3, **settings):
    router = module.PointsmanRequestRouter(block_size=BLOCK_SIZE, **settings)
    replicas = [StubReplica(StubReplicaID(str(number))) for number in range(count)]
    router.update_replicas(replicas)
    return router, replicas


def test_prompts_return_to_their_replica_and_bookings_end_with_their_responses(run, module):
    async def scenario():
        router, replicas = started(module)
        chosen = []
        for number in range(6):
            request = pending(number, prompt_token_ids=[number % 3] * 100)
            [[replica]] = await router.choose_replicas(replicas, request)
            assert request.routing_context.should_backoff
            assert router._router.health()["leases"] == 1
            router.on_request_completed(StubReplicaID("unknown"), request.metadata.internal_request_id)
            assert router._router.health()["leases"] == 1
            router.on_request_completed(replica.replica_id, request.metadata.internal_request_id)
            assert router._router.health()["leases"] == 0 and router._bookings == {}
            await router._router.flush()
            chosen.append(replica.replica_id.unique_id)
        assert chosen[:3] == chosen[3:] and len(set(chosen)) == 3

    run(scenario())


def test_the_load_of_open_requests_counts(run, module):
    async def scenario():
        router, replicas = started(module)
        placed = [(await router.choose_replicas(replicas, pending(n, list(range(n, n + 64)))))[0][0] for n in range(3)]
        assert len({replica.replica_id for replica in placed}) == 3
        # Calls of one client request may share the id.
        same = [pending("shared", PROMPT) for _ in range(2)]
        replica_of = [(await router.choose_replicas(replicas, request))[0][0] for request in same]
        assert router._router.health()["leases"] == 5
        for replica in replica_of:
            router.on_request_completed(replica.replica_id, "internal-shared")
        assert router._router.health()["leases"] == 3

    run(scenario())


def test_a_repeated_attempt_and_a_cancellation_leave_no_booking(run, module):
    async def scenario():
        router, replicas = started(module)
        request = pending(1, PROMPT)
        [[first]] = await router.choose_replicas(replicas, request)
        router.full = {first.replica_id}
        [[second]] = await router.choose_replicas(replicas, request)
        assert second is not first and router._router.health()["leases"] == 1
        router.full = {replica.replica_id for replica in replicas}
        assert len(await router.choose_replicas(replicas, request)) == 1
        assert router._router.health()["leases"] == 1
        request.future.cancel()
        await asyncio.sleep(0)
        assert router._router.health()["leases"] == 0 and router._bookings == {}
        assert await router.choose_replicas(replicas, None) == [replicas]

    run(scenario())


def test_rejected_requests_are_placed_by_queue_length(run, module, caplog):
    async def scenario():
        router, replicas = started(module)
        assert await router.choose_replicas(replicas, pending(1, prompt_token_ids=["word"])) == [replicas]
        # Requests without tokens are placed by load.
        assert len((await router.choose_replicas(replicas, pending(2, "a text")))[0]) == 1
        router, replicas = started(module, blocksize=16)
        assert await router.choose_replicas(replicas, pending(3, PROMPT)) == [replicas]

    run(scenario())
    assert [record.getMessage().split(":")[0] for record in caplog.records if record.name == "pointsman.ray_serve"] == [
        "request http-1 is placed by queue length",
        "request http-3 is placed by queue length",
    ]


def test_workers_follow_the_replicas_and_their_metadata(run, module):
    async def scenario():
        router, replicas = started(module, count=2)
        replicas[0].replica_metadata = {"pointsman": {"max_model_len": 8}}
        replicas[1].routing_stats = {
            "kv_event_metadata": {"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": None, "max_num_batched_tokens": 512}
        }
        router.update_replicas(replicas)
        assert len(await router.choose_replicas(replicas, pending(1, PROMPT))) == 1
        assert len(router._router.workers()) == 2
        assert router.worker(replicas[1])["kv_events"] == {"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": None}
        # The prompt is too long for the worker that remains.
        router.update_replicas(replicas[:1])
        assert await router.choose_replicas(replicas[:1], pending(2, PROMPT)) == [replicas[:1]]
        assert len(router._router.workers()) == 1
        [[replica]] = await router.choose_replicas(replicas[:1], pending(3, PROMPT[:8]))
        assert replica is replicas[0]

    run(scenario())


def test_kv_events_of_the_embedder_steer_requests(run, module):
    async def scenario():
        router, replicas = started(module, events={"mode": "on"})
        await router._registration
        assert isinstance(router._router, Router)
        await router._router.apply_events([stored(module._worker_id(replicas[2]), block_hashes(PROMPT, BLOCK_SIZE))])
        [[replica]] = await router.choose_replicas(replicas, pending(1, request_token_ids=PROMPT))
        assert replica is replicas[2]

    run(scenario())
