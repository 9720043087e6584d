"""Exceptions of the router.

Each exception has the message of the error, a ``reason`` that names it, and its fields as attributes; ``fields`` has
them as a dictionary. The classes of failed requests are kinds, as gRPC has them, with an HTTP status.
"""

from __future__ import annotations

from typing import Any


class PointsmanError(Exception):
    """Base of all exceptions of this package."""

    reason: str
    fields: dict[str, Any]

    def __init__(self, message: str, *, reason: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.reason = reason
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        if name != "fields" and name in self.__dict__.get("fields", {}):
            return self.fields[name]
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), str(self), self.reason, self.fields)


def _restored(cls: type[PointsmanError], message: str, reason: str, fields: dict[str, Any]) -> PointsmanError:
    return cls(message, reason=reason, **fields)


class ConfigError(PointsmanError, ValueError):
    """The configuration violates rules. ``problems``: one line per rule."""


class StartError(PointsmanError):
    """The router did not start."""


class StartTimeout(StartError):
    """Fewer than ``min_initial_workers`` engines registered in time. ``registered``, ``wanted``, ``problems``: the errors of
    discovery."""


class WorkerError(PointsmanError):
    """A change of workers was rejected. ``worker``: its id."""


class ForkError(PointsmanError):
    """A router is used in a forked child. ``parent_pid``: the process of the router."""


class RouteError(PointsmanError):
    """A request was not placed, or a report about it was rejected."""

    #: Status of the response to the client.
    http_status: int = 500


class InvalidArgument(RouteError, ValueError):
    """The request is invalid; a retry does not help."""

    http_status = 400


class NotFound(RouteError):
    """The pinned worker or the booking does not exist."""

    http_status = 404


class AlreadyExists(RouteError):
    """The request id has a booking. ``request_id``."""

    http_status = 409


class ResourceExhausted(RouteError):
    """No capacity at present. Full queues have ``retry_after_seconds``."""

    http_status = 429


class Freed(RouteError):
    """The request was freed by its id before it was booked."""

    http_status = 499


class Internal(RouteError):
    """A custom policy or scorer failed."""

    http_status = 500


class Unavailable(RouteError):
    """No rank can serve at present, or the router is down."""

    http_status = 503


class DeadlineExceeded(RouteError):
    """The deadline passed in the queue. ``waited_seconds``."""

    http_status = 504


__all__ = [
    "AlreadyExists",
    "ConfigError",
    "DeadlineExceeded",
    "ForkError",
    "Freed",
    "Internal",
    "InvalidArgument",
    "NotFound",
    "PointsmanError",
    "ResourceExhausted",
    "RouteError",
    "StartError",
    "StartTimeout",
    "Unavailable",
    "WorkerError",
]
