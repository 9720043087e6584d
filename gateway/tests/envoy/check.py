"""Requests through a real Envoy to the endpoint picker, with Envoy's own counters as witness.

usage: check.py POINTSMAN ENVOY
"""

import http.client
import itertools
import json
import re
import signal
import socket
import sys
import threading

from fleet import MIB, Fleet
from loopback import PATIENCE_S, check, get, until


# Requests without a picker to the route that fails open.
OPEN_REQUESTS = 3


def completion(tokens, **more):
    return json.dumps({"model": "chat", "prompt": tokens, "max_tokens": 4, **more}).encode()


def padded(length, **more):
    """A completion of this length: short prompt, long ignored field."""
    body = completion([1, 2, 3], user="", **more)
    return body.replace(b'"user": ""', b'"user": "' + b"x" * max(0, length - len(body)) + b'"')


def original(fleet):
    """Headers of a request to the cluster ORIGINAL_DST, which takes a single address: the subset has one endpoint."""
    return {"x-cluster": "original", "x-subset": f"127.0.0.1:{next(iter(fleet.engines))}"}


def bodies(fleet):
    for cluster, to in (("override_host", {}), ("ORIGINAL_DST", original(fleet))):
        status, headers, answer = fleet.post(b"", to)
        check(status == 400 and b"error" in answer, f"an empty body is rejected by name: {status} {answer}")
        count = 1
        for length in (100, 61_999, 62_000, 62_001, 64 << 10, 1 * MIB - 1, 1 * MIB, 1 * MIB + 1, 5 * MIB, 64 * MIB):
            # The longest ones take seconds.
            variants = [(True, True)] if to and length == 64 * MIB else itertools.product((False, True), repeat=2)
            for stream, chunked in variants:
                what = f"{cluster}, {length} bytes, stream {stream}, chunked {chunked}"
                status, headers, answer = fleet.post(padded(length, stream=stream), to, chunked=chunked)
                check(status == 200, f"{what}: {status} {answer[:300]}")
                check((b"[DONE]" in answer) == stream, f"{what}: the whole answer arrives: {answer[-200:]}")
                count += 1
        status, headers, answer = fleet.post(padded(81 * MIB), to)
        check(status == 413, f"{cluster}: a body above the limit is rejected: {status}")
        print(f"bodies, {cluster}: {count + 1} requests of 0 B to 64 MiB")


def follows_the_cache(fleet):
    prompt = list(range(10_000, 13_210))
    served, cached = set(), []
    for turn in range(6):
        status, headers, answer = fleet.post(completion(prompt))
        check(status == 200, f"turn {turn}: {status} {answer[:300]}")
        served.add(headers["x-conformance-test-served-endpoint"])
        cached.append(json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])
        fleet.at_rest()
        until("the events are read", lambda: fleet.metric("pointsman_rank_held_blocks{") >= 50)
    check(len(served) == 1, f"all turns go to one engine: {served}")
    check(cached[0] == 0 and min(cached[1:]) >= 3_200, f"later turns are cached: {cached}")
    turns = lambda: [line for line in fleet.access() if line.get("prompt_tokens") == 3_210]
    until("one access line each", lambda: len(turns()) == 6)
    for line in turns():
        check(line["predicted_cached_tokens"] == line["cached_tokens"], f"predicted is delivered: {line}")
        check(line["worker"].endswith(next(iter(served)).rsplit(":", 1)[1]), f"the served endpoint is booked: {line}")
    print(f"cache: 6 turns on one engine, cached tokens predicted = delivered: {cached}")


def edits(fleet):
    # The model is renamed, and fields that select a rank are removed.
    body = completion([5, 6, 7], kv_transfer_params={"remote_host": "x"})
    headers = {"x-data-parallel-rank": "7", "x-gateway-destination-endpoint": "127.0.0.1:1"}
    status, _, answer = fleet.post(body, headers)
    check(status == 200 and json.loads(answer)["model"] == "mock", f"an edited request: {status} {answer[:300]}")
    status, _, answer = fleet.post(body.replace(b'"chat"', b'"other"'))
    check(status == 404 and b"model" in answer, f"an unknown model: {status} {answer}")
    print("edits: model renamed, headers and fields that select a rank removed")


