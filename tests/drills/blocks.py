"""Drill of an index of 10 million blocks: its memory, and its snapshot.

Publishes KV events of 16 ranks in vLLM's format. Prompts have 250 blocks, the first 40 of them one of 20 system prompts.
Prints a line and fails if the drill fails. Usage: blocks.py BINARY QUICK(0 or 1)
"""

import os
import random
import sys
import threading
import time

import msgpack
import zmq

from processes import DIRECTORY, QUICK, Engine, Gateway, port, report, run, wait

BLOCKS, RANKS, BLOCK, PROMPT, SYSTEM = 200_000 if QUICK else 10_000_000, 16, 16, 250, 40
# Blocks that are published and not yet read.
BEHIND_MAX = 100_000
BYTES_PER_BLOCK_MAX = 60
END = b"\xff" * 8


class Rank:
    """The event stream of a rank, with a replay socket that keeps the last ten batches."""

    def __init__(self):
        context = zmq.Context.instance()
        self.ports, self.batches, self.known = (port(), port()), [], set()
        self.events, self.replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.events.set(zmq.SNDHWM, 0)
        for socket, number in zip((self.events, self.replay), self.ports):
            socket.bind(f"tcp://127.0.0.1:{number}")
        self.sequence = 0
        threading.Thread(target=self.replays, daemon=True).start()

    def replays(self):
        while True:
            identity, *_, first = self.replay.recv_multipart()
            for frames in [*self.batches, (b"", END, b"")]:
                if frames[1] >= first:
                    self.replay.send_multipart([identity, b"", *frames])

    def store(self, hashes, parent, tokens):
        event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
        event |= {"block_size": BLOCK, "lora_id": None, "medium": "GPU", "lora_name": None}
        frames = (b"kv-events", self.sequence.to_bytes(8, "big"), msgpack.packb([time.time(), [event], 0]))
        self.sequence += 1
        self.batches = [*self.batches[-9:], frames]
        self.events.send_multipart(frames)
        return len(hashes)


def content(blocks):
    return [random.getrandbits(63) for _ in range(blocks)], random.choices(range(100_000), k=blocks * BLOCK)


def fill(gateway, ranks):
    """Publishes the blocks and returns their number."""
    stored, systems = 0, [content(SYSTEM) for _ in range(20)]
    read = lambda: gateway.metric('pointsman_kv_event_blocks_total{pool="mock",result="stored"}')
    while stored < BLOCKS:
        for rank in ranks:
            system = random.randrange(len(systems))
            if system not in rank.known:
                rank.known.add(system)
                stored += rank.store(systems[system][0], None, systems[system][1])
            hashes, tokens = content(PROMPT - SYSTEM)
            stored += rank.store(hashes, systems[system][0][-1], tokens)
        wait("the reader", lambda: read() > stored - BEHIND_MAX)
    wait("the index", lambda: read() >= stored)
    return stored


def blocks():
    snapshots = os.path.join(DIRECTORY, "snapshots")
    os.mkdir(snapshots)
    ranks = [Rank() for _ in range(RANKS)]
    engines = [Engine("--kv-blocks", str(BLOCKS // RANKS + 1_000), "--block-size", str(BLOCK)) for _ in ranks]
    workers = "".join(
        f'[[models.workers]]\nurl = "http://127.0.0.1:{engine.port}"\nkv_events = {{ endpoint = '
        f'"tcp://127.0.0.1:{rank.ports[0]}", replay_endpoint = "tcp://127.0.0.1:{rank.ports[1]}" }}\n'
        for engine, rank in zip(engines, ranks)
    )
    settings = [f"gateway.snapshot_path={snapshots}", f"router.block_size={BLOCK}"]
    start = lambda: Gateway(settings=settings, tokens=f'source = "none"\n{workers}')
    index = lambda gateway: gateway.metric("pointsman_index_bytes")
    with start() as gateway:
        live = lambda: gateway.metric('pointsman_kv_sources{pool="mock",state="live"}')
        wait("subscriptions", lambda: live() == RANKS)
        empty = gateway.anonymous_mib()
        stored = fill(gateway, ranks)
        full, process = index(gateway), (gateway.anonymous_mib() - empty) << 20
        began = time.monotonic()
        gateway.process.terminate()
        gateway.process.wait()
        saved_s = time.monotonic() - began
    snapshot = sum(entry.stat().st_size for entry in os.scandir(snapshots))
    began = time.monotonic()
    with start() as gateway:
        # A restored index has less spare capacity.
        wait("the index", lambda: index(gateway) > 0.8 * full)
        restored_s = time.monotonic() - began
    amounts = {"index": full, "process": process, "snapshot": snapshot}
    # The process has further costs, which count among few blocks.
    bounded = ["index", "snapshot"] if QUICK else amounts
    large = [name for name in bounded if amounts[name] > BYTES_PER_BLOCK_MAX * stored]
    figures = {f"{name}_bytes_per_block": round(amount / stored, 1) for name, amount in amounts.items()}
    report("blocks", large, blocks=stored, **figures, saved_s=round(saved_s, 1), restored_s=round(restored_s, 1))


run(blocks)
