"""Mock engines, a gateway with the administration listener, and requests, as processes and threads on loopback."""

import http.client
import json
import pathlib
import re
import threading
import time

from loopback import PATIENCE_S, Processes, check, free_ports, get, until

TOKEN = "a-token-of-the-check-0123456789"
AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}
MODEL = "<b>chat</b>"


class Fleet(Processes):
    """Mock engines and a gateway."""

    def __init__(self, pointsman, engines=3, engine_flags=(), settings="", block_sizes=None, ranks_per_engine=1,
                 gateway_settings="", files=None, wrapper=(), patience_s=PATIENCE_S, model=MODEL):
        """`files` are those that settings name. `wrapper` is a command that runs the gateway, such as valgrind, which may
        need more patience."""
        super().__init__()
        self.gateway_settings, self.files = gateway_settings, files or {}
        self.wrapper, self.patience_s, self.model = wrapper, patience_s, model
        self.pointsman = str(pathlib.Path(pointsman).resolve())
        self.engine_flags, self.settings, self.ranks_per_engine = engine_flags, settings, ranks_per_engine
        self.block_sizes = block_sizes or [64] * engines
        self.streams = []

    def __exit__(self, *error):
        self.end_requests()
        super().__exit__(*error)

    def start_all(self):
        self.gateway, self.admin = free_ports(2)
        self.engines = [None] * len(self.block_sizes)
        self.engine_processes = [self.start_engine(n) for n in range(len(self.engines))]
        for n in range(len(self.engines)):
            self.engines[n] = until("an engine", lambda: self.ports_of(n))
        for name, content in {"token": TOKEN + "\n", **self.files}.items():
            (self.directory / name).write_text(content)
        workers = "".join(
            f'[[models.workers]]\nid = {n + 1}\nurl = "http://127.0.0.1:{port}"\ntotal_kv_blocks = 7168\n'
            f"data_parallel_size = {self.ranks_per_engine}\n"
            f'kv_events = {{ endpoint = "tcp://127.0.0.1:{events}", replay_endpoint = "tcp://127.0.0.1:{replay}", topic = "kv-events" }}\n'
            f'load = {{ metrics = "http://127.0.0.1:{port}/metrics" }}\n'
            for n, (port, events, replay) in enumerate(self.engines)
        )
        (self.directory / "gateway.toml").write_text(
            f'[gateway]\nlisten = "127.0.0.1:{self.gateway}"\n{self.gateway_settings}'
            f'[admin]\nlisten = "127.0.0.1:{self.admin}"\ntoken_file = "token"\n'
            f"[router]\nblock_size = 64\nengine_load.interval_ms = 500\n{self.settings}\n"
            f'[[models]]\nname = "{self.model}"\naliases = ["chat"]\nupstream_name = "mock"\n{workers}'
        )
        self.start_gateway()

    def start_engine(self, n):
        """Starts an engine at free ports, or at its earlier ones."""
        named = zip(("--port", "--event-port", "--replay-port"), self.engines[n] or ["0"])
        ports = [text for name, port in named for text in (name, str(port))]
        shape = ["--block-size", str(self.block_sizes[n]), "--data-parallel-size", str(self.ranks_per_engine)]
        return self.start(f"engine-{n}", [self.pointsman, "mock-engine", *ports, *shape, *self.engine_flags])

    def ports_of(self, n):
        """Ports for requests, events and replay, once an engine listens."""
        log = (self.directory / f"engine-{n}.log").read_text()
        found = re.search(r"^listening on \S*:(\d+)\nrank 0: events \S*:(\d+), replay \S*:(\d+)$", log, re.M)
        return found and [int(port) for port in found.groups()]

    def start_gateway(self):
        command = [*self.wrapper, self.pointsman, "serve", "--config", "gateway.toml"]
        self.gateway_process = self.start("gateway", command)
        until("the gateway", self.is_serving, self.patience_s)

    def is_serving(self):
        check(self.gateway_process.poll() is None, "the gateway runs")
        return get(self.gateway, "/live")[0] == 200

    def kill_engine(self, n):
        self.engine_processes[n].kill()
        self.engine_processes[n].wait()

    def restart_engine(self, n):
        self.engine_processes[n] = self.start_engine(n)
        until("the engine again", lambda: get(self.engines[n][0], "/health")[0] == 200)

    def stop_gateway(self):
        self.gateway_process.terminate()
        self.gateway_process.wait()

    def complete(self, prompt, max_tokens=4, **fields):
        body = {"model": "chat", "prompt": prompt, "max_tokens": max_tokens, **fields}
        connection = http.client.HTTPConnection("127.0.0.1", self.gateway, timeout=PATIENCE_S)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse().read()

    def hold(self, count, max_tokens=100_000, prompt_words=400):
        """Starts streams that continue until `end_requests`."""
        for n in range(count):
            connection = http.client.HTTPConnection("127.0.0.1", self.gateway, timeout=PATIENCE_S)
            body = {"model": "chat", "prompt": f"{n} word" * prompt_words, "max_tokens": max_tokens, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            self.streams.append(connection)

    def end_requests(self):
        for stream in self.streams:
            stream.close()
        self.streams = []

    def traffic(self, threads, seconds, words=300, max_tokens=60, shared=True):
        """Streamed requests in the background, with shared prefixes or without."""

        def chat(thread):
            end, n = time.monotonic() + seconds, 0
            while time.monotonic() < end:
                n += 1
                try:
                    prefix = f"system {thread % 3} " if shared else f"text {thread} {n} "
                    options = {"stream": True, "stream_options": {"include_usage": True}}
                    self.complete(prefix * words + f"turn {thread} {n}", max_tokens, **options)
                except (OSError, http.client.HTTPException):
                    time.sleep(0.1)

        for thread in range(threads):
            threading.Thread(target=chat, args=(thread,), daemon=True).start()

    def metrics(self, name):
        """Values of a metric by rank: `WORKER/RANK`."""
        series = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", self.page(), re.M)
        label = lambda labels, key: re.search(rf'\b{key}="([^"]*)"', labels)[1]
        return {f"{label(labels, 'worker')}/{label(labels, 'rank')}": float(value) for labels, value in series}

    def total(self, name, **labels):
        """Sum of the series of a metric with these labels."""
        series = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", self.page(), re.M)
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(value) for text, value in series if all(label in text.split(",") for label in wanted))

    def page(self):
        """The metrics page."""
        return get(self.admin, "/metrics", AUTHORIZED)[1]
