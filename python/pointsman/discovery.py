"""Sources of workers. Each source is the complete set of its workers, and follows their changes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .settings import WorkerFields


@dataclass(frozen=True)
class WatchedFile:
    """A TOML or JSON file of workers, read every second. docs/discovery.md has the format."""

    path: str | os.PathLike[str]
    #: Requires engines that serve this model, for workers with ``probe = true``.
    model: str | None = None

    def _declared(self) -> dict[str, Any]:
        return {"file": {"path": os.fspath(self.path), "model": self.model}}


@dataclass(frozen=True)
class ProbedUrls:
    """Engines at known addresses, probed every 5 seconds for their configuration. vLLM before 0.31 does not report its event
    endpoints: a :class:`WatchedFile` names them."""

    urls: Sequence[str]
    model: str | None = None
    #: Configuration of all workers that needs no probe, without the endpoint.
    worker: WorkerFields | None = None

    def _declared(self) -> dict[str, Any]:
        return {"urls": {"urls": _listed(self.urls), "model": self.model, "worker": _given(self.worker)}}


@dataclass(frozen=True)
class DnsNames:
    """Names of the form ``NAME:PORT``. Each address of a name is a worker."""

    names: Sequence[str]
    model: str | None = None
    worker: WorkerFields | None = None
    #: Whether the workers are probed for their configuration.
    probe: bool = True
    interval_seconds: float = 5.0

    def _declared(self) -> dict[str, Any]:
        return {
            "dns": {
                "names": _listed(self.names),
                "model": self.model,
                "worker": _given(self.worker),
                "probe": self.probe,
                "interval_seconds": self.interval_seconds,
            }
        }


def _listed(texts: Sequence[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


def _given(worker: WorkerFields | None) -> dict[str, Any] | None:
    return None if worker is None else {"endpoint": "", **worker}


Source = WatchedFile | ProbedUrls | DnsNames

__all__ = ["DnsNames", "ProbedUrls", "Source", "WatchedFile"]
