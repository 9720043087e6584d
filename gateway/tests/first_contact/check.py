"""Runs the README's serve command in front of mock engines with the defaults of real ones.

usage: check.py POINTSMAN_BINARY. Exits with 1 after the first case that fails.
"""

import json
import pathlib
import re
import sys
import time

from loopback import Processes, check, exchange, free_ports, get, until

MODEL = "Qwen/Qwen3-8B"
KEY = "a-key-of-the-engines-0123456789"

VLLM = ["--block-size", "16", "--no-server-info"]

# Name, flags of each engine, number of engines, flags of the gateway, and whether KV events are expected.
CASES = [
    ("vLLM, default block size", VLLM, 2, [], True),
    ("vLLM before 0.31, which does not report its event ports", [*VLLM, "--no-page", "/kv_event_sources"], 1, [], False),
    ("vLLM, two ranks on assigned event ports", [*VLLM, "--event-port", "0", "--data-parallel-size", "2"], 2, [], True),
    ("vLLM in development mode, slow first /server_info",
     ["--block-size", "16", "--slow-page", "/server_info=13600"], 2, [], True),
    ("SGLang, default page size", ["--dialect", "sglang-map", "--block-size", "1"], 2, [], True),
    ("engines with an API key", [*VLLM, "--api-key", KEY], 2, ["--worker-api-key-file", "key"], True),
    ("an OpenAI server with models and chat only",
     [*VLLM, *(f for page in ("/kv_event_sources", "/metrics", "/health", "/tokenize", "/detokenize")
               for f in ("--no-page", page))], 1, [], False),
]


class FirstContact(Processes):
    """Engines of one kind and the gateway in front of them."""

    def __init__(self, pointsman, engine_flags, engines, gateway_flags):
        super().__init__()
        self.pointsman = str(pathlib.Path(pointsman).resolve())
        self.engine_flags, self.engines, self.gateway_flags = engine_flags, engines, gateway_flags

    def start_all(self):
        (self.directory / "key").write_text(KEY + "\n")
        workers = [text for n in range(self.engines) for text in ("--worker", self.start_engine(n))]
        (self.port,) = free_ports(1)
        listen = ["--listen", f"127.0.0.1:{self.port}"]
        command = [self.pointsman, "serve", "--model", MODEL, *workers, *listen, *self.gateway_flags]
        self.gateway = self.start("gateway", command)
        until("the gateway is ready", self.is_ready)

    def start_engine(self, n):
        command = [self.pointsman, "mock-engine", "--port", "0", "--model", MODEL, "--time-scale", "0"]
        self.start(f"engine-{n}", [*command, *self.engine_flags])
        log = self.directory / f"engine-{n}.log"
        listening = until("an engine", lambda: re.search(r"^listening on (\S+)$", log.read_text(), re.M))
        return listening.group(1)

    def is_ready(self):
        check(self.gateway.poll() is None, "the gateway runs")
        return get(self.port, "/ready")[0] == 200

    def chat(self, messages):
        """The message and the reported cached tokens of a response."""
        body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 8})
        status, body = exchange(self.port, "POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        check(status == 200, f"the status is 200: {status} {body.decode()}")
        answer = json.loads(body)
        return answer["choices"][0]["message"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def predicted(self):
        """Cached tokens that the router predicted for the last logged request."""
        lines = (self.directory / "gateway.log").read_text().splitlines()
        logged = [line for line in lines if '"predicted_cached_tokens"' in line]
        return len(logged), json.loads(logged[-1])["predicted_cached_tokens"] if logged else 0


def converse(case, number):
    """Two turns of a new conversation: cached and predicted tokens of the second one."""
    turn = {"role": "user", "content": " ".join(f"word{number}x{n}" for n in range(400))}
    reply, _ = case.chat([turn])
    sent = 2 * number
    time.sleep(0.1)  # KV events of the first turn
    _, cached = case.chat([turn, {"role": reply["role"], "content": reply["content"]}, {"role": "user", "content": "More."}])
    count, predicted = until("the access log", lambda: (case.predicted()[0] >= sent) and case.predicted())
    return cached, predicted


def run(pointsman, name, engine_flags, engines, gateway_flags, has_events):
    with FirstContact(pointsman, engine_flags, engines, gateway_flags) as case:
        for number in range(1, 21):
            cached, predicted = converse(case, number)
            if cached and (predicted or not has_events):
                break
        check(cached, f"{name}: the second turn hits the cache")
        warnings = json.loads(get(case.port, "/ready")[1]).get("warnings", [])
        if has_events:
            check(predicted, f"{name}: KV events predict the hit")
            check(not [text for text in warnings if "KV event" in text], f"{name}: KV events are live: {warnings}")
        shown = "; ".join(warnings) or "none"
        print(f"ok: {name}: first request 200; second turn {cached} cached tokens, {predicted} predicted; warnings: {shown}")


if __name__ == "__main__":
    for case in CASES:
        run(sys.argv[1], *case)
