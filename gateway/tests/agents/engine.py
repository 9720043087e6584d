"""Engines that play the turns of agents on loopback, with the refusals and deaths of real ones."""

import contextlib
import http.server
import itertools
import json
import re
import socket
import sys
import threading
import time
from typing import NamedTuple

from forms import FORMS, MODEL, PROMPT_TOKENS, Call, tool_names
from loopback import ScriptedEngine

ENGINES = 4
TOOL_TURNS = 8
BLOCK, PREFILL_TOKENS_PER_SECOND, STEP_SECONDS = 16, 40_000, 0.004
CONTEXT_TOKENS = 32_768
NOT_FIRST = "System message must be at the beginning."
LONG_PROMPT = (f"This model's maximum context length is {CONTEXT_TOKENS} tokens. However, your prompt contains at least 32801 input "
               "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.")
LONG_SUM = ("Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a total of {sum} tokens: "
            "{prompt} tokens from the input messages and {output} tokens for the completion. Please reduce the number of tokens in "
            "the input messages or the completion to fit within the limit.")
PAGES = {
    "vllm": {"/metrics": 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="65536"} 1.0\n'},
    "sglang": {"/server_info": json.dumps({"served_model_name": MODEL, "page_size": 16, "max_total_num_tokens": 1 << 20})},
}

# Argument of the tools that run commands.
SHELLS = {"Bash": "command", "exec_command": "cmd", "shell_command": "command"}


class Turn(NamedTuple):
    """An answered request with tools: its engine, its place relative to the turn before, and the results to come."""

    engine: object
    place: str
    results: dict


class Fleet:
    """Four engines of one kind, and the turns of each agent.

    `deaths` has the turns of the first agent at which an engine dies: `after` the turn, `before` its first byte, or `within` its
    stream. `refusal` is that of a too long `prompt`, once, or of a too large `sum` of prompt and output.
    """

    def __init__(self, stack, kind="vllm", strict=False, tokens=True, refusal=None, search=False, deaths=()):
        self.kind, self.strict, self.tokens, self.refusal, self.search = kind, strict, tokens, refusal, search
        self.deaths, self.lock = dict(deaths), threading.Lock()
        self.turns, self.problems, self.refused, self.summaries = {}, [], 0, 0
        self.engines = [Engine(self) for _ in range(ENGINES)]
        for engine in self.engines:
            threading.Thread(target=engine.serve_forever, args=(0.05,), daemon=True).start()
            stack.callback(engine.die)

    def urls(self):
        return [f"http://127.0.0.1:{engine.server_address[1]}" for engine in self.engines]

    def count(self, place):
        return sum(turn.place == place for turns in self.turns.values() for turn in turns)

    def check_results(self, agent, results):
        turns = self.turns.get(agent, [])
        for call, text in turns[-1].results.items() if turns else ():
            if text not in results.get(call, ""):
                self.problems.append(f"agent {agent}, turn {len(turns)}: result of {call}: {results.get(call)!r:.300}")

    def length_error(self, agent, n, output):
        """The refusal of a turn with this limit of the output."""
        if self.refusal == "prompt" and n == 4 and not self.refused:
            self.refused, self.turns[agent][-1] = 1, self.turns[agent][-1]._replace(results={})
            return LONG_PROMPT
        if self.refusal == "sum" and n >= 4 and PROMPT_TOKENS + output > CONTEXT_TOKENS:
            self.refused += 1
            return LONG_SUM.format(limit=CONTEXT_TOKENS, sum=PROMPT_TOKENS + output, prompt=PROMPT_TOKENS, output=output)
        return None

    def calls(self, agent, n, shell):
        """Calls of a turn: two in each odd one, of which every other has them at one index, as some parsers send them."""
        if n == TOOL_TURNS:
            return []
        if n == 2 and self.search:
            return [Call(f"call-{agent}-2", 0, "ToolSearch", {"query": "select:WebFetch", "max_results": 3}, "WebFetch")]
        texts = [f"echoed-{agent}-{n}-{k}" for k in range(1 + n % 2)]
        return [Call(f"call-{agent}-{n}-{k}", 0 if n % 4 == 3 else k, shell, {SHELLS[shell]: f"echo {text}"}, text)
                for k, text in enumerate(texts)]


