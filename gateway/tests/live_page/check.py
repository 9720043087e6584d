"""The live page in a browser. Instead, `--screenshots DIRECTORY` takes pictures of four states, and pages of
`pointsman top`; `--cost` measures the CPU time of viewers with 512 ranks."""

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import subprocess
import threading
import time

from browser import Browser
from fleet import AUTHORIZED, MODEL, TOKEN, Fleet
from loopback import check, exchange, free_ports, mock_engine, serve, until

KILL_SHOWN_WITHIN_S = 2.0
KILL_ATTEMPTS = 3

CONTRAST = """
const luminance = (colour) => {
  const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => {
    const value = part / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
};
const background = (element) => {
  for (; element; element = element.parentElement) {
    const colour = getComputedStyle(element).backgroundColor;
    if (!/, 0\\)$|transparent/.test(colour)) return colour;
  }
  return "rgb(255, 255, 255)";
};
const texts = [...document.querySelectorAll("body *")].filter((element) =>
  element.checkVisibility() && [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()));
return texts.map((element) => {
  const pair = [getComputedStyle(element).color, background(element)].map(luminance).sort((a, b) => b - a);
  return { ratio: (pair[0] + 0.05) / (pair[1] + 0.05), text: element.textContent.slice(0, 40), tag: element.tagName };
}).filter(({ ratio }) => ratio < 4.5);
"""

RANKS = """
return Object.fromEntries([...document.querySelectorAll(".ranks tbody tr")].map((row) => {
  const cells = [...row.children];
  const level = cells[0].firstElementChild.className.split(" ").pop();
  return [row.dataset.key, Object.assign({ level }, ...cells.map((cell) => ({ ...cell.dataset })))];
}));
"""


def number(browser):
    return int(browser.script("return document.body.dataset.number ?? 0"))


def ranks(browser):
    return browser.script(RANKS)


def focused(browser):
    return browser.script("return document.activeElement.id")


def connect(browser, admin):
    browser.open(f"http://127.0.0.1:{admin}/admin/page")
    until("the focus in the field of the token", lambda: focused(browser) == "token")
    browser.press(TOKEN, "Enter")
    until("the first snapshot", lambda: number(browser) > 0)


def rejects_a_wrong_token(browser, fleet):
    browser.open(f"http://127.0.0.1:{fleet.admin}/admin/page")
    browser.press("wrong-token-0123456789", "Enter")
    until("the error", lambda: "does not accept" in browser.script("return document.getElementById('login-error').textContent"))
    check(browser.script("return sessionStorage.length") == 0, "a rejected token is forgotten")
    browser.problems()  # the response 401


def loads_and_updates(browser, fleet):
    connect(browser, fleet.admin)
    until("all ranks", lambda: len(ranks(browser)) == len(fleet.engines))
    first = number(browser)
    until("four further snapshots", lambda: number(browser) >= first + 4)
    heading = browser.script("return document.querySelector('.model h2').innerHTML")
    check(heading == MODEL.replace("<", "&lt;").replace(">", "&gt;"), f"names are text: {heading}")
    own = f"http://127.0.0.1:{fleet.admin}/admin/"
    loaded = browser.script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    check(loaded and all(name.startswith(own) for name in loaded), f"only own requests: {loaded}")
    check(browser.problems() == [], "no error in the console")


def equals_metrics(browser, fleet):
    """Under a constant load, because gauges are up to a second old."""
    fleet.hold(4)
    until("the streams", lambda: sum(int(rank["requests"]) for rank in ranks(browser).values()) == 4)
    columns = {
        "requests": "pointsman_rank_active_requests",
        "blocks": "pointsman_rank_active_blocks",
        "held": "pointsman_rank_held_blocks",
        "running": "pointsman_engine_running_requests",
        "waiting": "pointsman_engine_waiting_requests",
        "placements": "pointsman_rank_placements_total",
    }

    def is_equal():
        shown = ranks(browser)
        known = {column: fleet.metrics(metric) for column, metric in columns.items()}
        return shown and all(
            float(rank[column]) == known[column][name] for name, rank in shown.items() for column in columns
        )

    until("the numbers of the page equal the metrics", is_equal)
    fleet.end_requests()


