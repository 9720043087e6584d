"""Runs OpenAI's Python client against the gateway, with one engine and with two legs per request, and compares streamed
bytes with those of the engine.

usage: client.py POINTSMAN_BINARY. Needs the package `openai`. Everything runs on loopback and ends with the script.
"""

import contextlib
import json
import shutil
import subprocess
import sys

import openai
from loopback import PATIENCE_S, ScriptedEngine, confirm, exchange, mock_engine, scripted_engine, serve

JSON = {"Content-Type": "application/json"}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}

# Parameters of a transfer, with a field that the gateway does not know.
TRANSFER = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "unknown": {"a": 1}}


def gateway(binary, stack, engines, alone=False):
    """Starts the gateway in front of the engines. Returns its port once it is ready. With `alone` it sends no own queries."""
    lines = ["[[models]]", 'name = "mock"', 'aliases = ["gpt-mock"]']
    for engine_port, events in engines:
        lines += ["[[models.workers]]", f'url = "http://127.0.0.1:{engine_port}"']
        lines += [f'kv_events = {{ endpoint = "{events["endpoint"]}", replay_endpoint = "{events["replay_endpoint"]}" }}']
    if alone:
        lines += ["[models.tokens]", 'source = "none"', "[router]", "health.probe_interval_ms = 0"]
    return serve(binary, stack, lines)


def disaggregated(binary, stack, protocol, workers):
    """Starts the gateway with one list of workers for both pools. Returns its port once it is ready."""
    prefill = ["[models.disaggregation]", 'prefill = "mock-prefill"', f'protocol = "{protocol}"']
    lines = []
    for name, more in [("mock", prefill), ("mock-prefill", [])]:
        lines += ["[[models]]", f'name = "{name}"', *workers, "[models.router]", "health.probe_interval_ms = 0", *more]
        lines += ["[models.tokens]", 'source = "none"']
    return serve(binary, stack, lines)[0]