def limits(fleet):
    ports = list(fleet.engines)
    for port in ports:
        for hint in (f"127.0.0.1:{port}", f"127.0.0.1:1,127.0.0.1:{port}"):
            status, headers, _ = fleet.post(completion([port]), {"x-subset": hint})
            served = headers.get("x-conformance-test-served-endpoint")
            check(status == 200 and served == f"127.0.0.1:{port}", f"subset {hint}: {status}, {served}")
        status, headers, _ = fleet.post(completion([port]), {"test-epp-endpoint-selection": f"127.0.0.1:{port}"})
        served = headers.get("x-conformance-test-served-endpoint")
        check(status == 200 and served == f"127.0.0.1:{port}", f"selection {port}: {status}, {served}")
    status, _, answer = fleet.post(completion([1]), {"x-subset": "10.9.9.9:1"})
    check(status == 503 and b"no_endpoint" in answer, f"a subset without workers: {status} {answer}")
    print("limits: subset hints and selections of the conformance suite are followed")


def original_destination(fleet):
    for port in fleet.engines:
        headers = {"x-cluster": "original", "x-subset": f"127.0.0.1:{port}"}
        before = requests_of(port)
        status, _, answer = fleet.post(completion([9]), headers)
        check(status == 200, f"ORIGINAL_DST: {status} {answer[:200]}")
        check(requests_of(port) == before + 1, f"ORIGINAL_DST: served by the chosen engine {port}")
    print("original destination: served by the chosen engine")


def requests_of(port):
    """Requests that an engine has completed."""
    page = get(port, "/metrics")[1]
    return sum(int(count) for count in re.findall(r"^vllm:request_success_total\{.*\} (\d+)$", page, re.M))


def other_paths(fleet):
    status, body = get(fleet.proxy, "/v1/models")
    check(status == 200 and '"mock"' in body, f"GET passes: {status} {body[:200]}")
    status, _, answer = fleet.post(b'{"model": "chat", "prompt": "some text"}', path="/tokenize")
    check(status == 200 and b"tokens" in answer, f"a path with a model is routed: {status} {answer[:200]}")
    # The rejection of the method comes from the engine.
    status, _, answer = fleet.post(b'{"model": "unknown"}', path="/server_info")
    check(status == 405, f"another path passes: {status} {answer[:200]}")
    print("other paths: GET and unknown paths go to any engine")


def aborts(fleet):
    def connect():
        return socket.create_connection(("127.0.0.1", fleet.proxy), timeout=PATIENCE_S)

    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    body = completion([1, 2], stream=True, max_tokens=100_000, ignore_eos=True)
    for phase in ("head", "body", "answer"):
        for _ in range(5):
            client = connect()
            if phase == "head":
                client.sendall(head)
            elif phase == "body":
                client.sendall(head + b"content-length: 1000000\r\n\r\n" + body)
            else:
                client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
                received = b""
                while b"data: " not in received:
                    received += client.recv(4096)
            client.close()
        fleet.at_rest()
    print("aborts: 15 clients gone before the body, in it and in the answer; every booking has ended")


def engine_down(fleet):
    moved = fleet.metric('pointsman_gateway_picks_total{result="moved"}')
    port, process = next(iter(fleet.engines.items()))
    # An engine that holds the prefix and then disappears: the picker still chooses it.
    prompt = list(range(500_000, 503_210))
    selected = {"test-epp-endpoint-selection": f"127.0.0.1:{port}"}
    until("a warm engine", lambda: fleet.post(completion(prompt), selected)[0] == 200 and fleet.predicted() >= 3_200)
    fleet.at_rest()
    process.kill()
    process.wait()
    for _ in range(5):
        status, headers, answer = fleet.post(completion(prompt))
        check(status == 200, f"a fallback is served: {status} {answer[:200]}")
        served = headers.get("x-conformance-test-served-endpoint")
        check(served and served != f"127.0.0.1:{port}", f"by another engine: {served}")
    fleet.at_rest()
    check(fleet.metric('pointsman_gateway_picks_total{result="moved"}') > moved, "bookings have moved")
    fleet.start_engine(port)
    until("the engine is back", lambda: fleet.post(completion([1]), selected)[1].get("x-conformance-test-served-endpoint") == f"127.0.0.1:{port}")
    print("engine down: 5 requests served by the second endpoint, bookings moved")


