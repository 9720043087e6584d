"""Types of results."""

from __future__ import annotations

from typing import Literal, TypeAlias, TypedDict

from .settings import PolicyName, RankName

Filter: TypeAlias = Literal[
    "allowed",
    "excluded",
    "pin",
    "required_taints",
    "custom",
    "unavailable",
    "draining",
    "asleep",
    "unresponsive",
    "refusing",
    "lora",
    "overloaded",
    "busy",
    "full",
    "targets",
]


class Health(TypedDict):
    """Health of a router."""

    #: ``stopped`` after :meth:`pointsman.Router.shutdown`; ``failed`` if the router cannot continue.
    state: Literal["not_started", "starting", "serving", "failed", "stopped"]
    ranks: int
    #: Ranks whose index contents were lost.
    cold: list[tuple[int, int]]
    #: Engines that cannot be used, and other problems, one sentence each.
    problems: list[str]
    #: Actors that hang.
    hung: list[str]
    restarts: int
    #: Bookings and waiting requests.
    leases: int


class RankReport(TypedDict):
    """Booked load and placements of a rank."""

    rank: tuple[int, int]
    active_requests: int
    active_blocks: int
    prefill_tokens: int
    prefill_wait_seconds: float
    held_blocks: int
    placements: int
    prompt_tokens: int
    predicted_tokens: int
    delivered_tokens: int


class PotentialLoad(TypedDict):
    """Load of a rank with one request more."""

    rank: tuple[int, int]
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int


class TierOverlap(TypedDict):
    """Leading blocks of a prompt on a rank. Each lower tier counts only blocks beyond the tiers above it."""

    device_blocks: int
    host_pinned_blocks: int
    disk_blocks: int
    external_blocks: int


class PrefillLoad(TypedDict):
    """Prefill of a request."""

    effective_tokens: int
    cached_tokens: int
    expected_duration_seconds: float | None
    is_reported: bool


class HashedPrompt(TypedDict):
    """Hashes of the complete blocks of a prompt."""

    block_hashes: list[int]
    sequence_hashes: list[int]
    prompt_tokens: int


class _Decision(TypedDict):
    number: int
    rank: RankName
    overlap: TierOverlap
    effective_overlap_blocks: float
    cached_tokens: int
    predicted_cached_tokens: int
    shared_cache_blocks: int
    reachable_blocks: int
    prefill_load: PrefillLoad | None
    predicted_ttft_seconds: float | None
    predicted_itl_seconds: float | None


class Decision(_Decision, total=False):
    """A decision."""

    #: With the option ``routing_hashes``.
    routing_hashes: HashedPrompt


class EngineLoad(TypedDict):
    """Load that an engine reported."""

    running: int | None
    waiting: int | None
    kv_usage: float | None
    age_seconds: float
    is_stale: bool


class Candidate(TypedDict):
    """Inputs of a decision about a rank."""

    rank: RankName
    overlap: TierOverlap
    shared_cache_blocks: int
    prefill_tokens: int
    potential_blocks: int
    active_requests: int
    max_num_batched_tokens: int | None
    total_kv_blocks: int | None
    held_blocks: int
    load_age_seconds: float
    index_age_seconds: float | None
    engine_load: EngineLoad | None
    preference: float


class KvCostTerms(TypedDict):
    """Terms of the cost of ``kv``, in blocks."""

    credit_blocks: float
    prefill_blocks: float
    held_blocks: float
    requests_blocks: float


class LatencyCostTerms(TypedDict):
    """Terms of the cost of ``latency``, in seconds."""

    ttft_seconds: float
    kv_wait_seconds: float
    stall_seconds: float
    queue_delay_seconds: float
    decode_seconds: float
    slowdown_seconds: float
    eviction_seconds: float
    replication_seconds: float
    decode_price: float


class Prediction(TypedDict):
    """Predicted latency of a request on a rank."""

    ttft_seconds: float | None
    itl_seconds: float | None


class ExplainedRank(Candidate):
    """A rank in an explanation."""

    excluded_by: Filter | None
    exact: bool
    cached_tokens: int
    cost_terms: KvCostTerms
    latency_terms: LatencyCostTerms | None
    prediction: Prediction | None
    cost_min: float
    cost_max: float


class Explanation(TypedDict):
    """All inputs of a decision."""

    schema: int
    request: int
    policy: PolicyName
    custom_selector: bool
    prompt_tokens: int
    block_size: int
    chosen: RankName | None
    rejection: str | None
    ranks: list[ExplainedRank]


class RankScores(TypedDict):
    """Overlap of a prompt with a rank, in blocks."""

    rank: RankName
    registered: bool
    device_blocks: int
    host_pinned_blocks: int
    disk_blocks: int
    host_pinned_extension_blocks: int
    disk_extension_blocks: int
    shared_beyond_device_blocks: int | None
    credit_blocks: float


class OverlapScores(TypedDict):
    """Overlap of a prompt with every rank."""

    ranks: list[RankScores]
    #: The module has no shared cache.
    shared_cache: None


class Request(TypedDict):
    """Facts of a request, for policies, scorers and filters in Python."""

    request: int
    prompt_tokens: int
    block_size: int
    expected_output_tokens: int | None
    lora_name: str | None
    session_id: str | None


class Traits(TypedDict):
    """Facts of a rank, for filters in Python."""

    taints: set[str]
    lora_adapters: set[str]
    max_num_batched_tokens: int | None
    total_kv_blocks: int | None