class Leg(ScriptedEngine):
    """NIXL engine for both roles that calls a tool. It rejects legs that violate a rule, and the city "nowhere"."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        transfer = request["kv_transfer_params"]
        is_prefill = transfer.get("do_remote_decode")
        is_valid = request["tools"] == [TOOL]
        if is_prefill:
            is_valid &= not request.get("stream") and "stream_options" not in request and request["max_tokens"] == 1
        else:
            is_valid &= transfer == TRANSFER
        if not is_valid or "nowhere" in request["messages"][-1]["content"]:
            error = {"message": "nowhere" if is_valid else f"invalid leg: {request}", "type": "BadRequestError", "code": 400}
            return self.answer(400, "application/json", json.dumps({"error": error}))
        function = {"name": "weather", "arguments": '{"city": "Bern"}'}
        message = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
        usage = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25}
        if is_prefill:
            usage["prompt_tokens_details"] = {"cached_tokens": 16}
        head = {"id": "chatcmpl-1", "created": 1, "model": "mock"}
        if request.get("stream"):
            delta = {**message, "tool_calls": [{"index": 0, **message["tool_calls"][0]}]}
            chunks = [{"index": 0, "delta": delta}], [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]
            events = [{**head, "object": "chat.completion.chunk", "choices": chunk} for chunk in chunks]
            events.append({**head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
            body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
            return self.answer(200, "text/event-stream", body)
        choices = [{"index": 0, "message": message, "finish_reason": "tool_calls"}]
        body = {**head, "object": "chat.completion", "choices": choices, "usage": usage}
        if is_prefill:
            body["kv_transfer_params"] = TRANSFER
        return self.answer(200, "application/json", json.dumps(body))


def worker(port, role):
    return ["[[models.workers]]", f'url = "http://127.0.0.1:{port}"', f'role = "{role}"']


def check_two_legs(binary, stack, protocol, workers, text):
    """Chats and completions with two legs, whose text is that of one engine."""
    port = disaggregated(binary, stack, protocol, workers)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    confirm(f"{protocol}: one model is listed", [model.id for model in client.models.list()] == ["mock"])
    chat = {"model": "mock", "messages": [{"role": "user", "content": "word " * 80}], "max_tokens": 8}
    raw = client.chat.completions.with_raw_response.create(**chat)
    answer = raw.parse()
    confirm(f"{protocol}: a chat has two legs", raw.headers["x-pointsman-prefill"] == "remote")
    confirm(f"{protocol}: a chat has the text of one engine", answer.choices[0].message.content == text)
    confirm(f"{protocol}: cached tokens are those of the prefill leg", answer.usage.prompt_tokens_details.cached_tokens == 0)
    parts = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    confirm(f"{protocol}: a chat is streamed", streamed == text and parts[-1].usage.completion_tokens == 8)
    parts = list(client.completions.create(model="mock", prompt=[1, 2, 3] * 40, max_tokens=8, stream=True))
    confirm(f"{protocol}: a completion is streamed", "".join(part.choices[0].text for part in parts) != "")
    try:
        client.chat.completions.create(**{**chat, "model": "mock-prefill"})
        confirm(f"{protocol}: the prefill model is rejected", False)
    except openai.NotFoundError as error:
        confirm(f"{protocol}: the prefill model is rejected", error.code == "model_not_found")
    try:
        client.chat.completions.create(**chat, extra_body={"cache_salt": ""})
        confirm(f"{protocol}: an error of an engine is returned", False)
    except openai.BadRequestError as error:
        confirm(f"{protocol}: an error of an engine is returned", "cache_salt" in error.message)


def check_tools(binary, stack):
    workers = worker(scripted_engine(stack, Leg), "prefill") + worker(scripted_engine(stack, Leg), "decode")
    port = disaggregated(binary, stack, "vllm_nixl", workers)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    chat = {"model": "mock", "messages": [{"role": "user", "content": "Weather in Bern?"}], "tools": [TOOL], "max_tokens": 90}
    answer = client.chat.completions.create(**chat)
    call = answer.choices[0].message.tool_calls[0]
    confirm("two legs: a tool is called", json.loads(call.function.arguments) == {"city": "Bern"})
    confirm("two legs: usage is corrected", answer.usage.prompt_tokens_details.cached_tokens == 16)
    parts = list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
    confirm("two legs: a tool call is streamed", parts[0].choices[0].delta.tool_calls[0].function.name == "weather")
    confirm("two legs: streamed usage is corrected", parts[-1].usage.prompt_tokens_details.cached_tokens == 16)
    for stream in [False, True]:
        try:
            client.chat.completions.create(**{**chat, "messages": [{"role": "user", "content": "nowhere"}]}, stream=stream)
            confirm("two legs: an error of the prefill leg is returned", False)
        except openai.BadRequestError as error:
            confirm("two legs: an error of the prefill leg is returned", error.body["message"] == "nowhere")


def main(binary):
    with contextlib.ExitStack() as stack:
        # Engines with equal seeds return equal bytes for the same first request.
        direct, _ = mock_engine(binary, stack, "--seed", "7")
        alone = mock_engine(binary, stack, "--seed", "7")
        alone_port, _ = gateway(binary, stack, [alone], alone=True)
        body = json.dumps({
            "model": "mock", "stream": True, "max_tokens": 40, "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": "Count to forty, please."}],
        })
        status, own = exchange(direct, "POST", "/v1/chat/completions", body, JSON)
        confirm("the engine streams", status == 200 and own.endswith(b"data: [DONE]\n\n"))
        status, carried = exchange(alone_port, "POST", "/v1/chat/completions", body, JSON)
        confirm("streamed bytes equal those of the engine", status == 200 and carried == own)

        port, process = gateway(binary, stack, [mock_engine(binary, stack, "--seed", "1"), mock_engine(binary, stack, "--seed", "2")])
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        names = [model.id for model in client.models.list()]
        confirm("models are listed", "mock" in names)
        confirm("one model can be retrieved", client.models.retrieve("mock").id == "mock")

        messages = [{"role": "user", "content": "Hello."}]
        answer = client.chat.completions.create(model="mock", messages=messages, max_tokens=8)
        confirm("a chat succeeds", answer.choices[0].message.content and answer.usage.completion_tokens == 8)
        answer = client.chat.completions.create(model="gpt-mock", messages=messages, max_tokens=8)
        confirm("an alias succeeds", bool(answer.choices[0].message.content))

        parts = list(client.chat.completions.create(model="mock", messages=messages, max_tokens=8, stream=True))
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        confirm("a chat is streamed", bool(text) and parts[-1].choices[0].finish_reason == "length")

        answer = client.completions.create(model="mock", prompt="Once upon a time", max_tokens=8)
        confirm("a completion succeeds", bool(answer.choices[0].text) and answer.usage.completion_tokens == 8)
        parts = list(client.completions.create(model="mock", prompt=[1, 2, 3], max_tokens=8, stream=True))
        confirm("a completion of token ids is streamed", "".join(part.choices[0].text for part in parts) != "")

        raw = client.chat.completions.with_raw_response.create(
            model="mock", messages=messages, max_tokens=1, extra_headers={"X-Request-Id": "from-the-client"})
        confirm("the request's id is echoed", raw.headers["x-request-id"] == "from-the-client")

        try:
            client.chat.completions.create(model="absent", messages=messages)
            confirm("an unknown model is rejected", False)
        except openai.NotFoundError as error:
            confirm("an unknown model is rejected", error.code == "model_not_found")
        try:
            client.chat.completions.create(model="mock", messages="no list")
            confirm("messages of a wrong shape are rejected", False)
        except openai.BadRequestError as error:
            confirm("messages of a wrong shape are rejected", error.type == "invalid_request_error")

        status, page = exchange(port, "GET", "/metrics")
        confirm("the metrics page has request counts", status == 200 and b"pointsman_gateway_requests_total" in page)
        if shutil.which("promtool"):
            lint = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True)
            confirm("promtool accepts the metrics page", lint.returncode == 0 and not lint.stdout + lint.stderr)
        else:
            print("skipped: promtool is not installed, so the metrics page is not checked")

        process.terminate()
        confirm("the gateway exits with 0", process.wait(PATIENCE_S) == 0)

        # An engine that serves alone, with the seed of the engines below.
        port, _ = gateway(binary, stack, [mock_engine(binary, stack, "--seed", "3", "--output-from-context")], alone=True)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        messages = [{"role": "user", "content": "word " * 80}]
        text = client.chat.completions.create(model="mock", messages=messages, max_tokens=8).choices[0].message.content
        roles = {role: ["--role", role, "--output-from-context"] for role in ["prefill", "decode"]}
        start = lambda protocol: {role: mock_engine(binary, stack, "--seed", "3", "--handover", protocol, *flags)[0] for role, flags in roles.items()}
        nixl = sum((worker(port, role) for role, port in start("vllm-nixl").items()), [])
        check_two_legs(binary, stack, "vllm_nixl", nixl, text)
        # The roles of SGLang's engines are probed.
        urls = [f"http://127.0.0.1:{port}" for port in start("sglang").values()]
        check_two_legs(binary, stack, "sglang", [f"worker_urls = {json.dumps(urls)}"], text)
        check_tools(binary, stack)
    print("1 passed, 0 failed")


main(sys.argv[1])
