"""Runs Anthropic's Python client against the gateway: messages, streams, tools, token counts and errors.

usage: check.py POINTSMAN_BINARY. Needs the package `anthropic`. Everything runs on loopback and ends with the script.
"""

import contextlib
import json
import sys

import anthropic
from loopback import ScriptedEngine, confirm, mock_engine, scripted_engine, serve

KEY = "tenant-key-0123456789"
TOOL = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class ToolEngine(ScriptedEngine):
    """OpenAI-speaking engine that thinks, calls a tool, and repeats the result of the tool."""

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
        self.answer(200, content_type, body)


def gateway(binary, stack, models, tenants=False, prefill=None):
    """Starts the gateway in front of one engine per model, by port. Returns its URL once it is ready. With `prefill`, an
    engine at this port computes the prompts of the model `mock`.
    """
    lines, files = [], {}
    if tenants:
        files = {"salt": "0123456789abcdef", "keys": KEY + "\n"}
        lines += ['salt_secret_file = "salt"', "[[tenants]]", 'name = "acme"', 'keys_file = "keys"']
    if prefill:
        models = {**models, "mock-prefill": prefill}
    for name, port in models.items():
        lines += ["[[models]]", f'name = "{name}"', "[[models.workers]]", f'url = "http://127.0.0.1:{port}"']
        lines += ["[models.router]", 'events.mode = "off"', "health.probe_interval_ms = 0", "[models.tokens]"]
        lines += [f'source = "{"none" if name == "tools" else "engine"}"']
        if prefill and name == "mock":
            lines += ["[models.disaggregation]", 'prefill = "mock-prefill"']
    port, _ = serve(binary, stack, lines, files)
    return f"http://127.0.0.1:{port}"


def rejects(what, error_class, kind, call):
    try:
        call()
        confirm(what, False)
    except error_class as error:
        confirm(what, error.body["error"]["type"] == kind and error.body["request_id"] == error.request_id)


def check_messages(client):
    messages = [{"role": "user", "content": "Hello."}]
    usual = {"model": "mock", "messages": messages, "max_tokens": 8}
    message = client.messages.create(**usual, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    confirm("a message succeeds", message.content[0].text and message.usage.output_tokens == 8)
    confirm("the stop reason is converted", message.stop_reason == "max_tokens" and message.model == "mock")
    with client.messages.stream(**usual) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    confirm("a message is streamed", text != "" and final.content[0].text == text)
    confirm("a stream has usage", final.usage.output_tokens == 8 and final.stop_reason == "max_tokens")
    counted = client.messages.count_tokens(model="mock", messages=messages)
    usage = client.messages.create(**usual).usage
    confirm("tokens are counted", counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0))
    raw = client.messages.with_raw_response.create(**usual, extra_headers={"X-Request-Id": "from-the-client"})
    confirm("the request's id is echoed", raw.headers["x-request-id"] == "from-the-client")


def check_tools(client):
    usual = {"model": "tools", "max_tokens": 1_000, "tools": [TOOL], "tool_choice": {"type": "any"}}
    messages = [{"role": "user", "content": "Weather in Bern?"}]
    message = client.messages.create(**usual, messages=messages)
    confirm("content blocks are in order", [block.type for block in message.content] == ["thinking", "text", "tool_use"])
    confirm("a tool is called", message.stop_reason == "tool_use" and message.content[2].input == {"city": "Bern"})
    confirm("cached tokens are reported", message.usage.input_tokens == 4 and message.usage.cache_read_input_tokens == 16)
    with client.messages.stream(**usual, messages=messages) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_message()
    confirm("a streamed tool call equals the other", [block.type for block in final.content] == ["thinking", "text", "tool_use"])
    confirm("streamed input is complete", final.content[2].input == {"city": "Bern"} and final.content[0].thinking == "A tool knows.")
    confirm("the stream ends", names[-1] == "message_stop" and final.stop_reason == "tool_use")
    result = {"type": "tool_result", "tool_use_id": final.content[2].id, "content": [{"type": "text", "text": "sunny"}]}
    messages += [{"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    message = client.messages.create(**usual, messages=messages)
    confirm("a tool result is answered", message.content[0].text == "It is sunny." and message.stop_reason == "end_turn")


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
        mock, _ = mock_engine(binary, stack)
        url = gateway(binary, stack, {"mock": mock, "tools": scripted_engine(stack, ToolEngine)})
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        check_messages(client)
        check_tools(client)
        check_errors(client)
        start = lambda role: mock_engine(binary, stack, "--handover", "vllm-nixl", "--role", role)[0]
        roles = {role: start(role) for role in ["prefill", "decode"]}
        url = gateway(binary, stack, {"mock": roles["decode"]}, prefill=roles["prefill"])
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        check_messages(client)
        messages = [{"role": "user", "content": "word " * 80}]
        raw = client.messages.with_raw_response.create(model="mock", messages=messages, max_tokens=8)
        confirm("a message has two legs", raw.headers["x-pointsman-prefill"] == "remote")
        url = gateway(binary, stack, {"mock": mock}, tenants=True)
        usual = {"model": "mock", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}
        client = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
        confirm("a tenant's key is accepted", client.messages.create(**usual).type == "message")
        client = anthropic.Anthropic(base_url=url, api_key=None, auth_token=KEY, max_retries=0)
        confirm("a tenant's token is accepted", client.messages.create(**usual).type == "message")
        client = anthropic.Anthropic(base_url=url, api_key="other", max_retries=0)
        rejects("another key is rejected", anthropic.AuthenticationError, "authentication_error",
                lambda: client.messages.create(**usual))
    print("1 passed, 0 failed")


main(sys.argv[1])
