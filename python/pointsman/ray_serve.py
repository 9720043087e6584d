"""Request router of Ray Serve deployments. Needs the package ``ray[serve]``; tested with 2.60.

Each process that calls the deployment has a router of its own. It books its own requests and reads the KV events of all
replicas; it does not know the load that other processes send.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ._native import Placement
from .router import Router, Tokens
from .settings import RequestOptions, RouterSettings, WorkerSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Booking:
    request: PendingRequest
    replica: ReplicaID
    placement: Placement


class PointsmanRequestRouter(RequestRouter):  # type: ignore[misc]
    """Places each request on the replica with the lowest expected cost, and books it there until its response ends.

    ``request_router_kwargs`` are the settings of :class:`pointsman.Router`::

        RequestRouterConfig(
            request_router_class="pointsman.ray_serve.PointsmanRequestRouter", request_router_kwargs={"block_size": 16}
        )

    Subclasses override :meth:`prompt`, :meth:`options` and :meth:`worker`. A request that the router rejects is placed by
    queue length, as Serve does by default, and a warning is logged.
    """

    def initialize_state(self, **settings: Any) -> None:
        # Replicas without KV events have speculative entries.
        self._router = Router(cast(RouterSettings, {"events": {"mode": "auto"}, **settings}))
        self._workers: dict[int, WorkerSettings] = {}
        self._registering = asyncio.Lock()
        self._registration: asyncio.Task[None] | None = None
        self._bookings: dict[str, list[_Booking]] = {}

    def prompt(self, request: PendingRequest) -> Tokens | None:
        """Token ids of a request: the argument ``request_token_ids`` (as of ``ray.serve.llm``) or ``prompt_token_ids``, or
        the first argument if it is a list of integers. ``None``: placed by load only."""
        for name in ("request_token_ids", "prompt_token_ids"):
            if name in request.kwargs:
                return cast(Tokens, request.kwargs[name])
        first = request.args[0] if request.args else None
        return first if isinstance(first, list) and first and isinstance(first[0], int) else None

    def options(self, request: PendingRequest) -> RequestOptions:
        """Options of :meth:`pointsman.Router.route` for a request."""
        return {
            "lora_name": request.metadata.multiplexed_model_id or None,
            "session_id": request.metadata.session_id or None,
            # Serve does not report first tokens.
            "not_streamed": True,
        }

    def worker(self, replica: RunningReplica) -> WorkerSettings:
        """Fields of the worker of a replica: ``pointsman`` in its metadata (``record_replica_metadata``) or in its routing
        stats (``record_routing_stats``), or the KV event endpoints of ``ray.serve.llm``."""
        declared = replica.replica_metadata.get("pointsman") or replica.routing_stats.get("pointsman")
        engine = replica.routing_stats.get("kv_event_metadata")
        if declared is None and engine:
            declared = {"max_num_batched_tokens": engine.get("max_num_batched_tokens")}
            declared["kv_events"] = {name: engine.get(name) for name in ("endpoint", "replay_endpoint")}
        return cast(WorkerSettings, {"endpoint": f"ray://{replica.replica_id.to_full_id_str()}", **(declared or {})})

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._registration = asyncio.get_running_loop().create_task(self._register())

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        # Serve waits between attempts, and each attempt books anew.
        pending_request.routing_context.should_backoff = True
        self._end(pending_request)
        # Full replicas are candidates if all are full: Serve then queries their queues.
        replicas = self.select_available_replicas(candidate_replicas) or candidate_replicas
        try:
            if self._registration is not None:
                await self._registration
            by_id = {_worker_id(replica): replica for replica in replicas}
            options = self.options(pending_request)
            if len(replicas) < len(candidate_replicas):
                options["constraints"] = {**options.get("constraints", {}), "allowed_workers": list(by_id)}
            placement = await self._router.route(self.prompt(pending_request) or (), **options)
            replica = by_id[placement.worker]
        except Exception as error:  # Serve loses a request whose router raises.
            logger.warning("request %s is placed by queue length: %s", pending_request.metadata.request_id, error)
            return [replicas]
        booking = _Booking(pending_request, replica.replica_id, placement)
        self._bookings.setdefault(pending_request.metadata.internal_request_id, []).append(booking)
        pending_request.future.add_done_callback(partial(self._on_routed, pending_request))
        return [[replica]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        for booking in self._bookings.get(internal_request_id, ()):
            if booking.replica == replica_id:
                self._end(booking.request)
                return

    def _on_routed(self, request: PendingRequest, future: asyncio.Future[RunningReplica]) -> None:
        if future.cancelled():
            self._end(request)

    def _end(self, request: PendingRequest) -> None:
        """Ends the booking of a request, if it has one."""
        request_id = request.metadata.internal_request_id
        # Calls of one client request share an id.
        bookings = self._bookings.pop(request_id, [])
        for booking in bookings:
            if booking.request is request:
                booking.placement.free()
        others = [booking for booking in bookings if booking.request is not request]
        if others:
            self._bookings[request_id] = others

    async def _register(self) -> None:
        """Starts the router, and makes its workers those of the present replicas."""
        async with self._registering:
            await self._router.start()
            wanted = {_worker_id(replica): self.worker(replica) for replica in self.curr_replicas.values()}
            for worker in self._workers.keys() - wanted.keys():
                await self._router.remove_worker(worker)
                del self._workers[worker]
            for worker, config in wanted.items():
                if self._workers.get(worker) != config:
                    await self._router.upsert_worker(worker, config)
                    self._workers[worker] = config


def _worker_id(replica: RunningReplica) -> int:
    """A worker id that is equal in all processes."""
    name = replica.replica_id.to_full_id_str().encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
