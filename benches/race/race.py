"""The race: placement and cost of Pointsman and other gateways, run in turn.

Figures are medians of the rounds; each round has a seed of its own and a different order. The value in brackets is the
ratio to Pointsman. Times of placement are real seconds; the engines run at a quarter of the speed of their model, so
that the client and the gateway are not the limit.
"""

import argparse
import json
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time

sys.path.append(str(pathlib.Path(__file__).parents[2] / "gateway/tests"))

import client
from fleet import LLAMA_3, Fleet

GATEWAYS = ["pointsman", "smg", "sglang-router", "vllm-router", "nginx"]
WARM_UP_S = 8


def quantile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


def place(fleet, name, workload, seed, options):
    load = client.WORKLOADS[workload]
    fleet.start_engines(options.time_scale, load["blocks"])
    fleet.start_gateway(name)
    time.sleep(1.5)  # engines are discovered and probed by every gateway
    cpu = fleet.cpu_seconds()
    results, failed = client.run(client.play(fleet.gateway, load, seed, options.seconds))
    cpu = fleet.cpu_seconds() - cpu
    warm = [one for one in results if one[0] >= WARM_UP_S]
    firsts, gaps, totals = [one[1] for one in warm], [gap for one in warm for gap in one[2]], [one[3] for one in warm]
    return {
        "hit rate": fleet.hit_rate(), "TTFT mean": statistics.mean(firsts), "TTFT p99": quantile(firsts, 0.99),
        "E2E mean": statistics.mean(totals), "ITL p99": quantile(gaps, 0.99), "CPU ms": 1e3 * cpu / len(results),
        "MB": fleet.resident_mb(), "failed": failed,
    }  # fmt: skip


def cost(fleet, name, _, seed, options):
    """Cost of streams with four and with two hundred chunks at a low rate."""
    fleet.write_model(LLAMA_3)
    fleet.start_engines(0, 8192)
    ports = fleet.ports
    if name != "direct":
        fleet.start_gateway(name)
        ports = [fleet.gateway]
    time.sleep(1.5)
    figures = {}
    for what, rate, count, output in (("warm", 50, 100, 4), ("short", 50, 700, 4), ("long", 5, 60, 200)):
        cpu = fleet.cpu_seconds() if name != "direct" else 0
        results, failed = client.run(client.steady(ports, rate, count, 600, output, seed))
        cpu = (fleet.cpu_seconds() - cpu if name != "direct" else 0) / count
        figures[what] = cpu, [one[1] for one in results], failed
    (short, firsts, failed), (long, _, failed_long) = figures["short"], figures["long"]
    return {
        "CPU ms, 4 chunks": 1e3 * short, "CPU µs, a chunk": 1e6 * (long - short) / 196,
        "TTFT p50 ms": 1e3 * quantile(firsts, 0.5), "TTFT p99 ms": 1e3 * quantile(firsts, 0.99),
        "failed": failed + failed_long,
    }  # fmt: skip


def tiny(fleet, name, _, seed, options):
    """Requests with one short answer of static engines."""
    fleet.write_model(LLAMA_3)
    fleet.start_static_engines()
    fleet.start_gateway(name)
    time.sleep(1.5)
    cpu = fleet.cpu_seconds()
    script = pathlib.Path(__file__).with_name("wrk.lua")
    command = [
        "wrk",
        "-t1",
        "-c64",
        f"-d{options.wrk_seconds}s",
        "--latency",
        "-s",
        script,
        f"http://127.0.0.1:{fleet.gateway}",
    ]
    text = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout
    requests = int(re.search(r"(\d+) requests in", text)[1])
    failed = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    return {
        "requests/s": float(re.search(r"Requests/sec:\s+([\d.]+)", text)[1]),
        "CPU µs": 1e6 * (fleet.cpu_seconds() - cpu) / requests, "failed": int(failed[1]) if failed else 0,
    }  # fmt: skip


def table(workload, rows):
    names = list(next(iter(rows.values()))[0])
    medians = {
        gateway: {name: statistics.median(run[name] for run in runs) for name in names}
        for gateway, runs in rows.items()
    }
    base = medians.get("pointsman")
    print(f"\n### {workload}\n\n| gateway | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for gateway, figures in medians.items():
        has_ratio = lambda name: base and gateway != "pointsman" and base[name]
        ratio = lambda name: f" ({figures[name] / base[name]:.2f})" if has_ratio(name) else ""
        print(f"| {gateway} | {' | '.join(f'{figures[name]:.3g}{ratio(name)}' for name in names)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(prog="benches/race/run BINARY", description=__doc__)
    parser.add_argument("race", help=argparse.SUPPRESS)
    parser.add_argument("binary", help=argparse.SUPPRESS)
    parser.add_argument("--gateways", default=",".join(GATEWAYS))
    parser.add_argument("--workloads", default=",".join(["cost", "tiny", *client.WORKLOADS]))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30, help="of arrivals, per run of placement")
    parser.add_argument("--time-scale", type=float, default=0.25, help="speed of the engines of placement")
    parser.add_argument("--wrk-seconds", type=int, default=8)
    options = parser.parse_args()
    race = pathlib.Path(options.race)
    is_installed = lambda name: name == "pointsman" or shutil.which(name) or (race / name / "complete").exists()
    gateways = [name for name in options.gateways.split(",") if is_installed(name)]
    results = {}
    for workload in options.workloads.split(","):
        measure = {"cost": cost, "tiny": tiny}.get(workload, place)
        rows = {name: [] for name in (["direct"] if workload == "cost" else []) + gateways}
        for number in range(options.rounds):
            for name in list(rows)[:: -1 if number % 2 else 1]:
                with Fleet(race, options.binary) as fleet:
                    rows[name].append(measure(fleet, name, workload, options.first_seed + number, options))
        table(workload, rows)
        results[workload] = rows
    (race / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
