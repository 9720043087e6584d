"""The example gateway in front of mock engines, beside the gateway of the project."""

import asyncio
import contextlib
import importlib
import json
import pathlib
import re
import subprocess
import sys

import aiohttp
import aiohttp.web
import pytest
from mock_engines import BINARY, IMPATIENT, engines, free_port

from pointsman import Router, discovery, metrics

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
PATIENCE_S = 60
BLOCK_SIZE = 64


@contextlib.contextmanager
def running(command):
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


async def reached(condition):
    """Waits until a coroutine function returns a true value, and returns it."""
    for _ in range(PATIENCE_S * 100):
        with contextlib.suppress(aiohttp.ClientConnectorError):
            if value := await condition():
                return value
        await asyncio.sleep(0.01)
    raise AssertionError("timeout")


async def post(client, url, body, **options):
    async with client.post(url, json=body, **options) as found:
        assert found.status == 200, await found.text()
        return await found.json()


async def hit_rate(url, engine, indexed_blocks):
    """Sends conversations of three turns, one request at a time, and returns the share of cached prompt tokens. Each request
    follows after the index has all blocks of the last one: ``indexed_blocks`` returns their number by rank."""
    prompt_tokens = cached_tokens = 0
    async with aiohttp.ClientSession() as client:
        for conversation in range(12):
            messages = [{"role": "system", "content": f"You are assistant {conversation % 3}. " * 40}]
            for turn in range(3):
                # More than a block, so that only the rank of this request has its last block.
                messages.append({"role": "user", "content": f"Question {turn} of {conversation}. " * 20})
                body = {"model": "mock", "messages": messages, "max_tokens": 32}
                answer = await post(client, f"{url}/v1/chat/completions", body)
                usage = answer["usage"]
                prompt_tokens += usage["prompt_tokens"]
                cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
                messages.append(answer["choices"][0]["message"])
                tokens = (await post(client, f"{engine}/tokenize", {"model": "mock", "messages": messages}))["tokens"]
                # The last generated token is not computed.
                computed = (usage["prompt_tokens"] + usage["completion_tokens"] - 1) // BLOCK_SIZE

                async def is_indexed():
                    return max(await indexed_blocks(client, tokens)) >= computed

                await reached(is_indexed)
    return cached_tokens / prompt_tokens


def blocks_by_rank(scores):
    return [row["device_blocks"] for row in scores["ranks"]]


async def hit_rate_of_example():
    sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module("gateway")
    with engines(2) as urls:
        sources = [discovery.ProbedUrls(urls)]
        router = Router(min_initial_workers=2, discovery=sources)
        runner = aiohttp.web.AppRunner(example.application(router, urls[0]))
        await runner.setup()
        try:
            port = free_port()
            await aiohttp.web.TCPSite(runner, "127.0.0.1", port).start()

            async def is_live():
                return 'pointsman_kv_sources{pool="default",state="live"} 2' in metrics()

            async def indexed_blocks(_, tokens):
                return blocks_by_rank(await router.overlap_scores(tokens))

            await reached(is_live)
            return await hit_rate(f"http://127.0.0.1:{port}", urls[0], indexed_blocks)
        finally:
            await runner.cleanup()


async def hit_rate_of_gateway(directory):
    token = directory / "token"
    token.write_text("t" * 32)
    token.chmod(0o600)
    with engines(2) as urls:
        port, admin = free_port(), free_port()
        lines = ["[gateway]", f'listen = "127.0.0.1:{port}"', "[router]", f"block_size = {BLOCK_SIZE}"]
        lines += ["[admin]", f'listen = "127.0.0.1:{admin}"', f'token_file = "{token}"', "[[models]]", 'name = "mock"']
        for url in urls:
            lines += ["[[models.workers]]", f'url = "{url}"', "probe = true"]
        (directory / "gateway.toml").write_text("\n".join(lines))
        authorized = {"Authorization": "Bearer " + "t" * 32}

        async def indexed_blocks(client, tokens):
            url = f"http://127.0.0.1:{admin}/admin/models/mock/overlap"
            return blocks_by_rank((await post(client, url, {"tokens": tokens}, headers=authorized))["overlap"])

        with running([BINARY, "serve", "--config", str(directory / "gateway.toml")]):
            async with aiohttp.ClientSession() as client:

                async def is_live():
                    async with client.get(f"http://127.0.0.1:{port}/metrics") as page:
                        return 'pointsman_kv_sources{pool="mock",state="live"} 2' in await page.text()

                await reached(is_live)
            return await hit_rate(f"http://127.0.0.1:{port}", urls[0], indexed_blocks)


def test_the_example_gateway_and_the_gateway_have_the_same_hit_rate(tmp_path):
    example = asyncio.run(hit_rate_of_example())
    gateway = asyncio.run(hit_rate_of_gateway(tmp_path))
    print(f"hit rates: example {example:.6f}, gateway {gateway:.6f}")
    assert example == gateway > 0.5


def test_the_example_gateway_serves_as_a_program():
    async def chat(port):
        body = {"model": "mock", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
        async with aiohttp.ClientSession() as client:
            return await reached(lambda: post(client, f"http://127.0.0.1:{port}/v1/chat/completions", body))

    with engines(1) as urls:
        port = free_port()
        with running([sys.executable, "-W", "error", str(EXAMPLES / "gateway.py"), str(port), *urls]):
            assert asyncio.run(chat(port))["usage"]["completion_tokens"] == 4


def example(name, *arguments):
    """Runs an example to its end: status, output and errors. Its routers wait a second for their workers."""
    run = "import runpy, sys; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-W", "error", "-c", f"{IMPATIENT}; {run}", str(EXAMPLES / name), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("name", ["gateway.py", "replay.py"])
def test_examples_print_their_usage(name):
    status, output, errors = example(name)
    assert (status, output) == (2, "") and errors.startswith(f"usage: {name} ") and errors.count("\n") == 1


def test_the_example_gateway_names_an_engine_that_does_not_answer():
    dead = f"http://127.0.0.1:{free_port()}"
    with engines(1) as urls:
        status, _, errors = example("gateway.py", free_port(), *urls, dead)
    assert status == 1
    error = errors.splitlines()[-1]
    assert re.match("error: 1 of 2 workers registered within 1 s: ", error) and dead in error, errors


def test_the_replay_reports_hit_rate_and_load_by_rank(tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * n, "input_length": 1500, "output_length": 10, "hash_ids": [n % 4, 10 + n % 4, 20 + n % 4]}
        for n in range(40)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-W", "error", str(EXAMPLES / "replay.py"), str(trace), "4"]
    report = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout.splitlines()
    # Two of three blocks are complete, and each of the four prompts is computed at least once.
    hit_rate = float(report[0].removeprefix("requests 40, hit rate "))
    assert 0.3 < hit_rate <= round(36 * 1024 / (40 * 1500), 4)
    assert sum(int(re.search(r"(\d+) placements", line).group(1)) for line in report[1:]) == 40