def saved_equals_metrics(browser, fleet):
    """Of a fleet that samples every decision, so that the estimate equals the saved tokens."""
    for n in range(12):
        fleet.complete(f"a saved prefix {n % 2} " * 80 + str(n))
    row = "return [...document.querySelectorAll('[data-part=shadows] tbody td')].map((cell) => cell.textContent)"
    sampled = lambda policy, of: fleet.total(f"pointsman_shadow_{of}_total", policy=policy)

    def is_equal():
        cells = browser.script(row)
        if len(cells) < 5:
            return False
        shown = lambda text: int("".join(filter(str.isdigit, text)))
        estimate, saved, decisions = shown(cells[1]), shown(cells[2]), shown(cells[3].split("of")[1])
        known = sampled("chosen", "cached_tokens") - sampled("round_robin", "cached_tokens")
        placed = fleet.total("pointsman_decisions_total", outcome="placed")
        return estimate == saved == known > 0 and decisions == sampled("chosen", "decisions") == placed

    until("the saved tokens equal the metrics", is_equal)


def shows_a_killed_engine(browser, fleet):
    for attempt in range(1, KILL_ATTEMPTS + 1):
        until("all streams live", lambda: all(rank["level"] == "ok" for rank in ranks(browser).values()))
        fleet.kill_engine(0)
        shown = lambda: ranks(browser)["1/0"]["level"] in ("warning", "critical")
        killed_at = time.monotonic()
        until("the killed engine", shown)
        seconds = time.monotonic() - killed_at
        sentence = browser.script("return document.getElementById('sentence').textContent")
        print(f"a killed engine is shown after {seconds:.2f} s: {sentence}")
        first = browser.script("return document.querySelector('.ranks tbody tr').dataset.key")
        check(first == "1/0", f"the killed engine is in the first row, not {first}")
        fleet.restart_engine(0)
        if seconds <= KILL_SHOWN_WITHIN_S:
            return
    check(False, f"a killed engine is shown within {KILL_SHOWN_WITHIN_S} s in one of {KILL_ATTEMPTS} attempts")


def survives_a_restart(browser, fleet):
    fleet.stop_gateway()
    status = "return document.getElementById('connection').className"
    until("the lost connection", lambda: browser.script(status) == "lost")
    fleet.start_gateway()
    until("the connection", lambda: browser.script(status) == "" and number(browser) > 0)
    until("all ranks again", lambda: len(ranks(browser)) == len(fleet.engines))


def works_by_keyboard(browser, fleet):
    browser.press("/")
    check(focused(browser) == "filter", "the slash moves the focus to the filter")
    port = fleet.engines[1][0]
    browser.press(f":{port}/0")
    until("one rank", lambda: list(ranks(browser)) == ["2/0"])
    check(browser.script("return location.hash") == f"#%3A{port}%2F0", "the address has the filter")
    browser.press("Escape")
    until("all ranks", lambda: len(ranks(browser)) == len(fleet.engines))
    reached = set()
    for _ in range(12):
        browser.press("Tab")
        reached.add(focused(browser))
    check({"filter", "logout"} <= reached, f"the tabulator reaches the controls: {reached}")


def fits(browser, what):
    """No horizontal scrolling at 390 pixels, and no part outside its box."""
    width = browser.script("return document.documentElement.scrollWidth")
    check(width <= 390, f"{what} needs no horizontal scrolling at 390 pixels: {width}")
    outside = browser.script("""
return [...document.querySelectorAll("body *")].filter((element) => element.checkVisibility() &&
  !element.closest("thead") && element.clientWidth > 0 && element.scrollWidth > element.clientWidth + 1).map((element) => element.outerHTML.slice(0, 80));
""")
    check(outside == [], f"{what} has parts wider than their boxes: {outside[:3]}")


