"""Runs Claude Code and Codex through the gateway in front of four scripted engines: whole tasks with parallel tools.

usage: check.py POINTSMAN_BINARY DIRECTORY_OF_THE_AGENTS [CASE ...]. Prints a line for each case and exits with 1 if one
fails: each agent must finish its task, and each turn must be on the engine of the turn before unless that engine is dead.
"""

import contextlib
import json
import pathlib
import re
import sys
import time

from engine import ENGINES, MODEL, TOOL_TURNS, Fleet
from loopback import get, serve
from programs import AGENTS, result_of, start

PATIENCE_S = 120
PROMPT = "This is the task of agent-{}. Run the commands that it needs, then report."
SEARCH = {"ENABLE_TOOL_SEARCH": "true"}

TITLES = ["agents", "turns", "same", "moved", "died", "dead", "refused", "tokens", "s", ""]

# Agent, fleet, number of agents, mode of Messages, and variables of the agent, by name.
CASES = {
    "claude-lax": ("claude", {}, 4, "translate", {}),
    "claude-strict": ("claude", {"kind": "sglang", "strict": True}, 4, "translate", {}),
    "claude-deaths": ("claude", {"tokens": False, "deaths": {2: "after", 5: "within"}}, 4, "translate", {}),
    "claude-passed": ("claude", {"search": True, "deaths": {5: "before"}}, 2, "pass", SEARCH),
    "claude-search": ("claude", {"search": True, "strict": True}, 1, "translate", SEARCH),
    "claude-long-prompt": ("claude", {"refusal": "prompt"}, 1, "translate", {}),
    "claude-long-sum": ("claude", {"kind": "sglang", "refusal": "sum"}, 1, "translate", {}),
    "codex": ("codex", {}, 4, "translate", {}),
    "codex-zstd": ("codex-zstd", {}, 2, "translate", {}),
    "codex-deaths": ("codex", {"kind": "sglang", "deaths": {2: "before", 5: "within"}}, 4, "translate", {}),
}


def tokens_of(port):
    """Requests with tokens, and all."""
    counts = re.findall(r'^pointsman_gateway_tokens_total\{.*reason="(.*)"\} (\d+)$', get(port, "/metrics")[1], re.M)
    return sum(int(count) for reason, count in counts if not reason), sum(int(count) for _, count in counts)


def run(binary, agents, name):
    """Runs a case and prints its counts. Returns its problems."""
    agent, fleet, count, mode, variables = CASES[name]
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        fleet = Fleet(stack, **fleet)
        model = ["[[models]]", f'name = "{MODEL}"', f'messages = "{mode}"', f"worker_urls = {json.dumps(fleet.urls())}"]
        tokens = ["[models.tokens]", "engine_timeout_ms = 20_000"]  # a busy machine delays scripted engines
        port, _ = serve(binary, stack, ['log_level = "error"', *model, "[models.router]", *tokens])
        command_of, url = AGENTS[agent], f"http://127.0.0.1:{port}"
        started = [start(stack, command_of, agents, url, MODEL, PROMPT.format(number), variables) for number in range(count)]
        problems = fleet.problems
        for number, (process, home) in enumerate(started):
            code, out, err = result_of(process, home, began + PATIENCE_S)
            turns = len(fleet.turns.get(number, []))
            if code != 0 or f"Finished by agent-{number}." not in out or turns != TOOL_TURNS + 1:
                problems.append(f"agent {number} ended with {code} after {turns} turns\n{out[-1500:]}\n{err[-1500:]}")
        known, requests = tokens_of(port)
        dead = sum(engine.is_dead for engine in fleet.engines)
    places = {place: fleet.count(place) for place in ["same", "moved", "died"]}
    if places["moved"]:
        problems.append(f"{places['moved']} turns left a living engine")
    if fleet.deaths or (fleet.refusal and not fleet.refused) or (fleet.refusal == "prompt") != (fleet.summaries > 0):
        problems.append(f"deaths to come: {fleet.deaths}; refused: {fleet.refused}; summaries: {fleet.summaries}")
    if fleet.tokens and mode == "translate" and known < requests:
        problems.append(f"{requests - known} requests have no tokens")
    turns = sum(map(len, fleet.turns.values()))
    row = [count, turns, *places.values(), dead, fleet.refused, f"{known}/{requests}", f"{time.monotonic() - began:.1f}"]
    print(f"{name:20}" + "".join(f"{value:>9}" for value in [*row, "FAILED" if problems else "ok"]), flush=True)
    return [f"{name}: {problem}" for problem in problems]


def main(binary, agents, *names):
    print(f"{ENGINES} engines. same: turns on the engine of the turn before; died: that engine is dead; moved: other turns\n"
          f"{'case':20}" + "".join(f"{title:>9}" for title in TITLES), flush=True)
    problems = [problem for name in names or CASES for problem in run(binary, pathlib.Path(agents).resolve(), name)]
    if problems:
        raise SystemExit("\n".join(f"FAILED: {problem}" for problem in problems))


main(*sys.argv[1:])
