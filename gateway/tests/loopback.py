"""Helpers of the checks in Python: processes, ports and requests on loopback."""

import contextlib
import http.client
import http.server
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time

PATIENCE_S = 60


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def until(what, condition, patience_s=PATIENCE_S):
    """The first true value of the condition."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        try:
            value = condition()
            if value:
                return value
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.05)
    raise SystemExit(f"FAILED: timeout: {what}")


def check(condition, message):
    if not condition:
        raise SystemExit(f"FAILED: {message}")


def confirm(what, holds):
    """As `check`, with a line for each success."""
    check(holds, what)
    print(f"ok: {what}")


def exchange(port, method, path, body=None, headers=None):
    """Sends one request. Returns the status and the bytes of the response body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read()


def get(port, path, headers=None):
    """Status and text of a page."""
    status, body = exchange(port, "GET", path, headers=headers)
    return status, body.decode()


class Processes:
    """Processes with a common directory, as a context. They end with it, and after an exception the ends of their logs are
    printed. A subclass starts them in `start_all`."""

    def __init__(self):
        self.processes = []

    def __enter__(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.directory = pathlib.Path(self.temporary.name)
        try:
            self.start_all()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, kind, *_):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        if kind is not None:
            for log in self.directory.glob("*.log"):
                print(f"---- {log.name}\n{log.read_text()[-3000:]}", file=sys.stderr)
        self.temporary.cleanup()

    def start(self, name, command):
        log = open(self.directory / f"{name}.log", "ab")
        process = subprocess.Popen(command, cwd=self.directory, stdout=log, stderr=log)
        self.processes.append(process)
        return process


def mock_engine(binary, stack, *flags):
    """Starts a mock engine without delays on free ports. Returns its HTTP port and the event endpoint of its rank."""
    command = [binary, "mock-engine", "--port", "0", "--model", "mock", "--time-scale", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    listening, events = process.stdout.readline(), process.stdout.readline()
    port = int(listening.rsplit(":", 1)[1])
    live, replay = (word for word in events.replace(",", " ").split() if word.startswith("tcp://"))
    return port, {"endpoint": live, "replay_endpoint": replay}


def serve(binary, stack, lines, files=None):
    """Starts the gateway with this configuration and files that it names. Returns its port and process once it is ready."""
    (port,) = free_ports(1)
    directory = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for name, content in (files or {}).items():
        (directory / name).write_text(content)
    lines = ["[gateway]", f'listen = "127.0.0.1:{port}"', 'access_log = "off"', *lines]
    (directory / "pointsman.toml").write_text("\n".join(lines) + "\n")
    process = subprocess.Popen([binary, "serve", "--config", str(directory / "pointsman.toml")])
    stack.callback(process.wait)
    stack.callback(process.kill)

    def is_ready():
        check(process.poll() is None, "the gateway runs")
        return get(port, "/ready")[0] == 200

    until("the gateway is ready", is_ready)
    return port, process


class ScriptedEngine(http.server.BaseHTTPRequestHandler):
    """HTTP handler of an engine with scripted responses. A subclass has `do_POST`."""

    protocol_version = "HTTP/1.1"

    def answer(self, status, content_type, body):
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


def scripted_engine(stack, handler):
    """Starts an engine with this handler. Returns its port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.shutdown)
    return server.server_address[1]
