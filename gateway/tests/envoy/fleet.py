"""Mock engines, a gateway with an endpoint picker, and Envoy, as processes on loopback."""

import http.client
import json
import pathlib
import re

from loopback import PATIENCE_S, Processes, free_ports, get, until

HERE = pathlib.Path(__file__).parent
MIB = 1 << 20


class Fleet(Processes):
    """Mock engines, a gateway with a picker, and Envoy."""

    def __init__(self, pointsman, envoy, engines=3, engine_flags=(), block_size=64, model_settings=""):
        super().__init__()
        self.pointsman, self.envoy_binary = (str(pathlib.Path(path).resolve()) for path in (pointsman, envoy))
        self.engine_count, self.engine_flags = engines, ["--block-size", str(block_size), *engine_flags]
        self.block_size, self.model_settings = block_size, model_settings
        # Endpoint that served each request, by id, as Envoy reports it.
        self.served = {}

    def start_all(self):
        self.gateway, self.picker, self.proxy, self.envoy_admin = free_ports(4)
        self.engines = {}
        for _ in range(self.engine_count):
            self.start_engine()
        self.rank_count = sum(self.ranks_of_engine(port) for port in self.engines)
        urls = ", ".join(f'"http://127.0.0.1:{port}"' for port in self.engines)
        (self.directory / "gateway.toml").write_text(
            f'[gateway]\nlisten = "127.0.0.1:{self.gateway}"\nbody_bytes_max = {80 * MIB}\n'
            f'request_budget_bytes = {400 * MIB}\nsalt_secret_file = "salt"\n'
            f'[picker]\nlisten = "127.0.0.1:{self.picker}"\nconformance = true\n'
            f'[router]\nblock_size = {self.block_size}\n'
            f'[[models]]\nname = "chat"\nupstream_name = "mock"\nworker_urls = [{urls}]\n{self.model_settings}'
        )
        (self.directory / "salt").write_text("a secret of the check\n")
        self.start_gateway()
        endpoint = "{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: %d}}}}"
        config = (HERE / "envoy.yaml").read_text()
        values = {
            "ADMIN": self.envoy_admin,
            "LISTEN": self.proxy,
            "PICKER": self.picker,
            "ENDPOINTS": ", ".join(endpoint % port for port in self.engines),
        }
        for name, value in values.items():
            config = config.replace(f"@{name}@", str(value))
        (self.directory / "envoy.yaml").write_text(config)
        flags = ["--concurrency", "1", "-l", "warning", "--use-dynamic-base-id"]
        self.envoy = self.start("envoy", [self.envoy_binary, "-c", "envoy.yaml", *flags])
        until("Envoy is ready", lambda: get(self.envoy_admin, "/ready")[0] == 200)
        until("the picker is healthy in Envoy", self.is_picker_healthy)

    def start_engine(self, port=0, *more):
        """Starts an engine at a port; 0: at a free one, with free ports for events."""
        command = [self.pointsman, "mock-engine", "--port", str(port), "--body-bytes-max", str(80 * MIB)]
        log = self.directory / f"engine-{len(self.processes)}.log"
        process = self.start(log.stem, [*command, *self.engine_flags, *more])
        listening = lambda: re.search(r"^listening on http://[^:]*:(\d+)$", log.read_text(), re.M)
        port = int(until(f"engine {log.stem}", listening)[1])
        self.engines[port] = process

    def start_gateway(self):
        self.gateway_process = self.start("gateway", [self.pointsman, "serve", "--config", "gateway.toml"])
        until("the gateway is ready", lambda: get(self.gateway, "/ready")[0] == 200)
        until("all ranks", lambda: self.ranks() == self.rank_count)

    def ranks_of_engine(self, port):
        return get(port, "/metrics")[1].count("vllm:cache_config_info{")

    def ranks(self):
        page = get(self.gateway, "/metrics")[1]
        return len(re.findall(r"^pointsman_rank_active_requests\{", page, re.M))

    def is_picker_healthy(self):
        return f"127.0.0.1:{self.picker}::health_flags::healthy" in get(self.envoy_admin, "/clusters")[1]

    def stats(self):
        page = get(self.envoy_admin, "/stats?filter=ext_proc")[1]
        return {name.rsplit(".", 1)[1]: int(value) for name, value in re.findall(r"^(\S*ext_proc\S*): (\d+)$", page, re.M)}

    def metric(self, start):
        page = get(self.gateway, "/metrics")[1]
        values = [float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(start)]
        return sum(values) if values else None

    def at_rest(self):
        """Every booking has ended."""
        rest = lambda: self.metric("pointsman_leases{") == 0 and self.metric("pointsman_gateway_requests_in_flight ") == 0
        until("all bookings have ended", rest)

    def access(self):
        lines = (self.directory / "gateway.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def predicted(self):
        """Predicted cached tokens of the last request."""
        return self.access()[-1]["predicted_cached_tokens"]

    def post(self, body, headers=None, path="/v1/completions", chunked=False):
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy, timeout=PATIENCE_S)
        request_id = f"check-{len(self.served)}"
        headers = {"content-type": "application/json", "x-request-id": request_id, **(headers or {})}
        self.served[request_id] = None
        if chunked:
            pieces = (body[n : n + 10_000] for n in range(0, len(body), 10_000))
            connection.request("POST", path, pieces, headers, encode_chunked=True)
        else:
            connection.request("POST", path, body, headers)
        response = connection.getresponse()
        self.served[request_id] = response.getheader("x-conformance-test-served-endpoint")
        return response.status, dict(response.getheaders()), response.read()
