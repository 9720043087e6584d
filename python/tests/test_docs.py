"""The programs of docs/python.md, in front of mock engines and of nothing."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys

import pytest
from mock_engines import IMPATIENT, engines, free_port
from test_tokens import TOKENIZER
from test_types import ROOT

PAGE = (ROOT / "docs/python.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ENGINES = ("http://10.0.0.1:8000", "http://10.0.0.2:8000")


def program(block, urls):
    """A block for these engines. A block with `await` outside of functions runs in a coroutine, as in `python -m asyncio`."""
    for written, url in zip(ENGINES, urls, strict=True):
        block = block.replace(written, url)
    block = block.replace("/models/Qwen3-8B", str(TOKENIZER))
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    if compile(block, "docs/python.md", "exec", flags).co_flags & inspect.CO_COROUTINE:
        return f"import ast, asyncio\nasyncio.run(eval(compile({block!r}, 'docs/python.md', 'exec', {flags})))"
    return block


def run(source):
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", source]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def title(block):
    return next(line for line in block.splitlines() if not line.startswith(("import", "from")) and line)


@pytest.mark.parametrize("block", BLOCKS, ids=title)
def test_every_program_runs(block):
    if "from ray " in block and not importlib.util.find_spec("ray"):
        compile(block, "docs/python.md", "exec")
        pytest.skip("ray is not installed: the program was compiled only; python/tests/ray_serve/run has it")
    with engines(2, "--block-size", "16") as urls:
        ended = run(program(block, urls))
    assert ended.returncode == 0, ended.stderr


def test_the_first_program_names_unreachable_engines():
    urls = [f"http://127.0.0.1:{free_port()}" for _ in ENGINES]
    ended = run(f"{IMPATIENT}\n{program(BLOCKS[0], urls)}")
    error = ended.stderr.splitlines()[-1]
    assert ended.returncode == 1
    assert error.startswith("pointsman.errors.StartTimeout: 0 of 2 workers registered within 1 s: "), ended.stderr
    for url in urls:
        assert f"{url}: " in error and "Connection refused" in error, error
