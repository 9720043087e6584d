"""Engine of this check: it greets, calls a tool twice, repeats results, fills schemas, refuses, and fails."""

import json
import time

from forms import FORMS, MODEL, Call, tool_names
from loopback import ScriptedEngine

GREETING = "One moment."
CALLS = [Call(f"call-{city}", n, "weather", {"city": city}, "") for n, city in enumerate(["Bern", "Oslo"])]
FILLED = {"city": "Bern", "degrees": 7}


class Engine(ScriptedEngine):
    """The class of each server has its own `prefill_s` and `seen`."""

    def do_POST(self):
        raw = self.rfile.read(int(self.headers["content-length"]))
        body, form = json.loads(raw), FORMS.get(self.path)
        self.seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        if self.path == "/v1/embeddings":
            vectors = [{"object": "embedding", "index": n, "embedding": [0.5, float(n)]} for n in range(len(body["input"]))]
            return self.json(200, {"object": "list", "model": MODEL, "data": vectors, "usage": {"prompt_tokens": 2, "total_tokens": 2}})
        if form is None:
            return self.json(404, {"detail": "Not Found"})
        if b"nowhere" in raw:
            return self.fail(body, 400, "there is no nowhere", "BadRequestError")
        if b"broken" in raw:
            return self.fail(body, 500, "the engine is broken", "InternalServerError")
        if b"slow" in raw:
            time.sleep(self.prefill_s)
        results, text, calls = form.results(body), GREETING, []
        if b'"json_schema"' in raw:
            text = json.dumps(FILLED)
        elif results:
            text = ", ".join(results.get(call.id, "lost") for call in CALLS) + "."
        elif tool_names(body) == ["weather"]:
            calls = CALLS
        elif body.get("tools"):  # a schema as a tool that must be called
            calls = [Call("call-schema", 0, tool_names(body)[0], FILLED, "")]
        if not body.get("stream"):
            return self.json(200, form.whole(text, calls))
        events = b"".join(map(form.event, form.events("vllm", text, calls))) + form.END
        self.answer(200, "text/event-stream; charset=utf-8", events.decode())

    def fail(self, body, code, message, kind):
        """A stream fails in its first event if the engine is broken, as those of vLLM do."""
        error = {"error": {"message": message, "type": kind, "param": None, "code": code}}
        if code == 500 and body.get("stream"):
            return self.answer(200, "text/event-stream", f"data: {json.dumps(error)}\n\n")
        self.json(code, error)

    def json(self, status, body):
        self.answer(status, "application/json", json.dumps(body))