def explains_a_decision(browser, fleet):
    fleet.complete("an explained request " * 50)
    buttons = "return [...document.querySelectorAll('[data-part=decisions] button')].map((button) => button.textContent)"
    until("the decision", lambda: browser.script(buttons))
    browser.script("document.querySelector('[data-part=decisions] button').focus()")
    browser.press("Enter")
    rows = "return document.querySelectorAll('#record-table tbody tr').length"
    until("the candidate table", lambda: browser.script(rows) == len(fleet.engines))
    check(browser.script("return document.querySelectorAll('#record-table .chosen').length") == 1, "one rank is chosen")
    names = browser.script("return [...document.querySelectorAll('#record-table tbody tr')].map((row) => row.children[0].textContent)")
    expected = {f"127.0.0.1:{port}/0" for port, *_ in fleet.engines}
    check(set(names) == expected, f"candidates have the names of their engines: {names}")
    browser.resize(390)
    fits(browser, "the dialog")
    browser.resize(1280)
    browser.press("Escape")
    until("the end of the dialog", lambda: not browser.script("return document.getElementById('record').open"))
    focus = browser.script("return document.activeElement.closest('[data-part]')?.dataset.part")
    check(focus == "decisions", f"the focus returns to the decision: {focus}")


def is_readable(browser, fleet):
    for scheme in ("light", "dark"):
        browser.colours(scheme)
        weak = browser.script(CONTRAST)
        check(weak == [], f"contrast in {scheme} mode: {weak[:5]}")
    dark = browser.script("return getComputedStyle(document.body).backgroundColor")
    check(sum(map(int, dark[4:-1].split(","))) < 200, f"a dark background: {dark}")
    browser.resize(390)
    fits(browser, "the page")
    shown = "return [...document.querySelectorAll('[data-part=decisions] tbody tr')].filter((row) => row.checkVisibility()).length"
    check(1 <= browser.script(shown) <= 8, "a narrow page has the last eight decisions")
    browser.resize(1280)
    browser.colours("light")


def top_shows_the_same(fleet):
    token = str(fleet.directory / "token")
    command = [fleet.pointsman, "top", "--admin", f"http://127.0.0.1:{fleet.admin}", "--token-file", token]
    frame = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    names = [f"127.0.0.1:{port}/0" for port, *_ in fleet.engines]
    check(all(name in frame for name in names) and MODEL in frame, f"pointsman top: {frame}")


def shows_legs_and_replicas(browser, pointsman):
    """Two replicas of a gateway with a prefill pool."""
    with contextlib.ExitStack() as stack:
        start = lambda role: mock_engine(pointsman, stack, "--handover", "vllm-nixl", "--role", role)[0]
        workers = {"mock": start("decode"), "mock-prefill": start("prefill")}
        buses, (admin,) = free_ports(2), free_ports(1)
        models = []
        for name, port in workers.items():
            models += ["[[models]]", f'name = "{name}"', "[[models.workers]]", f'url = "http://127.0.0.1:{port}"']
            models += ["[models.router]", 'events.mode = "off"', "health.probe_interval_ms = 0"]
            if name == "mock":
                models += ["[models.disaggregation]", 'prefill = "mock-prefill"']
        gateways = []
        for number, bus in enumerate(buses):
            peers = [f"127.0.0.1:{port}" for port in buses]
            lines = ["[replicas]", f'listen = "127.0.0.1:{bus}"', f"peers = {json.dumps(peers)}"]
            if number == 0:
                lines += ["[admin]", f'listen = "127.0.0.1:{admin}"', 'token_file = "token"']
            port, _ = serve(pointsman, stack, lines + models, {"token": TOKEN + "\n"})
            gateways.append(port)
        body = {"model": "mock", "messages": [{"role": "user", "content": "word " * 80}], "max_tokens": 2}
        headers = {"content-type": "application/json"}
        status, _ = exchange(gateways[0], "POST", "/v1/chat/completions", json.dumps(body), headers)
        check(status == 200, "a request with two legs succeeds")
        connect(browser, admin)
        text = lambda part: browser.script(f"return [...document.querySelectorAll('[data-part={part}] tbody')].map((body) => body.innerText).join(' ')")
        until("the prefill leg", lambda: "remote\t1" in text("legs") and "→" in text("pairs"))
        until("the other replica", lambda: "live" in text("replicas"))


def run_checks(pointsman):
    flags, settings = ["--time-scale", "0.2"], "shadow.share = 1.0"
    with Browser() as browser, Fleet(pointsman, engine_flags=flags, settings=settings) as fleet:
        started = time.monotonic()
        rejects_a_wrong_token(browser, fleet)
        loads_and_updates(browser, fleet)
        equals_metrics(browser, fleet)
        works_by_keyboard(browser, fleet)
        explains_a_decision(browser, fleet)
        saved_equals_metrics(browser, fleet)
        is_readable(browser, fleet)
        top_shows_the_same(fleet)
        shows_a_killed_engine(browser, fleet)
        survives_a_restart(browser, fleet)
        shows_legs_and_replicas(browser, pointsman)
        print(f"live page: all checks passed in {time.monotonic() - started:.0f} s")


