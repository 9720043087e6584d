"""Runs Anthropic's Python client against the gateway: messages, streams, tools, token counts and errors.

usage: check.py POINTSMAN_BINARY. Needs the package `anthropic`. Everything runs on loopback and ends with the script.
"""

import contextlib
import http.client
import http.server
import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time

import anthropic

PATIENCE_S = 60
KEY = "tenant-key-0123456789"
TOOL = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def mock_engine(binary, stack, *flags):
    """Starts a mock engine on a free port and returns its URL."""
    command = [binary, "mock-engine", "--port", "0", "--model", "mock", "--time-scale", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return "http://127.0.0.1:" + process.stdout.readline().rsplit(":", 1)[1].strip()


class ToolEngine(http.server.BaseHTTPRequestHandler):
    """OpenAI-speaking engine that thinks, calls a tool, and repeats the result of the tool."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        last = request["messages"][-1]
        if last["role"] == "tool":
            message, reason = {"content": "It is " + last["content"] + "."}, "stop"
        else:
            function = {"name": request["tools"][0]["function"]["name"], "arguments": '{"city": "Bern"}'}
            calls = [{"index": 0, "id": "call_1", "type": "function", "function": function}]
            message = {"reasoning_content": "A tool knows.", "content": "One moment.", "tool_calls": calls}
            reason = "tool_calls"
        usage = {"prompt_tokens": 20, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 16}}
        if request.get("stream"):
            chunks = [{"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {name: value}}]} for name, value in message.items()]
            chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
            chunks.append({"choices": [], "usage": usage})
            body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
            content_type = "text/event-stream"
        else:
            choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
            body = json.dumps({"id": "chatcmpl-1", "choices": [choice], "usage": usage})
            content_type = "application/json"
        self.send_response(200)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


def tool_engine(stack):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ToolEngine)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.shutdown)
    return f"http://127.0.0.1:{server.server_address[1]}"


def gateway(binary, stack, models, tenants=False, prefill=None):
    """Starts the gateway in front of one engine per model. Returns its URL once it is ready. With `prefill`, an engine at
    this URL computes the prompts of the model `mock`.
    """
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    directory = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    lines = ["[gateway]", f'listen = "127.0.0.1:{port}"']
    if tenants:
        (directory / "salt").write_text("0123456789abcdef")
        (directory / "keys").write_text(KEY + "\n")
        lines += ['salt_secret_file = "salt"', "[[tenants]]", 'name = "acme"', 'keys_file = "keys"']
    if prefill:
        models = {**models, "mock-prefill": prefill}
    for name, url in models.items():
        lines += ["[[models]]", f'name = "{name}"', "[[models.workers]]", f'url = "{url}"', "[models.router]"]
        lines += ['events.mode = "off"', "health.probe_interval_ms = 0", "[models.tokens]"]
        lines += [f'source = "{"none" if name == "tools" else "engine"}"']
        if prefill and name == "mock":
            lines += ["[models.disaggregation]", 'prefill = "mock-prefill"']
    (directory / "pointsman.toml").write_text("\n".join(lines) + "\n")
    command = [binary, "serve", "--config", str(directory / "pointsman.toml")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)
    end = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
            with contextlib.closing(connection):
                connection.request("GET", "/ready")
                if connection.getresponse().status == 200:
                    return f"http://127.0.0.1:{port}"
        if time.monotonic() > end or process.poll() is not None:
            sys.exit("error: the gateway did not get ready")
        time.sleep(0.05)


def check(what, holds):
    if not holds:
        sys.exit(f"error: {what}")
    print(f"ok: {what}")


def rejects(what, error_class, kind, call):
    try:
        call()
        check(what, False)
    except error_class as error:
        check(what, error.body["error"]["type"] == kind and error.body["request_id"] == error.request_id)


def check_messages(client):
    messages = [{"role": "user", "content": "Hello."}]
    usual = {"model": "mock", "messages": messages, "max_tokens": 8}
    message = client.messages.create(**usual, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    check("a message succeeds", message.content[0].text and message.usage.output_tokens == 8)
    check("the stop reason is converted", message.stop_reason == "max_tokens" and message.model == "mock")
    with client.messages.stream(**usual) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    check("a message is streamed", text != "" and final.content[0].text == text)
    check("a stream has usage", final.usage.output_tokens == 8 and final.stop_reason == "max_tokens")
    counted = client.messages.count_tokens(model="mock", messages=messages)
    usage = client.messages.create(**usual).usage
    check("tokens are counted", counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0))
    raw = client.messages.with_raw_response.create(**usual, extra_headers={"X-Request-Id": "from-the-client"})
    check("the request's id is echoed", raw.headers["x-request-id"] == "from-the-client")


def check_tools(client):
    usual = {"model": "tools", "max_tokens": 1_000, "tools": [TOOL], "tool_choice": {"type": "any"}}
    messages = [{"role": "user", "content": "Weather in Bern?"}]
    message = client.messages.create(**usual, messages=messages)
    check("content blocks are in order", [block.type for block in message.content] == ["thinking", "text", "tool_use"])
    check("a tool is called", message.stop_reason == "tool_use" and message.content[2].input == {"city": "Bern"})
    check("cached tokens are reported", message.usage.input_tokens == 4 and message.usage.cache_read_input_tokens == 16)
    with client.messages.stream(**usual, messages=messages) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_message()
    check("a streamed tool call equals the other", [block.type for block in final.content] == ["thinking", "text", "tool_use"])
    check("streamed input is complete", final.content[2].input == {"city": "Bern"} and final.content[0].thinking == "A tool knows.")
    check("the stream ends", names[-1] == "message_stop" and final.stop_reason == "tool_use")
    result = {"type": "tool_result", "tool_use_id": final.content[2].id, "content": [{"type": "text", "text": "sunny"}]}
    messages += [{"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    message = client.messages.create(**usual, messages=messages)
    check("a tool result is answered", message.content[0].text == "It is sunny." and message.stop_reason == "end_turn")


def check_errors(client):
    usual = {"model": "mock", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 8}
    rejects("an unknown model is rejected", anthropic.NotFoundError, "not_found_error",
            lambda: client.messages.create(**{**usual, "model": "absent"}))
    rejects("a server tool is rejected", anthropic.BadRequestError, "invalid_request_error",
            lambda: client.messages.create(**usual, tools=[{"type": "web_search_20250305", "name": "web_search"}]))
    rejects("a stream of an unknown model is rejected", anthropic.NotFoundError, "not_found_error",
            lambda: client.messages.create(**{**usual, "model": "absent"}, stream=True))
    rejects("a count without tokens is rejected", anthropic.InternalServerError, "api_error",
            lambda: client.messages.count_tokens(model="tools", messages=usual["messages"]))


def main(binary):
    with contextlib.ExitStack() as stack:
        mock = mock_engine(binary, stack)
        url = gateway(binary, stack, {"mock": mock, "tools": tool_engine(stack)})
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        check_messages(client)
        check_tools(client)
        check_errors(client)
        roles = {role: mock_engine(binary, stack, "--handover", "vllm-nixl", "--role", role) for role in ["prefill", "decode"]}
        url = gateway(binary, stack, {"mock": roles["decode"]}, prefill=roles["prefill"])
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        check_messages(client)
        messages = [{"role": "user", "content": "word " * 80}]
        raw = client.messages.with_raw_response.create(model="mock", messages=messages, max_tokens=8)
        check("a message has two legs", raw.headers["x-pointsman-prefill"] == "remote")
        url = gateway(binary, stack, {"mock": mock}, tenants=True)
        usual = {"model": "mock", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}
        client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
        check("a tenant's key is accepted", client.messages.create(**usual).type == "message")
        client = anthropic.Anthropic(base_url=url, api_key=None, auth_token=KEY, max_retries=0)
        check("a tenant's token is accepted", client.messages.create(**usual).type == "message")
        client = anthropic.Anthropic(base_url=url, api_key="other", max_retries=0)
        rejects("another key is rejected", anthropic.AuthenticationError, "authentication_error",
                lambda: client.messages.create(**usual))
    print("1 passed, 0 failed")


main(sys.argv[1])
