"""Control of real engines behind the gateway: the actions that engines on CPUs have, with their effects on requests and the index.

usage: control.py POINTSMAN DIRECTORY ENGINE. ENGINE is `vllm` or `sglang`. Prints the result of each action at each of two
engines, and exits with 1 if an effect is not as documented. Engines may refuse an action: that is a result.
"""

import contextlib
import http.client
import json
import os
import pathlib
import sys
import threading
import time
import urllib.request

from fleet import AUTHORIZED, ENGINES, MODEL, make_adapters, make_model, start_engine, start_gateway, start_sglang

PROMPT = [7 + n % 900 for n in range(320)]
BLOCKS = len(PROMPT) // 32


def exchange(port, path, body, headers=None):
    """Status and JSON of a response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"} | (headers or {}))
        response = connection.getresponse()
        return response.status, json.loads(response.read())


class Fleet:
    def __init__(self, listen, admin):
        self.listen, self.admin, self.problems = listen, admin, []

    def act(self, action, **call):
        """Sends an action. Returns whether all engines have done it."""
        status, done = exchange(self.admin, f"/admin/models/{MODEL}/control/{action}", call, AUTHORIZED)
        for worker in done["workers"]:
            said = json.dumps(worker.get("body", worker.get("error")))[:110]
            print(f"{action:20}{worker.get('path', ''):30}{worker.get('status', '-')!s:>5} {'ok' if worker['ok'] else 'failed':7}"
                  f"{worker.get('ms', 0):>6} ms  {said}", flush=True)
        if done["ok"] != (status == 200) or len(done["workers"]) != ENGINES:
            self.check(False, f"{action}: {status} {done}")
        return done["ok"]

    def complete(self, model=MODEL, max_tokens=2, **more):
        body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
        return exchange(self.listen, "/v1/completions", body)

    def overlap(self):
        _, found = exchange(self.admin, f"/admin/models/{MODEL}/overlap", {"tokens": PROMPT}, AUTHORIZED)
        return max((row["device_blocks"] for row in found["overlap"]["ranks"]), default=0)

    def eligible(self):
        page = urllib.request.urlopen(f"http://127.0.0.1:{self.listen}/metrics", timeout=30).read().decode()
        return sum(int(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith("pointsman_eligible_ranks"))

    def check(self, holds, what):
        print(f"    {'holds' if holds else 'FAILED'}: {what}", flush=True)
        if not holds:
            self.problems.append(what)

    def until(self, condition, seconds=20):
        end = time.monotonic() + seconds
        while not (holds := condition()) and time.monotonic() < end:
            time.sleep(0.1)
        return holds


def check_cache(fleet):
    fleet.complete()
    fleet.check(fleet.until(lambda: fleet.overlap() == BLOCKS), "the index has the prompt")
    if fleet.act("reset_prefix_cache"):
        fleet.check(fleet.overlap() == 0, "the index has dropped it")
        status, answer = fleet.complete()
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        fleet.check((status, cached) == (200, 0), f"the engine has computed it again: {cached} cached tokens")


def check_weights(fleet, engine, directory):
    """New weights invalidate the caches. vLLM receives weights by GPUs only: a failed update changes nothing."""
    fleet.complete()
    fleet.check(fleet.until(lambda: fleet.overlap() == BLOCKS), "the index has the prompt")
    before = fleet.complete()[1]["choices"][0]["text"]
    if engine == "vllm":
        actions = {"init_weights": {"init_info": {}}, "start_weights": {}, "update_weights": {"update_info": {}}, "finish_weights": {}}
        done = [action for action, body in actions.items() if fleet.act(action, body=body)]
        fleet.check(not done and fleet.overlap() == BLOCKS, f"nothing has changed: {done}")
        return fleet.check(fleet.complete()[0] == 200, "a failed update leaves no pause")
    make_weights(directory)
    fleet.check(fleet.act("update_weights", body={"model_path": str(directory / "weights"), "load_format": "safetensors"}), "all engines have the weights")
    fleet.check(fleet.overlap() == 0, "the index has dropped the prompt")
    status, answer = fleet.complete()
    cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    fleet.check((status, cached) == (200, 0), f"the engine has computed it again: {cached} cached tokens")
    fleet.check(answer["choices"][0]["text"] != before, "with other weights")


def make_weights(directory):
    """Random weights of the model, as a trainer stores them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory / "model"))
    model.save_pretrained(directory / "weights")


