"""The router: coroutines over the native module."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from . import _native
from ._native import AnswerFollower, Placement
from .discovery import DnsNames, ProbedUrls, Source, WatchedFile
from .results import Candidate, Decision, Explanation, Health, OverlapScores, PotentialLoad, RankReport, Request, Traits
from .settings import ChatFields, KeywordSettings, Policy, PromptOptions, RequestOptions, RouterSettings, Worker

if TYPE_CHECKING:
    # Known to type checkers without the package.
    from typing_extensions import Unpack

#: Token ids: a list, a tuple, any iterable of integers, or an object with the buffer protocol such as a NumPy array. Arrays
#: of 32-bit integers are read in place; arrays of other integers are narrowed into a copy.
Tokens: TypeAlias = Iterable[int]

#: A prompt: token ids, or a text for a router with a tokenizer.
Prompt: TypeAlias = "Tokens | str"

#: A rank: ``(worker, rank)``, or the id of a worker with a single rank.
Rank: TypeAlias = "tuple[int, int] | int"

T = TypeVar("T")

atexit.register(_native.shut_down)


class Router:
    """A router of one pool: one model, one role, one block size.

    ``settings`` are those of docs/configuration.md, as keyword arguments or as the dictionary ``config``. ``policy`` is
    the name or the settings of a policy, or a callable ``choose(request, candidates)``. ``workers`` is a list of endpoints or
    workers, or a dictionary of them by id. Use the router in ``async with``::

        async with Router(workers=["http://10.0.0.1:8000"]) as router:
            async with await router.route(tokens) as placement:
                ...  # send the request to placement.endpoint

    ``tokenizer`` is the path of the model's ``tokenizer.json`` or of its directory, and ``chat_template`` that of a Jinja file
    in place of the template beside it. With a tokenizer, prompts may be texts and conversations.

    All methods are called in the thread of the event loop, which ``start`` and waiting calls find themselves. Several
    loops may share one router.
    """

    def __init__(
        self,
        config: RouterSettings | None = None,
        *,
        workers: Mapping[int, Worker] | Iterable[Worker] = (),
        discovery: Sequence[Source] = (),
        policy: Policy | Callable[[Request, list[Candidate]], int | None] | None = None,
        scorers: Sequence[Callable[[Request, Candidate], float]] = (),
        filters: Sequence[Callable[[Request, tuple[int, int], Traits], bool]] = (),
        tokenizer: str | os.PathLike[str] | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        **settings: Unpack[KeywordSettings],
    ) -> None:
        merged: dict[str, Any] = {**(config or {}), **settings}
        custom_policy = None
        if callable(policy):
            custom_policy = policy
        elif policy is not None:
            merged["policy"] = policy
        for source in discovery:
            if not isinstance(source, (WatchedFile, ProbedUrls, DnsNames)):
                raise TypeError(f"discovery has {source!r}, must have sources of pointsman.discovery")
        sources = [source._declared() for source in discovery]
        self._arguments = (merged, _with_ids(workers), sources, custom_policy, list(scorers), list(filters))
        self._tokenizer_files = tokenizer, chat_template
        self._tokenizer: _native.Tokenizer | None = None
        self._native: _native.NativeRouter | None = None
        self._starting: _native.NativeRouter | None = None

    async def start(self, timeout: float | None = 30.0) -> Router:
        """Starts the router, and waits for ``min_initial_workers``, at most ``timeout`` seconds.

        Raises :class:`pointsman.errors.StartTimeout` with the errors of discovery if workers are missing then.
        """
        if self._native is not None:
            return self
        # No local name, which would keep the router in the traceback of an exception.
        self._starting = await _value(_native.start(*self._arguments))
        try:
            tokenizer, chat_template = self._tokenizer_files
            if tokenizer is not None:
                path = Path(tokenizer)
                path = path / "tokenizer.json" if path.is_dir() else path
                self._tokenizer = await asyncio.to_thread(_native.Tokenizer, path, chat_template)
            await _value(self._starting.wait_for_workers(timeout))
            self._native = self._starting
        finally:
            self._starting = None
        return self

    async def shutdown(self, deadline: float = 5.0) -> int:
        """Rejects new requests, waits for bookings until the deadline in seconds, stops the router, and returns the number
        of bookings left."""
        return await _value(self._running.shutdown(deadline))

    async def __aenter__(self) -> Router:
        return await self.start()

    async def __aexit__(self, *exception: object) -> None:
        await self.shutdown()

    async def route(
        self, prompt: Prompt | None = None, request_id: str | None = None, **options: Unpack[PromptOptions]
    ) -> Placement:
        """Chooses the rank of a request and books it there. Cancellation frees the booking.

        The prompt is a sequence of token ids, a text, or the option ``messages``. Raises a :class:`RouteError`.
        """
        if prompt is None or isinstance(prompt, str):
            prompt = await self._tokens(prompt, options)
        # Most requests are placed without a wait.
        result = self._running.route(prompt, request_id, options)
        return result if type(result) is Placement else await _value(result)

    async def tokenize(self, text: str | None = None, **chat: Unpack[ChatFields]) -> memoryview:
        """Token ids of a text, with the special tokens around it, or of a conversation, ``messages``."""
        if self._tokenizer is None:
            self._running  # noqa: B018 (an error before the start)
            raise ValueError("the prompt is a text or a conversation, which needs Router(tokenizer=...)")
        if text is not None and not chat:
            ids = await asyncio.to_thread(self._tokenizer.text, text)
        elif text is None and "messages" in chat:
            ids = await asyncio.to_thread(self._tokenizer.chat, json.dumps(chat))
        else:
            raise TypeError("a prompt is one of: token ids, a text, the option messages")
        return memoryview(ids).cast("I")

    async def _tokens(self, prompt: Prompt | None, options: PromptOptions) -> Tokens:
        """Tokens of a prompt. A conversation is taken out of the options."""
        if prompt is not None and not isinstance(prompt, str):
            return prompt
        chat = {name: options.pop(name) for name in ChatFields.__annotations__ if name in options}  # type: ignore[misc]
        return await self.tokenize(prompt, **cast(ChatFields, chat))

    async def find_best_match(self, prompt: Prompt | None = None, **options: Unpack[PromptOptions]) -> Decision:
        """The decision that :meth:`route` would make now, without a booking."""
        prompt = await self._tokens(prompt, options)
        return await _value(self._running.find_best_match(prompt, options))

    async def explain(self, prompt: Prompt | None = None, **options: Unpack[PromptOptions]) -> Explanation:
        """The decision with the inputs, the cost and the excluding filter of every rank."""
        prompt = await self._tokens(prompt, options)
        return await _value(self._running.explain(prompt, options))

    async def overlap_scores(self, prompt: Prompt | None = None, **options: Unpack[PromptOptions]) -> OverlapScores:
        """Cached blocks of a prompt on every rank, by tier."""
        prompt = await self._tokens(prompt, options)
        return await _value(self._running.overlap_scores(prompt, options))

    async def potential_loads(self, prompt: Prompt | None = None, **options: Unpack[PromptOptions]) -> list[PotentialLoad]:
        """Load of every rank with this request on it."""
        prompt = await self._tokens(prompt, options)
        return await _value(self._running.potential_loads(prompt, options))

    async def apply_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Applies KV events of engines. :func:`stored`, :func:`removed` and :func:`cleared` create them."""
        await _value(self._running.apply_events(events))

    async def flush(self) -> None:
        """Waits until all events accepted so far have been applied."""
        await _value(self._running.flush())

    async def record_routing_decision(self, tokens: Tokens, rank: Rank, **options: Unpack[RequestOptions]) -> None:
        """Records that a prompt was sent to a rank without a booking, for speculative index entries."""
        await _value(self._running.record_routing_decision(tokens, rank, options))

    async def upsert_worker(self, worker: int, config: Worker) -> None:
        """Adds a worker or changes its configuration."""
        given = config if isinstance(config, str) else {**config}
        await _value(self._running.upsert_worker(worker, given))

    async def remove_worker(self, worker: int) -> None:
        """Removes a worker and ends its bookings."""
        await _value(self._running.remove_worker(worker))

    async def drain_worker(self, worker: int, deadline: float) -> int:
        """Removes a worker after its last booking, or after ``deadline`` seconds; returns the bookings ended then."""
        return await _value(self._running.drain_worker(worker, deadline))

    async def cordon_worker(self, worker: int) -> None:
        """Stops new requests for a worker."""
        await _value(self._running.cordon_worker(worker, True))

    async def uncordon_worker(self, worker: int) -> None:
        """Ends a cordon."""
        await _value(self._running.cordon_worker(worker, False))

    def follow(self, placement: Placement, content_type: str) -> AnswerFollower:
        """A reader that reports the progress of a response to its placement. Pass it each chunk of the body."""
        return AnswerFollower(placement, content_type, self.block_size)

    def free(self, request_id: str) -> None:
        """Ends the booking of a request, also from another task."""
        self._running.free(request_id)

    def health(self) -> Health:
        """State, number of ranks, problems, hung and restarted actors, and bookings (``leases``); also before and during the
        start."""
        if self._starting is not None:
            return {**self._starting.health(), "state": "starting"}
        if self._native is not None:
            return self._native.health()
        nothing: Health = {
            "state": "not_started",
            "ranks": 0,
            "cold": [],
            "problems": [],
            "hung": [],
            "restarts": 0,
            "leases": 0,
        }
        return nothing

    def rank_reports(self) -> list[RankReport]:
        """Booked load and placements of every rank."""
        return self._running.rank_reports()

    def workers(self) -> dict[int, list[tuple[int, int]]]:
        """Registered workers with their ranks."""
        return self._running.workers()

    def eligible_ranks(self) -> int:
        """Number of ranks that can serve now; 0 means not ready."""
        return self._running.eligible_ranks()

    @property
    def block_size(self) -> int:
        """Tokens per block: the setting, or without it the size that the engines report."""
        return self._running.block_size

    @property
    def _running(self) -> _native.NativeRouter:
        if self._native is None:
            raise RuntimeError("the router has not started: use it in `async with`, or await start() first")
        return self._native


async def _value(result: T | _native.Pending[T]) -> T:
    """The value of a native call, which is ready or pending."""
    if not isinstance(result, _native.Pending):
        return result
    try:
        return await result.future
    except asyncio.CancelledError:
        result.cancel()
        raise


def _with_ids(workers: Mapping[int, Worker] | Iterable[Worker]) -> list[tuple[int | None, str | dict[str, Any]]]:
    """Workers with their ids; ``None`` for an id derived from the endpoint, as those of discovery are."""
    if isinstance(workers, str):
        raise TypeError("workers is a text, must be a list of workers, or a dictionary of workers by id")
    pairs: Iterable[tuple[int | None, Worker]]
    pairs = workers.items() if isinstance(workers, Mapping) else ((None, worker) for worker in workers)
    return [(number, given if isinstance(given, str) else {**given}) for number, given in pairs]


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
