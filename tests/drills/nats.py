"""Drills of two gateway processes that share their load by a NATS server: its death and silence, and hostile messages.

Prints a line per drill and fails if one fails. Usage: nats.py BINARY QUICK(0 or 1) NATS-SERVER
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from processes import BINARY, DIRECTORY, QUICK, Engine, Gateway, body, port, report, run, started, wait, write_secret

SERVER = sys.argv[3]
# Replicas have one account; a user of the other has the same subjects, which are not those of the replicas.
ACCOUNTS = """
accounts {
  replicas: { jetstream: enabled, users: [{ user: r, password: r }] }
  other: { jetstream: enabled, users: [{ user: o, password: o }] }
}
no_auth_user: r
"""
MESSAGES = 50_000


class Server:
    def __init__(self):
        self.port, self.directory = port(), os.path.join(DIRECTORY, "nats")
        self.config = os.path.join(DIRECTORY, "nats.conf")
        with open(self.config, "w") as file:
            file.write(f'listen: "127.0.0.1:{self.port}"\njetstream {{ store_dir: "{self.directory}" }}\n{ACCOUNTS}')
        self.start()

    def start(self):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([SERVER, "-c", self.config], **quiet)
        started.append(self.process)
        wait("the NATS server", lambda: socket.socket().connect_ex(("127.0.0.1", self.port)) == 0)


class Client:
    """A client of the server that sends any subjects, and counts what it receives."""

    def __init__(self, server, user):
        self.socket = socket.create_connection(("127.0.0.1", server.port))
        self.received = b""
        options = {"verbose": False, "pedantic": False, "echo": False, "user": user, "pass": user}
        self.socket.sendall(f"CONNECT {json.dumps(options)}\r\n".encode())
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        try:
            while data := self.socket.recv(65536):
                if b"PING\r\n" in data:
                    self.socket.sendall(b"PONG\r\n")
                self.received = (self.received + data)[-200_000:]
        except OSError:
            pass

    def subscribe(self, subject):
        self.socket.sendall(f"SUB {subject} 1\r\n".encode())

    def publish(self, subject, payload):
        self.socket.sendall(f"PUB {subject} {len(payload)}\r\n".encode() + payload + b"\r\n")


class Load:
    """Requests to both gateways at a constant rate until the end."""

    def __init__(self, gateways):
        self.gateways, self.statuses, self.slowest, self.is_over = gateways, {}, 0, threading.Event()
        self.threads = [threading.Thread(target=self.send, args=(gateway,)) for gateway in gateways]
        for thread in self.threads:
            thread.start()

    def send(self, gateway):
        n = 0
        while not self.is_over.wait(0.05):
            n, sent = n + 1, time.monotonic()
            try:
                connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
                head = {"content-type": "application/json"}
                connection.request("POST", "/v1/chat/completions", json.dumps(body(f"{n} " * 100, 2, False)), head)
                status = connection.getresponse().status
            except OSError as error:
                status = type(error).__name__
            if gateway.process.pid != Load.stopped:
                self.statuses[status] = self.statuses.get(status, 0) + 1
                self.slowest = max(self.slowest, time.monotonic() - sent)

    # A stopped process, whose responses are late.
    stopped = None

    def end(self):
        self.is_over.set()
        for thread in self.threads:
            thread.join()


def members(gateway):
    return gateway.metric('pointsman_gateway_replica_peers{state="serving"}')


def drill(name, gateways, act):
    """Requests never fail during the act, and both gateways are members again after it."""
    load = Load(gateways)
    time.sleep(1)
    base = [gateway.anonymous_mib() for gateway in gateways]
    violations = act() or []
    began = time.monotonic()
    try:
        wait("members", lambda: all(members(gateway) == 1 for gateway in gateways), 30)
    except TimeoutError:
        violations.append("the gateways are no members of each other")
    recovered = time.monotonic() - began
    load.end()
    grown = max(gateway.anonymous_mib() - before for gateway, before in zip(gateways, base))
    violations += [] if set(load.statuses) == {200} else [f"statuses {load.statuses}"]
    violations += [] if grown <= 48 else [f"{grown} MiB more"]
    figures = {"requests": load.statuses.get(200, 0), "slowest_s": round(load.slowest, 2)}
    report(name, violations, **figures, members_after_s=round(recovered, 1), grown_mib=grown)


def replicas():
    key = os.path.join(DIRECTORY, "key")
    write_secret(key)
    server = Server()
    config = f'[replicas]\nnats = "nats://127.0.0.1:{server.port}"\nkey_file = "{key}"'
    with Engine() as a, Engine() as b, Gateway(a, b, config=config) as one, Gateway(a, b, config=config) as two:
        gateways = [one, two]
        wait("members", lambda: all(members(gateway) == 1 for gateway in gateways))
        refused = lambda: sum(gateway.metric("pointsman_gateway_replica_refused_total") for gateway in gateways)
        # Members expire after 5 s, and two pings of 5 s detect a server that hangs.
        pause = 20

        def killed():
            server.process.kill()
            server.process.wait()
            wait("the loss", lambda: all(members(gateway) == 0 for gateway in gateways))
            server.start()

        def silent():
            server.process.send_signal(signal.SIGSTOP)
            time.sleep(pause)
            server.process.send_signal(signal.SIGCONT)

        def forged():
            attacker, before = Client(server, "r"), refused()
            attacker.subscribe("pointsman.v1.>")
            wait("a message", lambda: attacker.received.count(b"MSG pointsman") > 3)
            lines = attacker.received.split(b"\r\n")
            for head, payload in zip(lines, lines[1:]):
                if not head.startswith(b"MSG"):
                    continue
                subject = head.split()[1].decode()
                flipped = payload[:-1] + bytes((payload[-1] ^ 1,)) if payload else b"x"
                for changed in (payload, flipped, payload[: len(payload) // 2], b"", os.urandom(300)):
                    attacker.publish(subject, changed)
                attacker.publish("pointsman.v1.other.load", payload)
            wait("refusals", lambda: refused() > before)

        def flood():
            attacker, before = Client(server, "r"), refused()
            for _ in range(MESSAGES):
                attacker.publish("pointsman.v1.mock.load", bytes(1000))
            wait("refusals", lambda: refused() > before)

        def slow():
            Load.stopped = two.process.pid
            two.process.send_signal(signal.SIGSTOP)
            flood()
            time.sleep(pause)
            two.process.send_signal(signal.SIGCONT)
            time.sleep(1)
            Load.stopped = None

        def other_account():
            stranger, before = Client(server, "o"), refused()
            stranger.subscribe(">")
            for _ in range(MESSAGES // 10):
                stranger.publish("pointsman.v1.mock.load", bytes(100))
            time.sleep(2)
            heard = [b"MSG pointsman" in stranger.received and "the other account hears messages"]
            return [text for text in heard if text] + ([] if refused() == before else ["its messages arrive"])

        drills = [
            ("the NATS server is killed and restarts", killed),
            ("forged and corrupted messages", forged),
            ("the NATS server hangs", silent),
            ("a flood of messages", flood),
            ("a replica stops under a flood", slow),
            ("subjects of another account", other_account),
        ]
        for name, act in drills[:2] if QUICK else drills:
            drill(name, gateways, act)


run(replicas)
