"""Runs tasks of Claude Code and Codex on two real vLLM engines behind the gateway: each turn calls tools, on random models.

usage: agents.py POINTSMAN DIRECTORY DIRECTORY_OF_THE_AGENTS. Exits with 1 unless each agent finishes its task, and every
prediction of cached tokens is the number that the engine reports. Agents run one after another, so that all events of a
request have arrived before the next one; the second of a kind finds the first one's tools in a cache.
"""

import contextlib
import json
import pathlib
import sys
import time

from chat_model import CONTEXT_TOKENS, MESSAGES, make_chat_model
from fleet import ENGINES, MODEL, start_engine, start_gateway
from programs import AGENTS, result_of, start

BLOCKS = 8192
PATIENCE_S = 300
AGENTS_OF_A_CASE = 2

# Agent and mode of Messages.
CASES = [("claude", "translate"), ("claude", "pass"), ("codex", "translate")]


def run(stack, agents, agent, url, number):
    """Runs a task. Returns its problem, if any."""
    prompt = f"This is the task of agent-{number}. Run the commands that it needs, then report."
    process, home = start(stack, AGENTS[agent], agents, url, MODEL, prompt, {})
    code, out, err = result_of(process, home, time.monotonic() + PATIENCE_S)
    if code != 0 or "Finished." not in out:
        return f"{agent} {number} ended with {code}\n{out[-3000:]}\n{err[-1000:]}"
    return None


def check(binary, directory, agents, engines, agent, mode):
    """Runs two tasks behind a gateway of their own, and prints their requests. Returns the problems."""
    began = time.monotonic()
    lines = [f'messages = "{mode}"', "tokens.engine_timeout_ms = 20_000"]  # /tokenize waits for the processor
    gateway, listen, _, access = start_gateway(binary, directory, engines, lines_of_model=lines)
    with contextlib.ExitStack() as stack:
        stack.callback(gateway.stop)
        gateway.wait_for(listen, "/ready", 120)
        problems = [run(stack, agents, agent, f"http://127.0.0.1:{listen}", number) for number in range(AGENTS_OF_A_CASE)]
    lines = [line for line in map(json.loads, access.read_text().splitlines()) if line["endpoint"] in ("messages", "responses")]
    problems += [f"failed: {line}" for line in lines if line["outcome"] != "ok"]
    if len(lines) < AGENTS_OF_A_CASE * MESSAGES:
        problems.append(f"{agent}: {len(lines)} requests only")
    wrong = [line for line in lines if line.get("cached_tokens") != line.get("predicted_cached_tokens")]
    problems += [f"predicted and delivered differ: {line}" for line in wrong]
    sums = [sum(line.get(name, 0) for line in lines) for name in ["prompt_tokens", "cached_tokens"]]
    workers = len({line["worker"] for line in lines})
    row = [agent, mode, len(lines), len(lines) - len(wrong), *sums, workers, f"{time.monotonic() - began:.0f}"]
    print("".join(f"{value:>12}" for value in row), flush=True)
    return [problem for problem in problems if problem]


def main(binary, directory, agents):
    directory, agents = pathlib.Path(directory), pathlib.Path(agents).resolve()
    make_chat_model(directory / "chat")
    flags = {
        "--model": directory / "chat", "--max-model-len": CONTEXT_TOKENS, "--num-gpu-blocks-override": BLOCKS,
        "--max-num-batched-tokens": 8192, "--logits-processors": "turns:Turns",
        "--tool-call-parser": "hermes", "--reasoning-parser": "qwen3",
    }
    print("".join(f"{title:>12}" for title in ["agent", "messages", "requests", "equal", "prompt", "cached", "workers", "s"]))
    with contextlib.ExitStack() as stack:
        engines = [start_engine(directory, n, flags=flags, switches=["--enable-auto-tool-choice", "--no-async-scheduling"])
                   for n in range(ENGINES)]
        for process, *_ in engines:
            stack.callback(process.stop)
        for process, port, _ in engines:
            process.wait_for(port, "/health", 900)
        problems = [problem for case in CASES for problem in check(binary, directory, agents, engines, *case)]
    if problems:
        sys.exit("\n".join(f"FAILED: {problem}" for problem in problems))


main(*sys.argv[1:])
