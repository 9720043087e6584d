"""Serves requests in two legs on real vLLM engines that transfer KV blocks by NIXL, and checks texts, ranks and caches.

usage: disaggregated.py POINTSMAN DIRECTORY REQUESTS SEED. Exits with 1 after a violation.

Requests are sequential, so that all events of the previous request have arrived; one in four is streamed. At the end, some
prompts are sent to a prefill engine directly, which serves them alone: the texts must be equal. Engines must stop when
clients leave, in either phase.
"""

import http.client
import json
import pathlib
import random
import sys
import time
import urllib.request

from fleet import BLOCK, MODEL, VOCABULARY, call, make_model, start_engine, start_gateway

PREFILLS = 2


def body(tokens, max_tokens, stream=False):
    request = {"model": MODEL, "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return request | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


def complete(port, tokens, max_tokens, stream):
    """Sends a completion. Returns its text, cached tokens, and the header of the gateway about its prefill."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body(tokens, max_tokens, stream)), headers)
    answer = connection.getresponse()
    content = answer.read().decode()
    if answer.status != 200:
        sys.exit(f"{answer.status} {content[:500]}")
    text, usage = "", {}
    if stream:
        for line in content.splitlines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line[6:])
                text += "".join(choice["text"] for choice in event["choices"])
                usage = event.get("usage") or usage
    else:
        event = json.loads(content)
        text, usage = event["choices"][0]["text"], event["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return text, details.get("cached_tokens") or 0, answer.getheader("x-pointsman-prefill")


def metric(port, name):
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    values = [line.rsplit(" ", 1)[1] for line in page.splitlines() if line.startswith(name + "{")]
    return sum(float(value) for value in values)


def leave(listen, ports, tokens, after, output):
    """Starts a streamed request and leaves. Returns the number of tokens that the engines generate afterwards: their gauges
    of running requests keep the last value when an abort leaves them idle."""
    generated = lambda: sum(metric(port, "vllm:generation_tokens_total") for port in ports)
    connection = http.client.HTTPConnection("127.0.0.1", listen, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body(tokens, output, True)), {"Content-Type": "application/json"})
    time.sleep(after)
    connection.sock.close()
    at_departure = now = generated()
    while True:
        time.sleep(2)
        before, now = now, generated()
        if now == before:
            return int(now - at_departure)


def main(binary, directory, count, seed):
    directory = pathlib.Path(directory)
    make_model(directory / "model")
    roles = ["kv_producer"] * PREFILLS + ["kv_consumer"]
    engines = [start_engine(directory, f"{role}-{n}", kv_role=role) for n, role in enumerate(roles)]
    processes = [engine[0] for engine in engines]
    try:
        for process, port, _ in engines:
            process.wait_for(port, "/health", 400)
        prefills, decodes = engines[:PREFILLS], engines[PREFILLS:]
        gateway, listen, _, access = start_gateway(binary, directory, decodes, prefill_engines=prefills)
        processes.append(gateway)
        gateway.wait_for(listen, "/ready", 60)
        time.sleep(2)
        check(listen, access, [engine[1] for engine in prefills], decodes[0][1], count, random.Random(seed))
    finally:
        for process in processes:
            process.stop()


def check(listen, access, prefill_ports, decode_port, count, dice):
    words = lambda n: [dice.randint(2, VOCABULARY - 1) for _ in range(n)]
    systems = [words(BLOCK * dice.randint(2, 6)) for _ in range(8)]
    recent, sent = [], []
    for n in range(count):
        if recent and dice.random() < 0.4:
            tokens = dice.choice(recent) + words(dice.randint(1, 2 * BLOCK))
        else:
            tokens = dice.choice(systems) + words(dice.randint(1, 6 * BLOCK))
        if len(tokens) > 2000:
            continue
        recent = [*recent[-20:], tokens]
        text, cached, prefill = complete(listen, tokens, dice.randint(1, 12), n % 4 == 0)
        sent.append((tokens, text, cached, prefill))
    results = {name: sum(1 for _, _, _, prefill in sent if prefill == name) for name in {entry[3] for entry in sent}}
    lines = [json.loads(line) for line in access.read_text().splitlines() if '"completions"' in line]
    equal = sum(1 for line in lines if line.get("predicted_cached_tokens") == line.get("cached_tokens"))
    by_rank = {}
    for line in lines:
        by_rank[line.get("prefill_worker")] = by_rank.get(line.get("prefill_worker"), 0) + 1
    prompt = sum(len(tokens) for tokens, _, _, _ in sent)
    hits = sum(cached for _, _, cached, _ in sent)
    # A prefill engine serves a plain request alone.
    wrong = 0
    for tokens, text, _, _ in dice.sample(sent, min(40, len(sent))):
        alone = call(prefill_ports[0], "/v1/completions", body(tokens, 12))["choices"][0]["text"]
        wrong += not alone.startswith(text)
    ports = [*prefill_ports, decode_port]
    output = 1500
    left = [leave(listen, ports, words(1900), after, output) for after in (0.0, 0.01, 0.05, 0.3, 1.0)]
    print(f"{len(sent)} requests: {results}, prefill ranks {sorted(by_rank.values())}, hit rate {hits / prompt:.3f}")
    print(f"predicted = delivered cached tokens in {equal} of {len(lines)}; {wrong} of {min(40, len(sent))} texts differ")
    print(f"tokens generated after the client of {output} tokens had left: {left}")
    if max(left) > output / 4:
        sys.exit("a leg runs on without its client")
    if results != {"remote": len(sent)} or wrong or equal < len(lines) * 0.99 or len(by_rank) != PREFILLS:
        sys.exit("a check failed")


main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
