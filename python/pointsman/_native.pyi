"""Native half of the package. Use :class:`pointsman.Router` instead of the functions here."""

from asyncio import Future
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Generic, TypeVar, final

from .results import Decision, Explanation, Health, OverlapScores, PotentialLoad, RankReport

__all__ = [
    "AnswerFollower",
    "NativeRouter",
    "Pending",
    "Placement",
    "Tokenizer",
    "__version__",
    "block_hashes",
    "metrics",
    "shut_down",
    "start",
]
__version__: str

_T = TypeVar("_T")

@final
class Pending(Generic[_T]):
    @property
    def future(self) -> Future[_T]: ...
    def cancel(self) -> None: ...

@final
class Placement:
    """A booked request.

    The booking ends with :meth:`free`, with the end of a ``with`` or ``async with`` block, or when the object is
    collected, whichever is first. The facts stay readable afterwards.
    """

    @property
    def endpoint(self) -> str:
        """Endpoint of the worker, from its configuration."""
    @property
    def rank(self) -> tuple[int, int]:
        """The rank, as ``(worker, rank)``."""
    @property
    def worker(self) -> int: ...
    @property
    def rank_at_worker(self) -> int | None:
        """Number of the rank at its engine, for ``X-data-parallel-rank``; ``None`` for a worker with a single rank."""
    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefill is expected to skip."""
    @property
    def decision(self) -> int: ...
    @property
    def request_id(self) -> str: ...
    @property
    def predicted_ttft_seconds(self) -> float | None: ...
    @property
    def is_freed(self) -> bool: ...
    def facts(self) -> Decision:
        """All facts of the decision."""
    def prefill_completed(self) -> None:
        """Reports the first token. Repeated calls have no effect."""
    def output_block(self, decay: float | None = None) -> None:
        """Reports one more output block; ``decay`` is the remaining share of the output, in [0, 1]."""
    def delivered_cached_tokens(self, tokens: int) -> None:
        """Reports the prompt tokens that the engine found in its cache."""
    def outcome(self, outcome: str, *, retry_after: float | None = None) -> None:
        """Reports the outcome for the health of the rank: ``ok``, ``connect_failed``, ``timeout``, ``server_error``,
        ``reset``, ``refused``, ``misconfigured`` or ``invalid_answer``. Only the first report counts."""
    def free(self) -> None:
        """Ends the booking. Repeated calls have no effect."""
    def __enter__(self) -> Placement: ...
    def __exit__(
        self,
        exception_type: type[BaseException] | None = None,
        exception: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None: ...
    async def __aenter__(self) -> Placement: ...
    async def __aexit__(
        self,
        exception_type: type[BaseException] | None = None,
        exception: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None: ...

@final
class AnswerFollower:
    """Reads a response as it passes, and reports the first token, output blocks and cached tokens to its placement."""

    def __new__(cls, placement: Placement, content_type: str, block_size: int) -> AnswerFollower: ...
    def read(self, chunk: bytes) -> None:
        """Reads the next bytes of the response."""
    def end(self) -> None:
        """Reads the end of the response."""
    @property
    def output_tokens(self) -> int: ...
    @property
    def is_complete(self) -> bool:
        """Whether the end mark of the response has arrived."""
    @property
    def cached_tokens(self) -> int | None: ...

@final
class NativeRouter:
    @property
    def block_size(self) -> int: ...
    def wait_for_workers(self, timeout: float | None) -> None | Pending[None]: ...
    def route(
        self, tokens: Any, request_id: str | None, options: Mapping[str, object]
    ) -> Placement | Pending[Placement]: ...
    def find_best_match(self, tokens: Any, options: Mapping[str, object]) -> Decision | Pending[Decision]: ...
    def explain(self, tokens: Any, options: Mapping[str, object]) -> Explanation | Pending[Explanation]: ...
    def overlap_scores(self, tokens: Any, options: Mapping[str, object]) -> OverlapScores | Pending[OverlapScores]: ...
    def potential_loads(
        self, tokens: Any, options: Mapping[str, object]
    ) -> list[PotentialLoad] | Pending[list[PotentialLoad]]: ...
    def apply_events(self, events: Any) -> None | Pending[None]: ...
    def flush(self) -> None | Pending[None]: ...
    def record_routing_decision(
        self, tokens: Any, rank_of_prompt: Any, options: Mapping[str, object]
    ) -> None | Pending[None]: ...
    def upsert_worker(self, worker: int, config: Any) -> None | Pending[None]: ...
    def remove_worker(self, worker: int) -> None | Pending[None]: ...
    def drain_worker(self, worker: int, deadline: float) -> int | Pending[int]: ...
    def cordon_worker(self, worker: int, is_cordoned: bool) -> None | Pending[None]: ...
    def shutdown(self, deadline: float) -> int | Pending[int]: ...
    def free(self, request_id: str) -> None: ...
    def eligible_ranks(self) -> int: ...
    def health(self) -> Health: ...
    def rank_reports(self) -> list[RankReport]: ...
    def workers(self) -> dict[int, list[tuple[int, int]]]: ...

@final
class Tokenizer:
    """Tokenizer of a model, with its chat template. Calls take milliseconds, without the interpreter lock."""

    def __new__(
        cls, tokenizer_file: str | PathLike[str], chat_template_file: str | PathLike[str] | None = None
    ) -> Tokenizer: ...
    def text(self, text: str) -> bytes:
        """Token ids of a text as 32-bit integers."""
    def chat(self, body: str) -> bytes:
        """Token ids of a conversation, which is the JSON object of a chat completion request."""

def start(
    config: Mapping[str, object],
    given_workers: Sequence[tuple[int | None, Any]],
    sources: Sequence[Any],
    policy: Callable[..., Any] | None,
    scorers: Sequence[Callable[..., Any]],
    filters: Sequence[Callable[..., Any]],
) -> NativeRouter | Pending[NativeRouter]: ...
def shut_down() -> None: ...
def metrics() -> str:
    """Metrics of all routers of this process in Prometheus' text format. Empty before the first router starts."""

def block_hashes(
    tokens: Any,
    block_size: int,
    *,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    is_eagle: bool = False,
) -> list[int]:
    """Hashes of the complete blocks of a prompt, as :func:`pointsman.stored` takes them."""
