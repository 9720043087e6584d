"""Requests of Open WebUI 0.12.4 to an OpenAI-compatible connection, as its source code builds them: models, chats with the tasks
that follow them, tools, embeddings, Responses, and the preflights of a browser's direct connection."""

import json

from engine import CALLS, GREETING
from loopback import confirm, exchange

AGENT = {"Accept": "*/*", "Accept-Encoding": "gzip, deflate", "User-Agent": "Python/3.11 aiohttp/3.13.2"}
HEADERS = AGENT | {
    "Content-Type": "application/json", "Authorization": "Bearer sk-none", "X-OpenWebUI-User-Name": "J%C3%BCrg",
    "X-OpenWebUI-User-Id": "7d1b", "X-OpenWebUI-User-Email": "j@example.com", "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "5c0f43f3-1e49-4c6e-9d7e-4e8a1f0c2b11", "X-OpenWebUI-Message-Id": "e2b1",
}
ORIGIN = "http://localhost:8080"
TOOL = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": ""}}, "required": ["city"]}}}
TASKS = {
    "title": '### Task:\nGenerate a concise title.\nJSON format: { "title": "..." }\n<chat_history>\nUSER: Hello\n</chat_history>',
    "tags": '### Task:\nGenerate 1-3 broad tags.\nJSON format: { "tags": ["tag1"] }\n<chat_history>\nUSER: Hello\n</chat_history>',
}


def post(port, path, body):
    status, content = exchange(port, "POST", path, json.dumps(body), HEADERS)
    if status != 200:
        raise SystemExit(f"FAILED: Open WebUI: {path}: {status} {content!r}")
    return content


def preflight(port, path, method, names):
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": method, "Access-Control-Request-Headers": names}
    return exchange(port, "OPTIONS", path, headers=asked)[0]


def check(port, seen):
    status, models = exchange(port, "GET", "/v1/models", headers=HEADERS)
    listed = json.loads(models)
    names = {one["id"] for one in listed["data"]}
    confirm("Open WebUI: models", (status, listed["object"], names) == (200, "list", {"mock", "passed"}))
    usual = {"model": "mock", "stream": True, "stream_options": {"include_usage": True}}
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    body = usual | {"messages": asked, "temperature": 0.8, "max_tokens": 128, "stop": ["###"], "params": {}}
    events = post(port, "/v1/chat/completions", body).decode().split("\n\n")
    confirm("Open WebUI: a chat with usage", json.loads(events[-3][6:])["usage"]["total_tokens"] and events[-2] == "data: [DONE]")
    confirm("Open WebUI: the engine gets the same body", seen[-1][2] == body)
    for name, prompt in TASKS.items():
        body = {"model": "mock", "stream": False, "messages": [{"role": "user", "content": prompt}]}
        answer = json.loads(post(port, "/v1/chat/completions", body))
        confirm(f"Open WebUI: {name}", answer["choices"][0]["message"]["content"] == GREETING)
    made = [(call.id, {"name": call.name, "arguments": json.dumps(call.arguments)}) for call in CALLS]
    calls = [{"index": n, "id": name, "type": "function", "function": function} for n, (name, function) in enumerate(made)]
    results = [{"role": "tool", "tool_call_id": call.id, "content": str(n)} for n, call in enumerate(CALLS)]
    asked = [*asked, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    content = post(port, "/v1/chat/completions", usual | {"messages": asked, "tools": [TOOL]})
    confirm("Open WebUI: results of tools", b"0, 1." in content)
    stored = [{"type": "reasoning", "id": "rs_1", "summary": []},
              *({"type": "function_call", "call_id": name, **function} for name, function in made),
              *({"type": "function_call_output", "call_id": call.id, "output": str(n)} for n, call in enumerate(CALLS))]
    first = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}
    tool = {"type": "function", **TOOL["function"], "strict": False}
    body = {"model": "mock", "stream": True, "instructions": "Be brief.", "max_output_tokens": 128, "tools": [tool]}
    confirm("Open WebUI: Responses", b"0, 1." in post(port, "/v1/responses", {**body, "input": [first, *stored]}))
    vectors = json.loads(post(port, "/v1/embeddings", {"model": "mock", "input": ["query: a", "query: b"]}))["data"]
    confirm("Open WebUI: embeddings", [one["embedding"] for one in vectors] == [[0.5, 0.0], [0.5, 1.0]])
    for path, method in [("/v1/models", "GET"), ("/v1/chat/completions", "POST")]:
        confirm(f"Open WebUI: preflight of {path}", preflight(port, path, method, "authorization,content-type") in (200, 204))
