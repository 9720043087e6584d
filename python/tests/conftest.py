"""Shared helpers: loops to run a test on, and routers without engines."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine on each implementation of event loops."""
    new_loop = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run_in_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
        loop = new_loop()
        try:
            return loop.run_until_complete(asyncio.wait_for(coroutine, 60))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    return run_in_loop


async def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition, up to the timeout of the test."""
    while not condition():
        await asyncio.sleep(0.001)
