"""The example gateway in front of mock engines, beside the gateway of the project."""

import asyncio
import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import aiohttp

BINARY = os.environ["POINTSMAN"]
EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
PATIENCE_S = 60


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def engines(count):
    """Starts mock engines, and returns their addresses."""
    with contextlib.ExitStack() as stack:
        urls = []
        for seed in range(count):
            command = [BINARY, "mock-engine", "--port", "0", "--model", "mock", "--time-scale", "0", "--seed", str(seed)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            urls.append(re.search("http://.*", process.stdout.readline()).group())
        yield urls


@contextlib.contextmanager
def running(command):
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


async def chats(url):
    """Sends conversations of three turns, one request at a time, and returns prompt tokens and cached tokens."""
    prompt_tokens = cached_tokens = 0
    async with aiohttp.ClientSession() as client:
        for _ in range(PATIENCE_S * 20):
            try:
                async with client.post(f"{url}/v1/completions", json={"model": "mock", "prompt": [1], "max_tokens": 1}) as found:
                    if found.status == 200:
                        break
            except aiohttp.ClientConnectorError:
                pass
            await asyncio.sleep(0.05)
        for conversation in range(12):
            messages = [{"role": "system", "content": f"You are assistant {conversation % 3}. " * 40}]
            for turn in range(3):
                messages.append({"role": "user", "content": f"Question {turn} of {conversation}. " * 20})
                body = {"model": "mock", "messages": messages, "max_tokens": 32}
                async with client.post(f"{url}/v1/chat/completions", json=body) as found:
                    assert found.status == 200, await found.text()
                    answer = await found.json()
                usage = answer["usage"]
                prompt_tokens += usage["prompt_tokens"]
                cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
                messages.append(answer["choices"][0]["message"])
    return prompt_tokens, cached_tokens


def test_the_example_gateway_and_the_gateway_hit_caches():
    with engines(2) as urls:
        port = free_port()
        command = [sys.executable, "-W", "error", str(EXAMPLES / "gateway.py"), "64", str(port), *urls]
        with running(command):
            of_example = asyncio.run(chats(f"http://127.0.0.1:{port}"))
    with engines(2) as urls:
        port = free_port()
        workers = [part for url in urls for part in ("--worker", url)]
        settings = ["--listen", f"127.0.0.1:{port}", "--set", "router.block_size=64"]
        with running([BINARY, "serve", "--model", "mock", *workers, *settings]):
            of_gateway = asyncio.run(chats(f"http://127.0.0.1:{port}"))
    example, gateway = (cached / prompt for prompt, cached in (of_example, of_gateway))
    print(f"hit rates: example {example:.4f}, gateway {gateway:.4f}")
    # Equal on an idle machine. A request that overtakes the KV events of the last one may miss its cache.
    assert min(example, gateway) > 0.3


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
