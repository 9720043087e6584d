"""Drills of one gateway process: dead and stopped engines, busy loops, handovers, attacks on its memory, a full disk.

Prints a line per drill and fails if one fails. Usage: processes.py BINARY QUICK(0 or 1)
"""

import asyncio
import http.client
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

import httpx

BINARY, QUICK = sys.argv[1], sys.argv[2] == "1"
DIRECTORY = tempfile.mkdtemp(prefix="pointsman-drills-")
MIB = 1 << 20
SECRET = "drill-0123456789abcdef"
failed, started = [], []


def report(name, violations, **figures):
    result = "FAILED" if violations else "passed"
    print(f"{name}: {result}", *(f"{key} {value}" for key, value in figures.items()), sep=", ", flush=True)
    for violation in violations:
        print(f"  {violation}", flush=True)
        failed.append(name)


def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait(what, is_reached, seconds=60):
    end = time.monotonic() + seconds
    while not is_reached():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.05)


def get(address, path):
    try:
        connection = http.client.HTTPConnection("127.0.0.1", address, timeout=10)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except OSError:
        return 0, ""


def write_secret(path):
    with open(path, "w") as file:
        file.write(SECRET)
    os.chmod(path, 0o600)


class Engine:
    """A mock engine."""

    def __init__(self, *flags):
        self.port = port()
        arguments = ["mock-engine", "--port", str(self.port), "--event-port", "0", *flags]
        self.process = subprocess.Popen([BINARY, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        started.append(self.process)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


class Gateway:
    """A gateway with the model `mock` of engines. Its configuration can have further sections."""

    def __init__(self, *engines, settings=(), address=None, config="", tokens='source = "none"'):
        self.port = address or port()
        own = tempfile.mkdtemp(dir=DIRECTORY)
        path, log = os.path.join(own, "config.toml"), os.path.join(own, "log")
        with open(path, "w") as file:
            urls = [f"http://127.0.0.1:{engine.port}" for engine in engines]
            file.write(f'{config}\n[[models]]\nname = "mock"\nworker_urls = {json.dumps(urls)}\n')
            file.write(f"[models.tokens]\n{tokens}\n")
        arguments = ["serve", "--config", path, "--listen", f"127.0.0.1:{self.port}", "--reuse-port"]
        for setting in ("gateway.access_log=off", *settings):
            arguments += ["--set", setting]
        # The symbols of a backtrace would count as memory.
        environment = {**os.environ, "RUST_BACKTRACE": "0"}
        with open(log, "w") as output:
            self.process = subprocess.Popen([BINARY, *arguments], stderr=output, env=environment)
        started.append(self.process)
        # A predecessor may answer at the same address.
        joined = lambda: open(log).read().count("worker joined") >= len(engines)
        wait("a ready gateway", lambda: joined() and get(self.port, "/ready")[0] == 200)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def anonymous_mib(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) // 1024

    def metric(self, name):
        lines = [line for line in get(self.port, "/metrics")[1].splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def body(content, tokens, is_stream=True):
    messages = [{"role": "user", "content": content}]
    return {"model": "mock", "stream": is_stream, "max_tokens": tokens, "messages": messages}


async def handover(http2, stream_s, handovers, clients):
    """Successors replace gateways under load. Clients keep their connections; each is to have complete responses."""
    counts, is_over, address, errors = {}, False, port(), []

    async def client(n):
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(http1=not http2, http2=http2, timeout=60, limits=limits) as session:
            while not is_over:
                tokens = random.choice([2, int(stream_s / 0.014)])
                try:
                    url = f"http://127.0.0.1:{address}/v1/chat/completions"
                    async with session.stream("POST", url, json=body(f"client {n}", tokens)) as answer:
                        end = b""
                        async for part in answer.aiter_raw():
                            end = (end + part)[-40:]
                        result = "ok" if answer.status_code == 200 and end.endswith(b"[DONE]\n\n") else "incomplete"
                except Exception as error:
                    result = type(error).__name__
                    errors.append(repr(error))
                counts[result] = counts.get(result, 0) + 1
                await asyncio.sleep(random.choice([0, 0, 0.05, 0.3]))

    with Engine() as engine:
        loop = asyncio.get_running_loop()
        start = lambda: loop.run_in_executor(None, lambda: Gateway(engine, address=address))
        gateway = await start()
        tasks = [asyncio.create_task(client(n)) for n in range(clients)]
        codes = []
        for _ in range(handovers):
            await asyncio.sleep(stream_s)
            successor, old = await start(), gateway
            old.process.terminate()
            codes.append(loop.run_in_executor(None, old.process.wait))
            gateway = successor
        await asyncio.sleep(stream_s)
        codes = [await code for code in codes]
        is_over = True
        await asyncio.gather(*tasks)
        gateway.process.kill()
    violations = errors[:3] + [f"exit code {code}" for code in codes if code != 0]
    violations += [] if set(counts) == {"ok"} else [f"requests: {counts}"]
    protocol = "HTTP/2" if http2 else "HTTP/1.1"
    report(f"handover of {stream_s} s streams, {protocol}", violations, handovers=handovers, requests=counts.get("ok", 0))


async def completion(address, request):
    """The seconds until each event of a streamed response, and whether it is whole."""
    started, events, end = time.monotonic(), [], b""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", address, limit=1 << 20)
        content = json.dumps(request).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
        writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
        while line := await reader.readline():
            if line.startswith(b"data: "):
                events.append(time.monotonic() - started)
                end = line
        writer.close()
    except OSError:
        pass
    return events, end == b"data: [DONE]\n"


async def killed_engine(migrations, streams, tokens):
    """One of four engines is killed under open streams of about 10 s. Returns the number of cut streams."""
    flags = ["--dialect", "sglang-map", "--output-from-context", "--time-scale", "0.05"]
    engines = [Engine(*flags) for _ in range(4)]
    with Gateway(*engines, settings=[f"gateway.stream_migrations_max={migrations}"]) as gateway:
        requests = [completion(gateway.port, body(f"client {n}", tokens)) for n in range(streams)]
        tasks = [asyncio.create_task(request) for request in requests]
        await asyncio.sleep(3)
        open_streams = sum(not task.done() for task in tasks)
        engines[0].process.kill()
        results = await asyncio.gather(*tasks)
        moved = gateway.metric("pointsman_gateway_stream_migrations_total")
    for engine in engines:
        engine.__exit__()
    return open_streams, sum(not is_whole for _, is_whole in results), int(moved)


def killed_engines(streams):
    for migrations in (1,) if QUICK else (0, 1):
        open_streams, cut, moved = asyncio.run(killed_engine(migrations, streams, 100))
        violations = [] if (cut > 0) == (migrations == 0) else [f"{cut} cut"]
        name = f"one of four engines is killed, stream_migrations_max {migrations}"
        report(name, violations, streams=open_streams, cut=cut, moved=moved)


async def stopped_engine(is_stream, warm_up_s, stop_s, rate):
    """One of four engines stops (SIGSTOP) at a constant rate of requests. Returns the delays by time of sending."""
    engines = [Engine() for _ in range(4)]
    with Gateway(*engines) as gateway:
        started, tasks = time.monotonic(), []
        stop_at, end = started + warm_up_s, started + warm_up_s + stop_s
        is_stopped = False
        while (now := time.monotonic()) < end:
            if not is_stopped and now >= stop_at:
                engines[0].process.send_signal(signal.SIGSTOP)
                is_stopped = True
            request = completion(gateway.port, body(f"{len(tasks)} " * 200, 200, is_stream))
            tasks.append((now - stop_at, asyncio.create_task(timed(request))))
            await asyncio.sleep(max(0, started + len(tasks) / rate - time.monotonic()))
        engines[0].process.send_signal(signal.SIGCONT)
        results = [(sent, await task) for sent, task in tasks]
    for engine in engines:
        engine.__exit__()
    return results


async def timed(request):
    started = time.monotonic()
    await request
    return time.monotonic() - started


def stopped_engines(stop_s, rate):
    for is_stream in (True, False):
        results = asyncio.run(stopped_engine(is_stream, 10, stop_s, rate))
        delayed = [sent for sent, seconds in results if seconds > 6 and sent >= -1]
        violations = [f"{len(delayed)} delayed, at {delayed}"] if len(delayed) > 3 * rate / 4 else []
        name = f"one of four engines stops, {'streams' if is_stream else 'whole responses'}"
        last = round(max(delayed, default=0), 1)
        figures = {"requests": len(results), "stopped_s": stop_s, "delayed": len(delayed), "last_delayed_after_s": last}
        report(name, violations, **figures)


async def starved(loops, seconds, rate):
    """Busy loops take the CPU of a gateway. It stays ready, serves, and none of its actors counts as hung."""
    with Engine() as engine, Gateway(engine) as gateway:
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
        started.extend(busy)
        tasks, statuses, end = [], {}, time.monotonic() + seconds
        while time.monotonic() < end:
            tasks.append(asyncio.create_task(completion(gateway.port, body(f"client {len(tasks)}", 8))))
            await asyncio.sleep(1 / rate)
            if len(tasks) % rate == 0:
                status = (await asyncio.to_thread(get, gateway.port, "/ready"))[0]
                statuses[status] = statuses.get(status, 0) + 1
        whole = sum(is_whole for _, is_whole in await asyncio.gather(*tasks))
        for loop in busy:
            loop.kill()
        hangs = int(gateway.metric("pointsman_hangs_total"))
    violations = [f"{len(tasks) - whole} of {len(tasks)} failed"] if whole < len(tasks) else []
    violations += [f"/ready: {statuses}"] if set(statuses) != {200} else []
    violations += [f"{hangs} hangs"] if hangs > 0 else []
    report(f"{loops} busy loops", violations, seconds=seconds, requests=len(tasks), probes=sum(statuses.values()))


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def field(name, value, is_indexed=False):
    def number(n):
        if n < 127:
            return bytes((n,))
        n, rest = n - 127, b"\x7f"
        while n >= 128:
            n, rest = n // 128, rest + bytes((n % 128 + 128,))
        return rest + bytes((n,))

    return (b"\x40" if is_indexed else b"\x00") + number(len(name)) + name + number(len(value)) + value


HEAD = field(b":method", b"POST") + field(b":scheme", b"http") + field(b":authority", b"a")
COMPLETIONS, EXTERNAL_PROCESSING = b"/v1/chat/completions", b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"


def head_frames(stream, block):
    parts = [block[n : n + 16384] for n in range(0, len(block), 16384)]
    kinds = [1] + [9] * (len(parts) - 1)
    ends = [0] * (len(parts) - 1) + [4]
    return b"".join(frame(*of) for of in zip(kinds, ends, [stream] * len(parts), parts))


# Frames before the streams, and the head of each one. No stream ends, so that none of them leaves the gateway.
ATTACKS = {
    # A field in the compression state, which each head names 15 times.
    "repeated fields": (frame(4, 0, 0), lambda n, path: field(b"x-a", b"a" * 3900, True) if n == 0 else b"\xbe" * 15),
    "large heads": (frame(4, 0, 0), lambda n, path: field(b"x-a", b"a" * 60_000)),
    # The client takes no responses.
    "no windows": (frame(4, 0, 0, b"\0\4\0\0\0\0"), lambda n, path: b""),
}


def attack(gateway, address, path, name, connections, streams):
    """Sends the heads on all connections, and returns the peak of the memory and that of the descriptors."""
    peaks, is_over, sockets = [0, 0], threading.Event(), []

    def watch():
        while not is_over.wait(0.02):
            peaks[0] = max(peaks[0], gateway.anonymous_mib())
            peaks[1] = max(peaks[1], len(os.listdir(f"/proc/{gateway.process.pid}/fd")))

    watching = threading.Thread(target=watch)
    watching.start()
    first, block = ATTACKS[name]
    for _ in range(connections):
        attacker = socket.create_connection(("127.0.0.1", address))
        attacker.settimeout(5)
        sockets.append(attacker)
        try:
            attacker.sendall(PREFACE + first)
            for n in range(streams):
                attacker.sendall(head_frames(1 + 2 * n, HEAD + field(b":path", path) + block(n, path)))
        except OSError:
            pass  # The gateway has closed the connection.
    time.sleep(1)
    alive = get(gateway.port, "/ready")[0]
    is_over.set()
    watching.join()
    for attacker in sockets:
        attacker.close()
    return peaks, alive


def budget(budget_mib, share_max):
    """Attacks on the memory of the clients' listener, with tenants and without, and on that of the picker."""
    keys, salt = os.path.join(DIRECTORY, "keys"), os.path.join(DIRECTORY, "salt")
    write_secret(keys)
    write_secret(salt)
    tenant = f'[gateway]\nsalt_secret_file = "{salt}"\n[[tenants]]\nname = "a"\nkeys_file = "{keys}"'
    connections, streams = (5, 300) if QUICK else (20, 1024)
    listeners = ("clients", "unknown clients", "picker")
    for number, name in enumerate(ATTACKS):
        for listener in (listeners[number],) if QUICK else listeners:
            picker, config = port(), tenant if listener == "unknown clients" else ""
            if listener == "picker":
                config = f'[picker]\nlisten = "127.0.0.1:{picker}"\nplaintext = true'
            address = picker if listener == "picker" else None
            path = EXTERNAL_PROCESSING if listener == "picker" else COMPLETIONS
            settings = [f"gateway.request_budget_bytes={budget_mib * MIB}", "gateway.body_bytes_max=4194304"]
            with Engine() as engine, Gateway(engine, settings=settings, config=config) as gateway:
                time.sleep(0.5)
                base = gateway.anonymous_mib()
                (peak, descriptors), alive = attack(gateway, address or gateway.port, path, name, connections, streams)
                time.sleep(0 if QUICK else 20)
                settled, max_mib = gateway.anonymous_mib(), int(budget_mib * share_max)
                violations = [] if peak - base <= max_mib else [f"more than {max_mib} MiB"]
                violations += [] if QUICK or settled - base <= budget_mib / 8 else ["more than an eighth is kept"]
                violations += [] if alive == 200 else [f"/ready: {alive}"]
                figures = {"peak_mib": peak - base, "settled_mib": settled - base, "descriptors": descriptors}
                report(f"{name}, {listener}", violations, streams=connections * streams, **figures)


async def http2_streams(address, count, tokens):
    """Opens streams over one HTTP/2 connection. Returns the numbers of heads with 200 and of whole responses."""
    reader, writer = await asyncio.open_connection("127.0.0.1", address)
    content = json.dumps(body("a question", tokens)).encode()
    windows = frame(4, 0, 0, struct.pack(">HI", 4, 1 << 30)) + frame(8, 0, 0, struct.pack(">I", 1 << 30))
    writer.write(PREFACE + windows)
    head = HEAD + field(b":path", COMPLETIONS) + field(b"content-type", b"application/json")
    for n in range(count):
        writer.write(frame(1, 4, 1 + 2 * n, head) + frame(0, 1, 1 + 2 * n, content))
    good, whole, ended, ends = 0, 0, 0, {}
    try:
        while ended < count:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            if kind == 4 and not flags:
                writer.write(frame(4, 1, 0))
            if kind == 1:
                good += payload[:1] == b"\x88"  # the indexed field `:status: 200`
            if kind == 0:
                ends[stream] = payload[-14:] or ends.get(stream)
            if kind == 3 or kind in (0, 1) and flags & 1:
                ended += 1
                whole += ends.get(stream) == b"data: [DONE]\n\n"
    except asyncio.IncompleteReadError:
        pass
    writer.close()
    return good, whole


def open_streams(streams):
    """Streams over HTTP/2, open at the same time: each has a connection to an engine."""
    flags = ["--time-scale", "0.02", "--sequences-max", "20000", "--step-tokens-max", "20000", "--kv-blocks", "100000"]
    engines = [Engine(*flags) for _ in range(4)]
    # Few connections of clients leave the descriptors to those of engines.
    with Gateway(*engines, settings=["gateway.connections_max=600"]) as gateway:
        time.sleep(2)
        base, peaks, is_over = gateway.anonymous_mib(), [0, 0], threading.Event()

        def watch():
            while not is_over.wait(0.5):
                peaks[0] = max(peaks[0], gateway.anonymous_mib())
                peaks[1] = max(peaks[1], gateway.metric("pointsman_leases"))

        async def clients():
            return await asyncio.gather(*(http2_streams(gateway.port, 100, 30) for _ in range(streams // 100)))

        watching = threading.Thread(target=watch)
        watching.start()
        results = asyncio.run(clients())
        is_over.set()
        watching.join()
        good, whole = (sum(result[n] for result in results) for n in (0, 1))
    for engine in engines:
        engine.__exit__()
    violations = [] if whole == streams else [f"{good} answered, {whole} whole"]
    kib = round((peaks[0] - base) * 1024 / max(1, peaks[1]), 1)
    report("open streams", violations, streams=streams, open_at_once=int(peaks[1]), kib_per_stream=kib)


async def beside(address, clients, texts, seconds):
    """Delays of short requests, one after the other, while clients send long prompts."""
    is_over = asyncio.Event()

    async def attack(n):
        while not is_over.is_set():
            await completion(address, body(f"{n} {random.choice(texts)}", 1))

    attackers = [asyncio.create_task(attack(n)) for n in range(clients)]
    end, delays = time.monotonic() + seconds, []
    while time.monotonic() < end:
        delays.append(await timed(completion(address, body(f"hello {len(delays)}", 1))))
        await asyncio.sleep(0.05)
    is_over.set()
    await asyncio.gather(*attackers)
    return sorted(delays)[len(delays) * 99 // 100]


def hostile_prompts(clients, size, seconds):
    """Prompts that are expensive to tokenize delay others by at most `tokens.wait_ms` more than without tokenization."""
    data = os.path.abspath("gateway/tests/data/tokens")
    local = f'source = "local"\nchat_template_file = "{data}/text.jinja"\nparity_check = false\ntokenizer_file = '
    words = " ".join(f"w{random.getrandbits(30):x}" for _ in range(size // 9))
    kinds = {"one letter": "a" * size, "words": words, "marks": "\u0301" * (size // 2), "digits": "1" * size}
    flags = ["--time-scale", "0", "--max-model-len", "600000", "--kv-blocks", "20000"]
    for name, text in kinds.items():
        p99 = {}
        for kind in ("none", "tokenizer", "metaspace"):
            with Engine(*flags) as one, Engine(*flags) as two:
                tokens = 'source = "none"' if kind == "none" else f'{local}"{data}/{kind}.json"'
                with Gateway(one, two, tokens=tokens) as gateway:
                    p99[kind] = asyncio.run(beside(gateway.port, clients, [text], seconds))
        late = [kind for kind, delay in p99.items() if delay > p99["none"] + 0.2]
        milliseconds = {f"{kind}_ms": round(1000 * delay) for kind, delay in p99.items()}
        report(f"hostile prompts, {name}", [f"{late}"] if late else [], **milliseconds)


def disk(rounds, requests):
    """A disk fills up and empties under load. No request fails, no good file goes, and losses are counted."""
    path = os.path.join(DIRECTORY, "disk")
    os.makedirs(path)
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", path]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        print("SKIPPED: no file system can be mounted, so the drill of a full disk was NOT run", flush=True)
        return
    try:
        settings = [f"gateway.decision_path={path}", "gateway.decision_file_bytes_max=1048576"]
        settings += ["gateway.decision_files_max=4", f"gateway.snapshot_path={path}", "gateway.snapshot_interval_ms=1000"]
        settings += [f"gateway.access_log={path}/access"]
        with Engine() as engine, Gateway(engine, settings=settings) as gateway:
            disk_rounds(gateway, path, rounds, requests)
    finally:
        subprocess.run(["umount", "-l", path], check=False)


def disk_rounds(gateway, path, rounds, requests):
    statuses, violations = {}, []
    lost = lambda: gateway.metric("pointsman_gateway_decision_segments_lost_total")
    written = lambda: gateway.metric("pointsman_gateway_decision_bytes_total")

    def load():
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        for n in range(requests):
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body(f"{n}", 1, False)), headers)
            answer = connection.getresponse()
            answer.read()
            statuses[answer.status] = statuses.get(answer.status, 0) + 1

    def load_until(is_reached):
        load()
        wait("an effect of requests", lambda: is_reached() or load())

    def good():
        names = [name for name in os.listdir(path) if "decisions" in name]
        return {name: os.path.getsize(os.path.join(path, name)) for name in names}

    for n in range(rounds):
        before = written()
        load_until(lambda: written() > before)
        kept, known = good(), lost()
        filler = os.path.join(path, "filler")
        with open(filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(65536))
            except OSError:
                pass
        load_until(lambda: lost() > known)
        gone = [name for name, size in kept.items() if good().get(name, 0) < size]
        violations += [f"round {n}: {gone} gone or shorter"] if gone else []
        os.remove(filler)
    before = written()
    load_until(lambda: written() > before)
    violations += [] if set(statuses) == {200} else [f"statuses {statuses}"]
    for name in good():
        replayed = subprocess.run([BINARY, "replay-decisions", os.path.join(path, name)], capture_output=True)
        violations += [f"{name}: {replayed.stderr.decode()[:200]}"] if replayed.returncode != 0 else []
    report("full disk", violations, rounds=rounds, requests=sum(statuses.values()), segments_lost=int(lost()))


def run(drills):
    """Runs the drills of a script, and exits with an error if one failed."""
    try:
        drills()
    finally:
        for process in started:
            process.kill()
        shutil.rmtree(DIRECTORY, ignore_errors=True)
    if failed:
        sys.exit(f"failed: {', '.join(sorted(set(failed)))}")


def drills():
    killed_engines(40 if QUICK else 200)
    if not QUICK:
        stopped_engines(40, 20)
        asyncio.run(starved(40, 600, 5))
    for http2 in (False, True):
        for stream_s in (1,) if QUICK else (2, 7):
            asyncio.run(handover(http2, stream_s, *((2, 8) if QUICK else (5, 40))))
    budget(64, 1.2)
    if not QUICK:
        hostile_prompts(6, 400_000, 15)
        # Each stream holds a descriptor of the gateway, which keeps some for itself and for clients.
        descriptors_max = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        is_limited = descriptors_max != resource.RLIM_INFINITY
        open_streams(min(20_000, descriptors_max - 1_000) if is_limited else 20_000)
    disk(5, 30 if QUICK else 300)


if __name__ == "__main__":
    run(drills)
