"""Runs LiteLLM, LangChain, the AI SDK, requests of Open WebUI and nginx against the gateway, in both modes of Messages.

usage: check.py POINTSMAN_BINARY DIRECTORY_OF_THE_AI_SDK PREFILL_SECONDS. Everything runs on loopback and ends with the script.
Without nginx, or without the AI SDK, their parts are skipped.
"""

import concurrent.futures
import contextlib
import http.client
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import open_webui
import sdks
from engine import CALLS, FILLED, GREETING, Engine
from forms import Chat, Messages, Responses
from loopback import check, confirm, free_ports, scripted_engine, serve, until

READ_TIMEOUT_S = 2
CALLED = [[call.name, call.arguments] for call in CALLS], "7, 9."

# In the order of the checks of a client. A broken engine is tried twice, by the gateway alone.
ERRORS = [(400, "there is no nowhere"), (400, "there is no nowhere"), (500, "the engine is broken"), (500, "the engine is broken")]


def confirm_client(name, chat, stream, tools, structured, errors):
    confirm(f"{name}: chat and stream", (chat, stream) == (GREETING, GREETING))
    for called, text in tools:
        check(([list(call) for call in called], text) == CALLED, f"{name}: tools: {called} {text}")
    print(f"ok: {name}: parallel tools, whole and streamed")
    confirm(f"{name}: structured output", structured == FILLED)
    for got, (status, message) in zip(errors, ERRORS, strict=True):
        check(got is not None and got[0] == status and message in got[1], f"{name}: errors: {errors}")
    print(f"ok: {name}: errors, whole and streamed")


def check_sdks(url, ai_sdk):
    for name, client in sdks.clients(url).items():
        errors = [client.error(text, stream) for text in ("nowhere", "broken") for stream in (False, True)]
        tools = [client.tools(stream) for stream in (False, True)]
        confirm_client(name, client.chat(), client.stream(), tools, client.structured(), errors)
    if not ai_sdk:
        return print("SKIPPED: the AI SDK cannot be installed from the npm registry, and was NOT run")
    script = pathlib.Path(__file__).with_name("ai_sdk.mjs").resolve()
    run = subprocess.run(["node", script, url], cwd=ai_sdk, capture_output=True, text=True, timeout=120)
    check(run.returncode == 0, f"the AI SDK: {run.stderr[-3000:]}")
    for line in run.stdout.splitlines():
        confirm_client(**json.loads(line))


def patient(port, form, path, body):
    """Seconds to the head and to the text of a stream, for a client that waits for a byte for a short time only."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READ_TIMEOUT_S)
    with contextlib.closing(connection):
        body = json.dumps({"model": "mock", "stream": True, **body})
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        head, content = time.monotonic() - began, b""
        while GREETING.encode() not in content:
            part = response.read1()
            check(part and response.status == 200, f"{path} through nginx: {response.status} {content!r}")
            content += part
        whole = time.monotonic() - began
        while part := response.read1():
            content += part
    check(content.count(b"ping" if form is Messages else b"\n:") > 1, f"{path} through nginx has heartbeats: {content[:300]!r}")
    return head, whole


def check_nginx(stack, port, prefill_s):
    """nginx with its defaults as a proxy, which buffers responses unless they forbid it."""
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if nginx is None:
        return print("SKIPPED: nginx is not installed and was NOT run in front of the gateway")
    directory, (own,) = stack.enter_context(tempfile.TemporaryDirectory()), free_ports(1)
    paths = "".join(f"{name}_temp_path {directory};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (pathlib.Path(directory) / "nginx.conf").write_text(f"""
daemon off; master_process off; pid {directory}/pid; error_log {directory}/error.log;
events {{}}
http {{ access_log off; {paths} server {{ listen 127.0.0.1:{own}; location / {{ proxy_pass http://127.0.0.1:{port}; }} }} }}
""")
    process = subprocess.Popen([nginx, "-p", directory, "-c", "nginx.conf", "-e", f"{directory}/error.log"])
    stack.callback(process.wait)
    stack.callback(process.terminate)
    until("nginx listens", lambda: http.client.HTTPConnection("127.0.0.1", own).connect() is None)
    said = [{"role": "user", "content": "slow"}]
    requests = [(Chat, "/v1/chat/completions", {"messages": said}), (Responses, "/v1/responses", {"input": said}),
                (Messages, "/v1/messages", {"messages": said, "max_tokens": 9})]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        times = pool.map(lambda request: patient(own, *request), requests)
        for (_, path, _), (head, whole) in zip(requests, times, strict=True):
            is_alive = head < READ_TIMEOUT_S and whole >= prefill_s
            confirm(f"nginx: {path}: head after {head:.1f} s, text after {whole:.1f} s", is_alive)


def main(binary, ai_sdk, prefill_s):
    with contextlib.ExitStack() as stack:
        seen = []
        engine = type("Scripted", (Engine,), {"prefill_s": float(prefill_s), "seen": seen})
        lines = ["heartbeat_after_ms = 500"]
        for name, mode in [("mock", "translate"), ("passed", "pass")]:
            lines += ["[[models]]", f'name = "{name}"', f'messages = "{mode}"', "[[models.workers]]"]
            lines += [f'url = "http://127.0.0.1:{scripted_engine(stack, engine)}"', "[models.router]", 'events.mode = "off"']
            # Engines that fail stay.
            lines += ["health.probe_interval_ms = 0", "health.outcome_failures_max = 0", "[models.tokens]", 'source = "none"']
        port, _ = serve(binary, stack, lines)
        open_webui.check(port, seen)
        check_sdks(f"http://127.0.0.1:{port}", ai_sdk)
        check_nginx(stack, port, float(prefill_s))
    print("1 passed, 0 failed")


main(*sys.argv[1:])