def capture_top(fleet, directory, name):
    """The page of `pointsman top` at two widths."""
    command = [fleet.pointsman, "top", "--admin", f"http://127.0.0.1:{fleet.admin}", "--token-file", str(fleet.directory / "token")]
    for width in (80, 140):
        environment = os.environ | {"COLUMNS": str(width)}
        page = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
        (directory / f"top-{name}-{width}.txt").write_text(page)


def take(browser, directory, name):
    for scheme in ("light", "dark"):
        for width in (1280, 390):
            browser.colours(scheme)
            browser.resize(width)
            time.sleep(0.5)
            browser.screenshot(directory / f"{name}-{scheme}-{width}.png")


def take_screenshots(pointsman, directory, seconds=90):
    directory.mkdir(parents=True, exist_ok=True)
    with Browser() as browser:
        model = "Qwen/Qwen3-8B"
        with Fleet(pointsman, engines=4, ranks_per_engine=2, model=model) as fleet:
            fleet.traffic(24, seconds + 120)
            connect(browser, fleet.admin)
            time.sleep(seconds)
            take(browser, directory, "healthy")
            capture_top(fleet, directory, "healthy")
            fleet.kill_engine(1)
            time.sleep(20)
            take(browser, directory, "dead")
            capture_top(fleet, directory, "dead")
        with Fleet(pointsman, block_sizes=[64, 64, 32, 64], model=model) as fleet:
            fleet.traffic(6, 60)
            connect(browser, fleet.admin)
            time.sleep(8)
            take(browser, directory, "mismatched")
        queue = 'queue.threshold = 1.0\nqueue.unstated_batched_tokens = 2048'
        with Fleet(pointsman, engine_flags=["--time-scale", "0.05"], settings=queue, model=model) as fleet:
            fleet.traffic(160, 120, words=900, shared=False)
            connect(browser, fleet.admin)
            time.sleep(15)
            capture_top(fleet, directory, "overloaded")
            take(browser, directory, "overloaded")


def cpu_seconds(process):
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_stream(port, end, sizes):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/admin/live", headers=AUTHORIZED)
    response = connection.getresponse()
    while time.monotonic() < end:
        line = response.readline()
        if line.startswith(b"data: "):
            sizes.append(len(line))


def measure_cost(pointsman, seconds=40, viewers=3, rounds=3):
    with Fleet(pointsman, engines=8, ranks_per_engine=64) as fleet:
        rank_count = lambda: len(fleet.metrics("pointsman_rank_active_requests"))
        until("all ranks", lambda: rank_count() == 512)
        time.sleep(20)  # the event streams connect
        for _ in range(rounds):
            shares = []
            for count in (0, viewers):
                sizes, end, before = [], time.monotonic() + seconds, cpu_seconds(fleet.gateway_process)
                readers = [threading.Thread(target=read_stream, args=(fleet.admin, end, sizes)) for _ in range(count)]
                for reader in readers:
                    reader.start()
                time.sleep(max(0.0, end - time.monotonic()))
                for reader in readers:
                    reader.join()
                shares.append(100 * (cpu_seconds(fleet.gateway_process) - before) / seconds)
            rate, size = len(sizes) / viewers / seconds, sum(sizes) / len(sizes)
            print(
                f"512 ranks: {shares[0]:.2f} % of a core without viewers, {shares[1]:.2f} % with {viewers} viewers "
                f"({rate:.1f} snapshots/s of {size:.0f} bytes): {shares[1] - shares[0]:.2f} % for the page"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pointsman")
    parser.add_argument("--screenshots", type=pathlib.Path)
    parser.add_argument("--cost", action="store_true")
    arguments = parser.parse_args()
    if arguments.cost:
        measure_cost(arguments.pointsman)
    elif arguments.screenshots:
        take_screenshots(arguments.pointsman, arguments.screenshots)
    else:
        run_checks(arguments.pointsman)


if __name__ == "__main__":
    main()
