"""Log events of the router as records of the logger ``pointsman``."""

from __future__ import annotations

import logging

logger = logging.getLogger("pointsman")


def log(level: int, message: str, fields: dict[str, str], path: str, line: int) -> None:
    """Logs an event. The record has its fields as attribute ``fields``, and in its text."""
    if not logger.isEnabledFor(level):
        return
    listed = ", ".join(f"{name}={value}" for name, value in fields.items())
    text = f"{message}: {listed}" if listed else message
    logger.handle(logger.makeRecord(logger.name, level, path, line, text, (), None, extra={"fields": fields}))
