"""Runs OpenAI's Python client against the gateway and compares streamed bytes with those of the engine.

usage: client.py POINTSMAN_BINARY. Needs the package `openai`. Everything runs on loopback and ends with the script.
"""

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import openai

PATIENCE_S = 60


def engine(binary, stack, seed):
    """Starts a mock engine on free ports. Returns its HTTP port and the event endpoint of its rank."""
    command = [binary, "mock-engine", "--port", "0", "--model", "mock", "--time-scale", "0", "--seed", str(seed)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    listening, events = process.stdout.readline(), process.stdout.readline()
    port = int(listening.rsplit(":", 1)[1])
    live, replay = (word for word in events.replace(",", " ").split() if word.startswith("tcp://"))
    return port, {"endpoint": live, "replay_endpoint": replay}


def gateway(binary, stack, engines, alone=False):
    """Starts the gateway in front of the engines. Returns its port once it is ready. With `alone` it sends no own queries."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lines = ["[gateway]", f'listen = "127.0.0.1:{port}"', "[[models]]", 'name = "mock"', 'aliases = ["gpt-mock"]']
    for engine_port, events in engines:
        lines += ["[[models.workers]]", f'url = "http://127.0.0.1:{engine_port}"']
        lines += [f'kv_events = {{ endpoint = "{events["endpoint"]}", replay_endpoint = "{events["replay_endpoint"]}" }}']
    if alone:
        lines += ["[models.tokens]", 'source = "none"', "[router]", "health.probe_interval_ms = 0"]
    file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".toml"))
    file.write("\n".join(lines) + "\n")
    file.flush()
    process = subprocess.Popen([binary, "serve", "--config", file.name])
    stack.callback(process.wait)
    stack.callback(process.kill)
    end = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(OSError):
            status, _ = exchange(port, "GET", "/ready", None)
            if status == 200:
                return port, process
        if time.monotonic() > end or process.poll() is not None:
            sys.exit("error: the gateway did not get ready")
        time.sleep(0.05)


def exchange(port, method, path, body):
    """Sends one request. Returns the status and the bytes of the response body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()


def check(what, holds):
    if not holds:
        sys.exit(f"error: {what}")
    print(f"ok: {what}")


def main(binary):
    with contextlib.ExitStack() as stack:
        # Engines with equal seeds return equal bytes for the same first request.
        direct, _ = engine(binary, stack, seed=7)
        alone = engine(binary, stack, seed=7)
        alone_port, _ = gateway(binary, stack, [alone], alone=True)
        body = json.dumps({
            "model": "mock", "stream": True, "max_tokens": 40, "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": "Count to forty, please."}],
        })
        status, own = exchange(direct, "POST", "/v1/chat/completions", body)
        check("the engine streams", status == 200 and own.endswith(b"data: [DONE]\n\n"))
        status, carried = exchange(alone_port, "POST", "/v1/chat/completions", body)
        check("streamed bytes equal those of the engine", status == 200 and carried == own)

        port, process = gateway(binary, stack, [engine(binary, stack, seed=1), engine(binary, stack, seed=2)])
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        names = [model.id for model in client.models.list()]
        check("models are listed", "mock" in names)
        check("one model can be retrieved", client.models.retrieve("mock").id == "mock")

        messages = [{"role": "user", "content": "Hello."}]
        answer = client.chat.completions.create(model="mock", messages=messages, max_tokens=8)
        check("a chat succeeds", answer.choices[0].message.content and answer.usage.completion_tokens == 8)
        answer = client.chat.completions.create(model="gpt-mock", messages=messages, max_tokens=8)
        check("an alias succeeds", bool(answer.choices[0].message.content))

        parts = list(client.chat.completions.create(model="mock", messages=messages, max_tokens=8, stream=True))
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        check("a chat is streamed", bool(text) and parts[-1].choices[0].finish_reason == "length")

        answer = client.completions.create(model="mock", prompt="Once upon a time", max_tokens=8)
        check("a completion succeeds", bool(answer.choices[0].text) and answer.usage.completion_tokens == 8)
        parts = list(client.completions.create(model="mock", prompt=[1, 2, 3], max_tokens=8, stream=True))
        check("a completion of token ids is streamed", "".join(part.choices[0].text for part in parts) != "")

        raw = client.chat.completions.with_raw_response.create(
            model="mock", messages=messages, max_tokens=1, extra_headers={"X-Request-Id": "from-the-client"})
        check("the request's id is echoed", raw.headers["x-request-id"] == "from-the-client")

        try:
            client.chat.completions.create(model="absent", messages=messages)
            check("an unknown model is rejected", False)
        except openai.NotFoundError as error:
            check("an unknown model is rejected", error.code == "model_not_found")
        try:
            client.chat.completions.create(model="mock", messages="no list")
            check("messages of a wrong shape are rejected", False)
        except openai.BadRequestError as error:
            check("messages of a wrong shape are rejected", error.type == "invalid_request_error")

        status, page = exchange(port, "GET", "/metrics", None)
        check("the metrics page has request counts", status == 200 and b"pointsman_gateway_requests_total" in page)
        if shutil.which("promtool"):
            lint = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True)
            check("promtool accepts the metrics page", lint.returncode == 0 and not lint.stdout + lint.stderr)
        else:
            print("skipped: promtool is not installed, so the metrics page is not checked")

        process.terminate()
        check("the gateway exits with 0", process.wait(PATIENCE_S) == 0)
    print("1 passed, 0 failed")


main(sys.argv[1])