def check_pause(fleet, begin, end):
    """Requests wait or are refused while the engines pause."""
    if not fleet.act(begin):
        return fleet.check(fleet.complete()[0] == 200, f"a failed {begin} leaves no pause")
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(fleet.complete()[0]))
    waiting.start()
    time.sleep(1)
    is_held = not answers
    fleet.act(end)
    waiting.join(60)
    fleet.check(is_held and answers == [200], f"a request waits for {end}: {answers}")
    fleet.act(begin, requests="refuse")
    status, refused = fleet.complete()
    fleet.check((status, refused["error"].get("code")) == (503, "engines_paused"), f"a request is refused: {status} {refused}")
    fleet.act(end)
    fleet.check(fleet.complete()[0] == 200, f"requests are served after {end}")


def check_asleep(fleet, port):
    """An engine that is put to sleep without the gateway gets no requests."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    fleet.check(fleet.until(lambda: fleet.eligible() == ENGINES), "all ranks are eligible")
    time.sleep(2)  # load pages of before have been read
    for path, eligible in [("/sleep?level=1", ENGINES - 1), ("/wake_up", ENGINES)]:
        with contextlib.closing(connection):
            connection.request("POST", path)
            connection.getresponse().read()
        fleet.check(fleet.until(lambda: fleet.eligible() == eligible), f"{path} of one engine leaves {eligible} eligible ranks")
        fleet.check(fleet.complete()[0] == 200, "requests are served")


def check_adapters(fleet, adapter):
    if fleet.act("load_lora", body={"lora_name": "second", "lora_path": str(adapter)}):
        fleet.check(fleet.until(lambda: fleet.complete("second")[0] == 200), "the adapter is served")
        fleet.act("unload_lora", body={"lora_name": "second"})
        fleet.check(fleet.until(lambda: fleet.complete("second")[0] == 404), "the adapter is gone")


def check_abort(fleet, body):
    answers = []
    running = threading.Thread(target=lambda: answers.append(fleet.complete(max_tokens=3000)))
    running.start()
    time.sleep(1.5)
    fleet.act("abort", body=body)
    running.join(60)
    status, answer = answers[0] if answers else (None, {})
    reason = answer["choices"][0]["finish_reason"] if "choices" in answer else answer
    fleet.check(status is not None and reason != "length", f"the request has ended early: {status} {reason}")


def check_profile(fleet):
    if fleet.act("start_profile"):
        fleet.check(fleet.complete()[0] == 200, "requests are served meanwhile")
        fleet.act("stop_profile")


def start(directory, engine, adapters):
    if engine == "sglang":
        return [start_sglang(directory, n) for n in range(ENGINES)]
    flags = {"--profiler-config": json.dumps({"profiler": "torch", "torch_profiler_dir": str(directory / "profile")})}
    first = {"first": adapters["first"]}
    return [start_engine(directory, n, is_resettable=True, adapters=first, flags=flags) for n in range(ENGINES)]


def main(binary, directory, engine):
    directory = pathlib.Path(directory)
    os.environ |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "SGLANG_TORCH_PROFILER_DIR": str(directory / "profile")}
    make_model(directory / "model")
    adapters = make_adapters(directory)
    with contextlib.ExitStack() as stack:
        engines = start(directory, engine, adapters)
        for process, *_ in engines:
            stack.callback(process.stop)
        for process, port, _ in engines:
            process.wait_for(port, "/health", 900)
        gateway, listen, admin, _ = start_gateway(binary, directory, engines)
        stack.callback(gateway.stop)
        gateway.wait_for(listen, "/ready", 120)
        fleet = Fleet(listen, admin)
        check_cache(fleet)
        check_weights(fleet, engine, directory)
        check_pause(fleet, "pause", "resume")
        check_pause(fleet, "sleep", "wake")
        if engine == "vllm":
            check_asleep(fleet, engines[0][1])
        check_adapters(fleet, adapters["second"])
        check_abort(fleet, {} if engine == "vllm" else {"abort_all": True})
        check_profile(fleet)
        if fleet.problems:
            sys.exit("\n".join(f"FAILED: {problem}" for problem in fleet.problems))


main(*sys.argv[1:])
