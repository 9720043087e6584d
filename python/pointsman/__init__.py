"""KV-cache-aware request router for fleets of LLM engines, in the process of a Python gateway.

The router decides in Rust; this package calls it from asyncio. ``docs/python.md`` of the project describes it.
"""

from . import discovery, errors, results, settings
from ._native import AnswerFollower, Placement, __version__, block_hashes, metrics
from .errors import PointsmanError, RouteError
from .router import Prompt, Rank, Router, Tokens, cleared, removed, stored
from .settings import Worker

__all__ = [
    "AnswerFollower",
    "Placement",
    "PointsmanError",
    "Prompt",
    "Rank",
    "RouteError",
    "Router",
    "Tokens",
    "Worker",
    "__version__",
    "block_hashes",
    "cleared",
    "discovery",
    "errors",
    "metrics",
    "removed",
    "results",
    "settings",
    "stored",
]