def engine_busy(fleet):
    moved = fleet.metric('pointsman_gateway_picks_total{result="moved"}')
    port = next(iter(fleet.engines))
    prompt = list(range(600_000, 603_210))
    selected = {"test-epp-endpoint-selection": f"127.0.0.1:{port}"}
    until("a warm engine", lambda: fleet.post(completion(prompt), selected)[0] == 200 and fleet.predicted() >= 3_200)
    set_faults(port, {"status_share": 1.0, "status": 503, "scope": "generation"})
    for _ in range(5):
        status, headers, answer = fleet.post(completion(prompt))
        check(status == 200, f"503 of the chosen engine: {status} {answer[:200]}")
    fleet.at_rest()
    check(fleet.metric('pointsman_gateway_picks_total{result="moved"}') > moved, "bookings have moved")
    set_faults(port, {})
    print("engine busy: 5 requests served in spite of a 503 of the chosen engine")


def set_faults(port, faults):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("POST", "/faults", json.dumps(faults), {"content-type": "application/json"})
    check(connection.getresponse().status == 200, f"faults are set: {faults}")


def restart(fleet):
    started, failed = fleet.stats()["streams_started"], 0
    stop = threading.Event()
    statuses = []

    def client():
        while not stop.is_set():
            statuses.append(fleet.post(completion([len(statuses)]))[0])

    thread = threading.Thread(target=client)
    thread.start()
    until("requests before", lambda: len(statuses) > 5)
    fleet.gateway_process.send_signal(signal.SIGKILL)
    fleet.gateway_process.wait()
    until("the proxy fails closed", lambda: any(status >= 500 for status in statuses))
    for _ in range(OPEN_REQUESTS):
        # Without a body: after the first piece of one, Envoy does not fail open (envoyproxy/envoy #41276).
        status, answer = get(fleet.proxy, "/v1/models", {"x-fail-open": "true"})
        check(status == 200, f"a route that fails open is served without a picker: {status} {answer[:200]}")
    fleet.start_gateway()
    until("the picker is healthy again", fleet.is_picker_healthy)
    before = len(statuses)
    until("requests after", lambda: 200 in statuses[before:])
    stop.set()
    thread.join()
    check(fleet.post(completion([1]))[0] == 200, "served after the restart")
    print(
        f"restart: {len(statuses)} requests, {sum(status != 200 for status in statuses)} failed while the picker was down; "
        f"{OPEN_REQUESTS} served by a route that fails open"
    )


def served_is_booked(fleet):
    compared = 0
    succeeded = sum(served is not None for served in fleet.served.values())
    until("the access log", lambda: sum(line["request_id"] in fleet.served for line in fleet.access()) >= succeeded)
    for line in fleet.access():
        served = fleet.served.get(line["request_id"])
        if served:
            check(line["worker"].endswith(f":{served.rsplit(':', 1)[1]}"), f"served by {served}, booked: {line}")
            compared += 1
    check(compared > 80, f"endpoints of {compared} requests")
    print(f"served: the booked endpoint in all {compared} requests of which Envoy reports it")


def main():
    pointsman, envoy = sys.argv[1:3]
    flags = ["--time-scale", "20", "--max-model-len", "400000"]
    with Fleet(pointsman, envoy, engine_flags=flags) as fleet:
        for part in (bodies, follows_the_cache, edits, limits, original_destination, other_paths, aborts):
            part(fleet)
        stats = fleet.stats()
        check(stats["streams_failed"] == 0, f"no stream failed: {stats}")
        engine_down(fleet)
        engine_busy(fleet)
        stats = fleet.stats()
        check(stats["streams_failed"] == 0, f"no stream failed: {stats}")
        restart(fleet)
        stats = fleet.stats()
        for name in ("spurious_msgs_received", "message_timeouts"):
            check(stats[name] == 0, f"{name} is 0: {stats}")
        check(stats["failure_mode_allowed"] == OPEN_REQUESTS, f"only one route fails open: {stats}")
        fleet.at_rest()
        served_is_booked(fleet)
        print("Envoy's counters:", stats)


main()
