"""The router: coroutines over the native module."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from . import _native
from ._native import AnswerFollower, Placement
from .discovery import Source

#: Token ids: a list, a tuple, any iterable of integers, or an object with the buffer protocol such as a NumPy array. Arrays
#: of 32-bit integers are read in place; arrays of other integers are narrowed into a copy.
Tokens: TypeAlias = "Sequence[int] | Iterable[int] | memoryview | Any"

#: A rank: ``(worker, rank)``, or the id of a worker with a single rank.
Rank: TypeAlias = "tuple[int, int] | int"

#: A worker: its endpoint, or a dictionary of the fields in docs/discovery.md.
Worker: TypeAlias = "str | Mapping[str, Any]"

atexit.register(_native.shut_down)


class Router:
    """A router of one pool: one model, one role, one block size.

    ``settings`` are those of docs/configuration.md, as keyword arguments or as the dictionary ``config``. ``policy`` is
    the name or the settings of a policy, or a callable ``choose(request, candidates)``. Use the router in ``async with``::

        async with Router(block_size=16, workers={1: "http://10.0.0.1:8000"}) as router:
            async with await router.route(tokens) as placement:
                ...  # send the request to placement.endpoint

    All methods are called in the thread of the event loop, which ``start`` and waiting calls find themselves. Several
    loops may share one router.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        workers: Mapping[int, Worker] | None = None,
        discovery: Sequence[Source] = (),
        policy: str | Mapping[str, Any] | Callable[[dict[str, Any], list[dict[str, Any]]], int | None] | None = None,
        scorers: Sequence[Callable[[dict[str, Any], dict[str, Any]], float]] = (),
        filters: Sequence[Callable[[dict[str, Any], tuple[int, int], dict[str, Any]], bool]] = (),
        **settings: Any,
    ) -> None:
        config = {**(config or {}), **settings}
        custom_policy = None
        if callable(policy):
            custom_policy = policy
        elif policy is not None:
            config["policy"] = policy
        self._arguments = (
            config,
            {worker: given if isinstance(given, str) else dict(given) for worker, given in (workers or {}).items()},
            [source._declared() for source in discovery],
            custom_policy,
            list(scorers),
            list(filters),
        )
        self._native: _native.NativeRouter | None = None

    async def start(self) -> Router:
        """Starts the router, and waits for ``min_initial_workers``."""
        if self._native is None:
            self._native = await _value(_native.start(*self._arguments))
        return self

    async def shutdown(self, deadline: float = 5.0) -> int:
        """Rejects new requests, waits for bookings until the deadline in seconds, stops the router, and returns the number
        of bookings left."""
        left: int = await _value(self._running.shutdown(deadline))
        return left

    async def __aenter__(self) -> Router:
        return await self.start()

    async def __aexit__(self, *exception: object) -> None:
        await self.shutdown()

    async def route(self, tokens: Tokens, request_id: str | None = None, **options: Any) -> Placement:
        """Chooses the rank of a request and books it there. Cancellation frees the booking.

        ``options`` are the fields of ``RequestOptions``: ``lora_name``, ``cache_salt``, ``session_id``, ``deadline_ms``,
        ``constraints`` and others. Raises a :class:`RouteError`.
        """
        result = self._running.route(tokens, request_id, options)
        # Most requests are placed without a wait.
        return result if type(result) is Placement else await _value(result)

    async def find_best_match(self, tokens: Tokens, **options: Any) -> dict[str, Any]:
        """The decision that :meth:`route` would make now, without a booking."""
        found: dict[str, Any] = await _value(self._running.find_best_match(tokens, options))
        return found

    async def explain(self, tokens: Tokens, **options: Any) -> dict[str, Any]:
        """The decision with the inputs, the cost and the excluding filter of every rank."""
        explanation: dict[str, Any] = await _value(self._running.explain(tokens, options))
        return explanation

    async def overlap_scores(self, tokens: Tokens, **options: Any) -> dict[str, Any]:
        """Cached blocks of a prompt on every rank, by tier."""
        scores: dict[str, Any] = await _value(self._running.overlap_scores(tokens, options))
        return scores

    async def potential_loads(self, tokens: Tokens, **options: Any) -> list[dict[str, Any]]:
        """Load of every rank with this request on it."""
        loads: list[dict[str, Any]] = await _value(self._running.potential_loads(tokens, options))
        return loads

    async def apply_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Applies KV events of engines. :func:`stored`, :func:`removed` and :func:`cleared` create them."""
        await _value(self._running.apply_events(events))

    async def flush(self) -> None:
        """Waits until all events accepted so far have been applied."""
        await _value(self._running.flush())

    async def record_routing_decision(self, tokens: Tokens, rank: Rank, **options: Any) -> None:
        """Records that a prompt was sent to a rank without a booking, for speculative index entries."""
        await _value(self._running.record_routing_decision(tokens, rank, options))

    async def upsert_worker(self, worker: int, config: Worker) -> None:
        """Adds a worker or changes its configuration."""
        given = config if isinstance(config, str) else dict(config)
        await _value(self._running.upsert_worker(worker, given))

    async def remove_worker(self, worker: int) -> None:
        """Removes a worker and ends its bookings."""
        await _value(self._running.remove_worker(worker))

    async def drain_worker(self, worker: int, deadline: float) -> int:
        """Removes a worker after its last booking, or after ``deadline`` seconds; returns the bookings ended then."""
        ended: int = await _value(self._running.drain_worker(worker, deadline))
        return ended

    async def cordon_worker(self, worker: int) -> None:
        """Stops new requests for a worker."""
        await _value(self._running.cordon_worker(worker, True))

    async def uncordon_worker(self, worker: int) -> None:
        """Ends a cordon."""
        await _value(self._running.cordon_worker(worker, False))

    def follow(self, placement: Placement, content_type: str) -> AnswerFollower:
        """A reader that reports the progress of a response to its placement. Pass it each chunk of the body."""
        return AnswerFollower(placement, content_type, self._running.block_size)

    def free(self, request_id: str) -> None:
        """Ends the booking of a request, also from another task."""
        self._running.free(request_id)

    def health(self) -> dict[str, Any]:
        """State, number of ranks, problems, hung and restarted actors, and bookings (``leases``)."""
        return self._running.health()

    def rank_reports(self) -> list[dict[str, Any]]:
        """Booked load and placements of every rank."""
        return self._running.rank_reports()

    def workers(self) -> dict[int, list[tuple[int, int]]]:
        """Registered workers with their ranks."""
        return self._running.workers()

    def eligible_ranks(self) -> int:
        """Number of ranks that can serve now; 0 means not ready."""
        return self._running.eligible_ranks()

    @property
    def _running(self) -> _native.NativeRouter:
        if self._native is None:
            raise RuntimeError("the router has not started: use it in `async with`, or await start() first")
        return self._native


async def _value(result: Any) -> Any:
    """The value of a native call, which is ready or pending."""
    if type(result) is not _native.Pending:
        return result
    try:
        return await result.future
    except asyncio.CancelledError:
        result.cancel()
        raise


def stored(
    rank: Rank,
    block_hashes: Sequence[int],
    engine_hashes: Sequence[int] | None = None,
    *,
    parent: int | None = None,
    tier: str = "device",
) -> dict[str, Any]:
    """The event that a rank has stored consecutive blocks behind ``parent``, an engine hash.

    ``block_hashes`` are those of :func:`pointsman.block_hashes`. ``engine_hashes`` are the engine's own names of the blocks
    and default to the block hashes, which suffices if no prefix repeats a block.
    """
    names = block_hashes if engine_hashes is None else engine_hashes
    blocks = [{"engine_hash": name, "block_hash": block} for name, block in zip(names, block_hashes, strict=True)]
    return {"rank": _rank(rank), "tier": tier, "data": {"stored": {"parent": parent, "blocks": blocks}}}


def removed(rank: Rank, engine_hashes: Sequence[int], *, tier: str = "device") -> dict[str, Any]:
    """The event that a rank has removed blocks."""
    return {"rank": _rank(rank), "tier": tier, "data": {"removed": {"blocks": list(engine_hashes)}}}


def cleared(rank: Rank) -> dict[str, Any]:
    """The event that a rank has cleared its cache."""
    return {"rank": _rank(rank), "data": "cleared"}


def _rank(rank: Rank) -> dict[str, int]:
    worker, number = rank if isinstance(rank, tuple) else (rank, 0)
    return {"worker": worker, "rank": number}