class Engine(http.server.ThreadingHTTPServer):
    """An engine that sends one stream at a time, so that a death cuts no other one: Claude Code ends a task if its stream is cut
    after a whole block."""

    daemon_threads = True

    def __init__(self, fleet):
        super().__init__(("127.0.0.1", 0), Handler)
        self.fleet, self.is_dead, self.connections = fleet, False, set()
        self.prefilling, self.streaming, self.blocks = threading.Lock(), threading.RLock(), set()

    def get_request(self):
        connection, address = super().get_request()
        self.connections.add(connection)
        return connection, address

    def shutdown_request(self, request):
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, *_):
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.fleet.problems.append(f"engine: {error!r}")

    @staticmethod
    def tokens_of(words):
        return [int.from_bytes(word.encode()[-3:], "big") for word in words]

    def prefill(self, words):
        """Takes the time of the blocks that are not cached, one prompt after another."""
        with self.prefilling:
            parts = [tuple(words[end - BLOCK : end]) for end in range(BLOCK, len(words) + 1, BLOCK)]
            blocks = set(itertools.accumulate(parts, lambda before, part: hash((before, part))))
            time.sleep(len(blocks - self.blocks) * BLOCK / PREFILL_TOKENS_PER_SECOND + STEP_SECONDS)
            self.blocks |= blocks

    def die(self):
        """Closes the listener and all connections, as the end of a process does."""
        with self.streaming:
            self.is_dead = True
            self.shutdown()
            self.server_close()
            for connection in list(self.connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class Handler(ScriptedEngine):
    def do_GET(self):
        cards = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": CONTEXT_TOKENS}]}
        page = {"/health": "", "/v1/models": json.dumps(cards), **PAGES[self.server.fleet.kind]}.get(self.path)
        self.answer(404 if page is None else 200, "text/plain" if self.path == "/metrics" else "application/json", page or "")

    def do_POST(self):
        raw = self.rfile.read(int(self.headers["content-length"]))
        body, form, fleet = json.loads(raw), FORMS.get(self.path), self.server.fleet
        if form is None and (self.path != "/tokenize" or not fleet.tokens):
            return self.answer(404, "application/json", "{}")
        # vLLM converts Messages for such templates itself.
        roles = [message["role"] for message in body.get("messages", [])]
        if fleet.strict and self.path != "/v1/messages" and "system" in roles[1:]:
            return self.refuse(NOT_FIRST)
        if form is None:
            return self.tokenize(body)
        agent = re.search(rb"agent-(\d+)", raw)
        shell = next((name for name in tool_names(body) if name in SHELLS), None)
        if agent and b"Your task is to create a detailed summary" in raw:  # Claude Code compacts a conversation
            fleet.summaries += 1
            return self.play(form, body, f"<summary>The task of {agent[0].decode()}: commands have been run.</summary>", [])
        if agent is None or shell is None:
            return self.play(form, body, "Hello.", [])
        return self.turn(form, body, int(agent[1]), shell)

    def tokenize(self, body):
        tokens = self.server.tokens_of(words_of(body))
        self.answer(200, "application/json", json.dumps({"tokens": tokens, "count": len(tokens), "max_model_len": CONTEXT_TOKENS}))

    def refuse(self, message):
        error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
        body = {"error": error} if self.server.fleet.kind == "vllm" else {"object": "error", **error}
        self.answer(400, "application/json", json.dumps(body))

    def turn(self, form, body, agent, shell):
        fleet, engine = self.server.fleet, self.server
        with fleet.lock:
            turns = fleet.turns.setdefault(agent, [])
            n = len(turns)
            refusal = fleet.length_error(agent, n, body.get("max_tokens") or body.get("max_completion_tokens") or 0)
            if refusal is None:
                fleet.check_results(agent, form.results(body))
            death = fleet.deaths.pop(n, None) if agent == 0 and refusal is None else None
            place = "first" if n == 0 else "same" if turns[-1].engine is engine else "died" if turns[-1].engine.is_dead else "moved"
        if refusal:
            return self.refuse(refusal)
        if death == "before":
            return engine.die()
        engine.prefill(words_of(body))
        calls = fleet.calls(agent, n, shell)
        turn = Turn(engine, place, {call.id: call.result for call in calls})
        text = "One moment." if calls else f"Finished by agent-{agent}."
        self.play(form, body, text, calls, dies=death == "within", booking=(turns, turn))
        if death == "after":
            engine.die()

    def play(self, *response, dies=False, booking=None):
        with self.server.streaming:
            self.send(*response, dies, booking)

    def send(self, form, body, text, calls, dies, booking):
        """Sends a response. Its turn is booked with the last part, after which the client may send the next one."""
        if body.get("stream"):
            self.send_response(200)
            self.send_header("content-type", "text/event-stream; charset=utf-8")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            events = form.events(self.server.fleet.kind, text, calls)
            for n, event in enumerate(events[:-1]):
                if dies and n == 2:
                    self.server.die()
                self.chunk(form.event(event))
                time.sleep(STEP_SECONDS)
            finish = lambda: (self.chunk(form.event(events[-1]) + form.END), self.chunk(b""))
        else:
            finish = lambda: self.answer(200, "application/json", json.dumps(form.whole(text, calls)))
        if booking is None:
            return finish()
        turns, turn = booking
        with self.server.fleet.lock:
            turns.append(turn)
            try:
                finish()
            except OSError:
                turns.pop()
                raise

    def chunk(self, part):
        self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))


def words_of(body):
    """The messages of a request as words, equal in all formats. The system prompt comes first."""
    first = body.get("system") or body.get("instructions") or ""
    rest = body.get("messages") or body.get("prompt") or body.get("input") or ""
    return re.findall(r"\w+", " ".join([*texts_of(first), *texts_of(rest)]))


def texts_of(value):
    """Texts, names and arguments of calls, and results, in order, without thoughts and the line that differs per request."""
    if isinstance(value, str):
        return [] if value.startswith("x-anthropic-billing-header") else [value]
    if isinstance(value, list):
        return [text for part in value for text in texts_of(part)]
    if not isinstance(value, dict) or value.get("type") in ("thinking", "redacted_thinking", "reasoning"):
        return []
    texts = [text for name in ("text", "content", "name", "output", "tool_calls", "function") for text in texts_of(value.get(name))]
    arguments = value.get("arguments", value.get("input"))
    if arguments is not None:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        texts.append(json.dumps(arguments, sort_keys=True))
    return texts
