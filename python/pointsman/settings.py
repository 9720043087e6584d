"""Types of settings, workers and request options. docs/configuration.md and docs/discovery.md have their meanings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict


class LatencyPolicy(TypedDict, total=False):
    name: Literal["latency"]
    temperature: float


class KvPolicy(TypedDict, total=False):
    name: Literal["kv"]
    overlap_score_credit: float
    overlap_score_credit_decay: float
    prefill_load_scale: float
    active_request_weight: float
    shared_cache_multiplier: float
    temperature: float


PolicyName: TypeAlias = Literal["latency", "kv", "cache_aware", "round_robin", "random", "power_of_two", "least_loaded"]
Policy: TypeAlias = "PolicyName | LatencyPolicy | KvPolicy"


class Speculative(TypedDict, total=False):
    model: Literal["ttl", "lru"]
    ttl_ms: int
    with_events_ttl_ms: int | None


class Index(TypedDict, total=False):
    enabled: bool
    shards: int
    bytes_max: int | None
    host_hit_weight: float
    disk_hit_weight: float
    speculative: Speculative


class Events(TypedDict, total=False):
    mode: Literal["off", "on", "auto"]
    blocks_max: int
    audit_interval_ms: int


class Load(TypedDict, total=False):
    assume_kv_reuse: bool
    track_active_blocks: bool
    track_prefill_tokens: bool
    track_output_blocks: bool
    prefill_model: Literal["none", "learned"]
    booking_liveness_ms: int


class EngineLoadPolls(TypedDict, total=False):
    interval_ms: int
    stale_ms: int


class _NamedQueueClass(TypedDict):
    name: str


class QueueClass(_NamedQueueClass, total=False):
    family: str | None
    bucket: str | None
    order: Literal["fcfs", "lcfs", "wspt"]
    quantum_tokens: int
    busy_prefill_tokens: int | None
    busy_prefill_frac: float | None
    requests_max_per_rank: int | None
    raw_tokens_max_per_rank: int | None
    cached_tokens_max_per_rank: int | None
    program_hold_ms: int | None
    refuse_program_starts: bool


class UncachedBucket(TypedDict):
    min_tokens: int
    bucket: str


class Queue(TypedDict, total=False):
    requests_max: int
    threshold: float | None
    unstated_batched_tokens: int | None
    order: Literal["fcfs", "lcfs", "wspt"]
    classes: Sequence[QueueClass]
    default_family: str | None
    uncached_buckets: Sequence[UncachedBucket]
    overlap_refresh_after_ms: int


class Overload(TypedDict, total=False):
    blocks_frac: float | None
    prefill_tokens: int | None
    prefill_frac: float | None
    active_requests_max: int | None
    engine_waiting: int | None
    engine_kv_usage: float | None


class HealthChecks(TypedDict, total=False):
    probe_interval_ms: int
    probe_timeout_ms: int
    probe_failures_max: int
    probe_successes_min: int
    outcome_failures_max: int
    ejection_ms: int
    ejected_share_max: float
    stall_ms: int


class SlowStart(TypedDict, total=False):
    fill: float
    max_ms: int
    return_ms: int


class SharedCache(TypedDict, total=False):
    timeout_ms: int


class Session(TypedDict, total=False):
    affinity: Literal["off", "soft", "hard"]
    weight: float
    ttl_ms: int
    sessions_max: int


class Discovery(TypedDict, total=False):
    interval_ms: int
    drain_timeout_ms: int


class Supervision(TypedDict, total=False):
    restarts_max: int
    hang_timeout_ms: int


class Replicas(TypedDict, total=False):
    interval_ms: int


class Shadow(TypedDict, total=False):
    policies: Sequence[Policy]
    share: float


class Recorder(TypedDict, total=False):
    bytes_max: int
    age_max_ms: int


class KeywordSettings(TypedDict, total=False):
    """Settings that :class:`pointsman.Router` takes as keyword arguments."""

    pool: str
    block_size: int | None
    role: Literal["aggregated", "prefill", "decode"]
    is_eagle: bool
    seed: int
    min_initial_workers: int
    decision_trace: float
    on_target_miss: Literal["serve", "reject"]
    index: Index
    events: Events
    load: Load
    engine_load: EngineLoadPolls
    queue: Queue
    overload: Overload
    health: HealthChecks
    slow_start: SlowStart
    shared_cache: SharedCache
    session: Session
    supervision: Supervision
    shadow: Shadow
    recorder: Recorder
    replicas: Replicas


class RouterSettings(KeywordSettings, total=False):
    """All settings of a router. The keyword ``discovery`` of :class:`pointsman.Router` has the sources of workers."""

    policy: Policy
    discovery: Discovery


class _KvEventEndpoint(TypedDict):
    endpoint: str


class KvEvents(_KvEventEndpoint, total=False):
    replay_endpoint: str | None
    topic: str


class MetricsLoad(TypedDict):
    metrics: str


class SocketLoad(TypedDict):
    socket: str


class WorkerFields(TypedDict, total=False):
    """Fields of a worker without its endpoint."""

    #: File with the key for requests to the engine, probes included.
    api_key_file: str | None
    data_parallel_start_rank: int
    data_parallel_size: int
    max_num_batched_tokens: int | None
    total_kv_blocks: int | None
    block_size: int | None
    max_model_len: int | None
    role: Literal["prefill", "decode", "both"] | None
    taints: Collection[str]
    lora_adapters: Collection[str]
    stable_routing_id: str | None
    topology_domains: Mapping[str, str]
    kv_transfer_domain: str | None
    kv_transfer_enforcement: Literal["required", "preferred"]
    kv_transfer_preferred_weight: float | None
    transfer_port: int | None
    engine: Literal["vllm", "sglang", "other"] | None
    session_hints: bool
    priority_hints: bool
    is_eagle: bool | None
    kv_events: KvEvents | None
    kv_events_by_rank: Mapping[int, KvEvents]
    load: MetricsLoad | SocketLoad | None
    health_path: str
    unreported: Mapping[str, str]
    drain: bool


class _Endpoint(TypedDict):
    endpoint: str


class WorkerSettings(_Endpoint, WorkerFields):
    """A worker."""


#: A worker: its endpoint, or a dictionary of its fields.
Worker: TypeAlias = "str | WorkerSettings"


class MmSpan(TypedDict):
    mm_hash: int
    start: int
    end: int


class RankName(TypedDict):
    """A rank."""

    worker: int
    rank: int


class _PinnedWorker(TypedDict):
    worker: int


class Pin(_PinnedWorker, total=False):
    rank: int | None
    mode: Literal["hard", "soft"]


class Constraints(TypedDict, total=False):
    allowed_workers: Collection[int] | None
    excluded_ranks: Collection[RankName]
    pin: Pin | None
    required_taints: Collection[str]
    preferred_taints: Mapping[str, float]


class Overrides(TypedDict, total=False):
    overlap_score_credit: float | None
    prefill_load_scale: float | None
    temperature: float | None
    assume_kv_reuse: bool | None
    track_prefill_tokens: bool | None
    shared_cache_multiplier: float | None


class RequestOptions(TypedDict, total=False):
    """Options of a request."""

    lora_name: str | None
    cache_salt: str | None
    mm_spans: Sequence[MmSpan]
    routing_hashes: bool
    phases: bool
    tenant: str | None
    strict_priority: int
    priority_jump: float
    deadline_ms: int | None
    policy_class: str | None
    do_not_queue: bool
    constraints: Constraints
    session_id: str | None
    program: str | None
    expected_output_tokens: int | None
    output_tokens_max: int | None
    not_streamed: bool
    further_prompt_tokens: int
    further_outputs: int
    ttft_ms: float | None
    itl_ms: float | None
    on_target_miss: Literal["serve", "reject"] | None
    overrides: Overrides


class ChatFields(TypedDict, total=False):
    """A conversation: the fields of a chat completion request that its chat template reads."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool


class PromptOptions(RequestOptions, ChatFields, total=False):
    """Options of a request, and its conversation if it has no other prompt."""
