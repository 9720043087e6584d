"""Processes of the race: mock engines, static engines, and gateways with their cache-aware settings.

Each run starts all of them anew on free ports of loopback.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import urllib.request

import client
from loopback import free_ports, until

ENGINES = 4
TEMPLATE = "{% for m in messages %}{{ m['role'] + '\\n' + m['content'] + '\\n' }}{% endfor %}assistant\n"
# The pattern of Llama 3, and one that keeps the words of the mock engines whole.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MOCK = r"\n| ?[^\s]{1,8}"
CHOICE = {"index": 0, "message": {"role": "assistant", "content": " t5"}, "finish_reason": "length", "logprobs": None}
USAGE = {"prompt_tokens": 150, "completion_tokens": 1, "total_tokens": 151}
ANSWER = {"id": "1", "object": "chat.completion", "created": 1, "model": "mock", "choices": [CHOICE], "usage": USAGE}
MODEL = {"id": "mock", "object": "model", "created": 1, "owned_by": "vllm", "root": "mock", "max_model_len": 131_072}
# Pages of a static engine; nginx replaces "\\n" by a line feed.
PAGES = {
    "/v1/chat/completions": json.dumps(ANSWER),
    "/v1/models": json.dumps({"object": "list", "data": [MODEL]}),
    "/health": "{}",
    "/version": '{"version": "0.32.0"}',
    "/metrics": 'vllm:cache_config_info{block_size="16",num_gpu_blocks="4096",engine="0"} 1.0\\n'
    'vllm:num_requests_running{engine="0"} 0.0\\nvllm:num_requests_waiting{engine="0"} 0.0\\n',
}


def get(port, path, body=None):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=5) as response:
        return response.read().decode()


class Fleet:
    """Engines and one gateway, ended with the context."""

    def __init__(self, race, binary):
        self.race, self.binary = pathlib.Path(race).resolve(), str(pathlib.Path(binary).resolve())
        self.processes = []
        self.write_model()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def spawn(self, name, *command):
        log = open(self.race / f"{name}.log", "wb")
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, start_new_session=True)
        self.processes.append(process)
        return process

    def start_engines(self, time_scale, blocks):
        self.ports, self.events, self.replays = (free_ports(ENGINES) for _ in range(3))
        for at, (port, events, replay) in enumerate(zip(self.ports, self.events, self.replays)):
            flags = f"--port {port} --event-port {events} --replay-port {replay} --model mock --block-size 16"
            flags += f" --kv-blocks {blocks}"
            flags += f" --time-scale {time_scale} --no-server-info --seed {at} --step-tokens-max 4096"
            self.spawn(f"engine-{at}", self.binary, "mock-engine", *flags.split())
        for port in self.ports:
            until("an engine", lambda: get(port, "/health") is not None)

    def start_static_engines(self):
        """nginx with one answer, for the cost of a request without an engine."""
        self.ports, self.events, self.replays = free_ports(ENGINES), [], []
        locations = "".join(f"location = {path} {{ return 200 '{text}'; }}\n" for path, text in PAGES.items())
        common = f"keepalive_requests 100000000; default_type application/json; {locations}"
        servers = "".join(f"server {{ listen 127.0.0.1:{port}; {common} }}" for port in self.ports)
        self.spawn_nginx("static", servers)
        until("the static engines", lambda: get(self.ports[0], "/health"))

    def spawn_nginx(self, name, servers):
        directory = self.race / f"nginx-{name}"
        directory.mkdir(exist_ok=True)
        parts = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        paths = "".join(f"{part}_temp_path {directory}/{part};" for part in parts)
        (directory / "conf").write_text(
            f"worker_processes 1; daemon off; pid {directory}/pid; error_log {directory}/log crit;\n"
            f"events {{ worker_connections 4096; }}\nhttp {{ access_log off; client_max_body_size 64m;\n"
            f"client_body_buffer_size 4m; {paths} {servers} }}"
        )
        return self.spawn(f"nginx-{name}", "nginx", "-c", directory / "conf", "-p", directory)

    def write_model(self, pattern=MOCK):
        """Tokenizer files with the ids of the mock engines, in the form of Llama 3."""
        self.model = self.race / "model"
        self.model.mkdir(exist_ok=True)
        vocabulary = {f"\u0120t{token}": token for token in range(131_072)}
        pieces = ["system", "user", "assistan", "assistant", "t", "\n", *map(client.spelled, range(client.SPELLED))]
        for piece in pieces:
            hashed = 0x811C_9DC5  # FNV-1a
            for byte in piece.encode():
                hashed = (hashed ^ byte) * 0x0100_0193 % (1 << 32)
            vocabulary[piece.replace(" ", "\u0120").replace("\n", "\u010a")] = (hashed ^ hashed >> 17) % (1 << 17)
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        as_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        model = {"type": "BPE", "vocab": vocabulary, "merges": [], "ignore_merges": True}
        rest = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
        steps = {"type": "Sequence", "pretokenizers": [split, as_bytes]}
        tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": steps, "model": model, **rest}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
        for name, content in (("tokenizer", tokenizer), ("tokenizer_config", config)):
            (self.model / f"{name}.json").write_text(json.dumps(content))

    def start_gateway(self, name):
        """Starts a gateway and waits until it answers."""
        (self.gateway,) = free_ports(1)
        self.process = getattr(self, name.replace("-", "_"))()

        def answers():
            body = {"model": "mock", "messages": [{"role": "user", "content": " t1 t2"}], "max_tokens": 2}
            return get(self.gateway, "/v1/chat/completions", json.dumps(body).encode())

        until(f"an answer of {name}", answers, 120)

    def pointsman(self):
        lines = [f'[gateway]\nlisten = "127.0.0.1:{self.gateway}"\nlog_level = "warn"\n[[models]]\nname = "mock"']
        lines += [
            f'[models.router]\nblock_size = 16\n[models.tokens]\ntokenizer_file = "{self.model}/tokenizer.json"'
            # The vocabulary has the words of the race only, not those of the comparison.
            "\nparity_check = false"
        ]
        for at, port in enumerate(self.ports):
            lines += [f'[[models.workers]]\nurl = "http://127.0.0.1:{port}"\nprobe = true']
            if self.events:
                endpoint, replay = (f"tcp://127.0.0.1:{ports[at]}" for ports in (self.events, self.replays))
                lines += [f'kv_events = {{ endpoint = "{endpoint}", replay_endpoint = "{replay}" }}']
        config = self.race / "pointsman.toml"
        config.write_text("\n".join(lines) + "\n")
        return self.spawn("pointsman", self.binary, "serve", "--config", config)

    def peer(self, name, program, *flags):
        urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        (metrics,) = free_ports(1)
        common = [
            "--host",
            "127.0.0.1",
            "--port",
            self.gateway,
            "--policy",
            "cache_aware",
            "--prometheus-port",
            metrics,
        ]
        return self.spawn(
            name, self.race / name / "bin" / program[0], *program[1:], *common, *flags, "--worker-urls", *urls
        )

    def smg(self):
        return self.peer(
            "smg", ["smg", "launch"], "--backend", "vllm", "--model-path", self.model, "--log-level", "warn"
        )

    def sglang_router(self):
        return self.peer(
            "sglang-router",
            ["python", "-m", "sglang_router.launch_router"],
            "--model-path",
            self.model,
            "--log-level",
            "warn",
        )

    def vllm_router(self):
        return self.peer("vllm-router", ["vllm-router"], "--log-level", "warning")

    def nginx(self):
        servers = " ".join(f"server 127.0.0.1:{port};" for port in self.ports)
        proxy = 'proxy_pass http://e; proxy_http_version 1.1; proxy_set_header Connection "";'
        proxy += " proxy_buffering off; proxy_read_timeout 600s;"
        server = f"listen 127.0.0.1:{self.gateway}; keepalive_requests 100000000; location / {{ {proxy} }}"
        return self.spawn_nginx("gateway", f"upstream e {{ {servers} keepalive 256; }} server {{ {server} }}")

    def cpu_seconds(self):
        """CPU time of the gateway's process group."""
        total = 0
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rsplit(")", 1)[1].split()
                if int(fields[2]) == self.process.pid:
                    total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    def resident_mb(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def hit_rate(self):
        """Share of the prompt tokens that the engines found in their caches."""
        sums = {"queries": 0.0, "hits": 0.0}
        for port in self.ports:
            for line in get(port, "/metrics").splitlines():
                for name in sums:
                    if line.startswith(f"vllm:prefix_cache_{name}_total"):
                        sums[name] += float(line.split()[-1])
        return sums["hits"] / max(1, sums["queries"])
