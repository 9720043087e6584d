// The live page: reads snapshots as server-sent events and shows the newest one.
//
// Names of models and workers are untrusted: text enters the document by textContent only. The stream is read with
// fetch, because EventSource cannot send the token in a header.
"use strict";

const TOKEN_KEY = "pointsman-admin-token";
const RETRY_MS = 1000;
const STALE_MS = 2000;
const OLD_REPORT_S = 2;

const $ = (id) => document.getElementById(id);
let token = sessionStorage.getItem(TOKEN_KEY);
let newest = null;
let receivedAt = 0;

// ---- elements ----

/** An element with attributes, text, and children. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Keeps one child per key, in the order of `items`, so that focus and selection survive updates. */
function keyed(parent, items, keyOf, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let child = known.get(key);
    known.delete(key);
    if (!child) {
      child = make(item);
      child.dataset.key = key;
    }
    if (child === next) next = next.nextElementSibling;
    else parent.insertBefore(child, next);
    update(child, item);
  }
  for (const gone of known.values()) gone.remove();
}

// ---- numbers ----

const whole = (value) => Math.round(value).toLocaleString("en");
const share = (value) => `${Math.round(value * 100)} %`;

function seconds(value) {
  if (value < 0.0005) return "0 s";
  if (value < 10) return `${value.toFixed(1)} s`;
  return value < 120 ? `${Math.round(value)} s` : `${Math.round(value / 60)} min`;
}

function milliseconds(value) {
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  return `${value.toFixed(value < 10 ? 1 : 0)} ms`;
}

// ---- tiles ----

const MINUTES = 10;
const perSecond = (value) => (value < 99.5 ? value.toFixed(1) : whole(value));
const percent = (value) => `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
const known = (value) => (value === null ? "–" : milliseconds(value * 1000));
const activeOf = (model) => model.ranks.reduce((sum, rank) => sum + rank.active_requests, 0);

/** Tiles of a model: label, text of the value, values of the complete points with `null` for none, text of a value. */
const TILES = [
  ["Requests", (model) => `${perSecond(model.rates.requests_per_second)} / s`, (course) => course.requests.map((count) => count / course.point_seconds), (value) => `${perSecond(value)} / s`],
  ["Active requests", (model) => whole(activeOf(model)), () => [], null],
  ["Errors", (model) => (model.rates.error_share === null ? "–" : percent(model.rates.error_share)), (course) => course.errors.map((errors, n) => (course.requests[n] ? errors / course.requests[n] : null)), percent],
  ["TTFT, mean", (model) => known(model.rates.ttft_seconds), (course) => course.ttft_ms, milliseconds],
  ["ITL, mean", (model) => known(model.rates.itl_seconds), (course) => course.itl_ms, milliseconds],
];

function drawing(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function makeTile([label, , , textOf]) {
  const tile = element("div", { class: "tile" }, element("div", { class: "muted" }, label), element("div", { class: "value" }), element("div", { class: "muted note" }));
  if (textOf) {
    const chart = drawing("svg", { viewBox: "0 0 120 30", preserveAspectRatio: "none", role: "img" });
    chart.append(drawing("path", { class: "area" }), drawing("path", { class: "line" }));
    tile.append(chart);
  }
  return tile;
}

/** Outlines of a chart: runs of points without `null`, the newest at the right edge, the highest at the top. */
function outlines(values, highest, point_seconds) {
  const points = (MINUTES * 60) / point_seconds;
  const at = (value, n) => [(120 * (points - values.length + n + 0.5)) / points, 29 - 28 * (highest > 0 ? value / highest : 0)].map((part) => part.toFixed(2)).join(" ");
  const runs = [];
  values.forEach((value, n) => {
    if (value === null) return;
    if (n === 0 || values[n - 1] === null) runs.push([]);
    runs[runs.length - 1].push(at(value, n));
  });
  // A single point is a short line.
  return runs.map((run) => (run.length === 1 ? [run[0], run[0].replace(/^\S+/, (x) => (Number(x) + 0.8).toFixed(2))] : run));
}

function showTiles(section, model) {
  const { course } = model;
  const tiles = section.querySelector(".tiles");
  tiles.hidden = model.role === "prefill";
  keyed(tiles, TILES, ([label]) => label, makeTile, (tile, [label, valueOf, valuesOf, textOf]) => {
    setText(tile.children[1], valueOf(model));
    if (!textOf) {
      const busy = model.ranks.filter((rank) => rank.active_requests > 0).length;
      return setText(tile.children[2], activeOf(model) === 0 ? "idle" : `on ${busy} of ${model.ranks.length} ranks`);
    }
    const values = valuesOf(course).slice(0, -1);
    const highest = Math.max(0, ...values);
    const highestText = values.some((value) => value !== null) ? `${MINUTES} min: up to ${textOf(highest)}` : "";
    setText(tile.children[2], highestText);
    const chart = tile.children[3];
    chart.setAttribute("aria-label", `${label}, the last ${highestText}`);
    const runs = outlines(values, highest, course.point_seconds);
    const edges = runs.map((run) => [run[0].split(" ")[0], run[run.length - 1].split(" ")[0]]);
    chart.children[0].setAttribute("d", runs.map((run, n) => `M${edges[n][0]} 30L${run.join("L")}L${edges[n][1]} 30Z`).join(""));
    chart.children[1].setAttribute("d", runs.map((run) => `M${run.join("L")}`).join(""));
  });
}

// ---- ranks ----

const RANK_COLUMNS = [
  ["Rank", rankName],
  ["Requests", requests],
  ["Prefill left", prefill],
  ["KV blocks", blocks],
  ["Hits predicted / delivered", hits],
  ["KV events", events],
];

const idOf = (rank) => `${rank.worker}/${rank.rank}`;

function rankName(cell, rank) {
  if (!cell.firstChild) {
    cell.append(element("div", { class: "rank-name" }), element("div", { class: "muted" }), element("div"));
  }
  const [name, status, problems] = cell.children;
  name.className = `rank-name mark ${rank.level}`;
  name.title = `id ${idOf(rank)}`;
  setText(name, rank.name);
  setText(status, rank.status);
  problems.className = `problems level-text ${rank.level}`;
  setText(problems, rank.problems.join("; "));
}

/** A cell with two lines of text, the second one muted. */
function lines(cell, first, second = "") {
  if (!cell.firstChild) cell.append(element("div"), element("div", { class: "muted" }));
  setText(cell.children[0], first);
  setText(cell.children[1], second);
}

function requests(cell, rank) {
  const load = rank.engine;
  const known = (value, noun) => (value === null ? [] : [`${whole(value)} ${noun}`]);
  const counts = load ? [...known(load.running, "running"), ...known(load.waiting, "waiting")] : [];
  const age = load && load.age_seconds >= OLD_REPORT_S ? `, ${seconds(load.age_seconds)} ago` : "";
  lines(cell, `${whole(rank.active_requests)} booked`, counts.length ? `${counts.join(", ")}${age}` : "no engine report");
  Object.assign(cell.dataset, { requests: rank.active_requests, running: load?.running ?? "", waiting: load?.waiting ?? "" });
}

function prefill(cell, rank) {
  lines(cell, seconds(rank.prefill_wait_seconds), `${whole(rank.prefill_tokens)} tokens`);
}

/** Booked blocks above, and the use of the cache as reported by the engine below, with a bar for each. */
function blocks(cell, rank) {
  const bar = () => element("div", { class: "bar", "aria-hidden": "true" }, element("span"));
  if (!cell.firstChild) cell.append(element("div"), element("div", { class: "muted" }), element("div", { class: "bars" }, bar(), bar()));
  const [booked, reported, bars] = cell.children;
  const usage = rank.engine?.kv_usage ?? null;
  const parts = [rank.total_blocks ? rank.active_blocks / rank.total_blocks : null, usage];
  setText(booked, rank.total_blocks ? `${whole(rank.active_blocks)} of ${whole(rank.total_blocks)} booked` : `${whole(rank.active_blocks)} booked`);
  setText(reported, usage === null ? "" : `engine uses ${share(usage)}`);
  parts.forEach((part, n) => {
    bars.children[n].hidden = part === null;
    if (part !== null) bars.children[n].firstChild.style.setProperty("--share", `${Math.min(100, part * 100)}%`);
  });
  Object.assign(cell.dataset, { blocks: rank.active_blocks, held: rank.held_blocks });
}

const hitShares = (known) =>
  [known.predicted_tokens, known.delivered_tokens].map((tokens) => share(tokens / known.prompt_tokens));

function hits(cell, rank) {
  const indexed = `${whole(rank.held_blocks)} blocks indexed`;
  cell.dataset.placements = rank.hits.placements;
  if (rank.hits.prompt_tokens === 0) return lines(cell, "–", indexed);
  const [predicted, delivered] = hitShares(rank.hits);
  lines(cell, `${predicted} / ${delivered}`, indexed);
}

function events(cell, rank) {
  const stream = rank.events;
  if (!stream) return lines(cell, "none");
  const state = stream.is_connected ? stream.state : "not connected";
  const age = stream.message_age_seconds === null ? "no message" : `last ${seconds(stream.message_age_seconds)} ago`;
  lines(cell, state, age);
  cell.dataset.state = state;
}

function showRanks(section, model) {
  const filter = $("filter").value.trim().toLowerCase();
  const matches = (rank) => `${rank.name} ${idOf(rank)} ${rank.endpoint} ${rank.status} ${rank.problems.join(" ")}`.toLowerCase().includes(filter);
  const ranks = model.ranks.filter(matches);
  const hidden = model.ranks_registered - ranks.length;
  const body = section.querySelector(".ranks tbody");
  keyed(body, ranks, idOf, makeRow(RANK_COLUMNS), (row, rank) => {
    RANK_COLUMNS.forEach(([, show], column) => show(row.children[column], rank));
  });
  setText(section.querySelector(".ranks-hidden"), hidden > 0 ? `${whole(hidden)} further ${hidden === 1 ? "rank" : "ranks"}, with less trouble or another name.` : "");
}

const makeRow = (columns) => () => element("tr", {}, ...columns.map(([label]) => element("td", { "data-label": label })));

// ---- small tables ----

/** Shows rows of text below a heading; hides both without rows. */
function table(section, name, rows) {
  const part = section.querySelector(`[data-part="${name}"]`);
  part.hidden = rows.length === 0;
  keyed(part.querySelector("tbody"), rows, (row) => row[0], (row) => element("tr", {}, ...row.map(() => element("td"))), (line, row) => {
    row.forEach((text, column) => setText(line.children[column], text));
  });
}

// ---- decisions ----

const DECISION_COLUMNS = [
  ["Request", decisionRequest],
  ["Prompt tokens", (cell, known) => (known.no_tokens === null ? lines(cell, whole(known.prompt_tokens), `${whole(known.cached_tokens)} cached`) : lines(cell, "unknown", `no tokens: ${known.no_tokens}`))],
  ["Chosen", decisionRank],
  ["Predicted TTFT", (cell, known) => lines(cell, known.predicted_ttft_seconds === null ? "–" : milliseconds(known.predicted_ttft_seconds * 1000))],
];

function decisionRank(cell, known) {
  lines(cell, known.chosen ?? "none", known.rejection ?? "");
  if (known.chosen_id !== null) cell.title = `id ${known.chosen_id}`;
}

function decisionRequest(cell, known) {
  if (!cell.firstChild) {
    const button = element("button", { type: "button", class: "link", "aria-haspopup": "dialog" });
    button.addEventListener("click", () => showRecord(known.request_id));
    cell.append(button, element("div", { class: "muted" }));
  }
  setText(cell.children[0], known.request_id);
  setText(cell.children[1], `${seconds(known.age_seconds)} ago`);
}

function showDecisions(section, decisions) {
  const part = section.querySelector('[data-part="decisions"]');
  part.hidden = decisions.length === 0;
  keyed(part.querySelector("tbody"), decisions, (known) => String(known.number), makeRow(DECISION_COLUMNS), (row, known) => {
    DECISION_COLUMNS.forEach(([, show], column) => show(row.children[column], known));
  });
}

const RECORD_COLUMNS = ["Rank", "Cost", "Cached tokens", "Prefill tokens", "Requests", "Excluded by"];

/** A cost with its unit. */
function cost(value, policy) {
  if (policy === "latency") return milliseconds(value * 1000);
  return policy === "kv" ? `${value.toPrecision(4)} blocks` : value.toPrecision(4);
}

/** Rows of the candidate table, the lowest cost first. */
function recordRows({ policy, chosen, explanation }) {
  const candidates = [...explanation.ranks];
  candidates.sort((a, b) => Boolean(a.excluded_by) - Boolean(b.excluded_by) || a.cost_max - b.cost_max);
  return candidates.map((row) => {
    const [least, most] = [row.cost_min, row.cost_max].map((value) => cost(value, policy));
    const costs = row.exact || least === most ? most : `${least} to ${most}`;
    const cells = [row.rank.name, row.excluded_by ? "–" : costs, whole(row.cached_tokens), whole(row.prefill_tokens), whole(row.active_requests), row.excluded_by ?? ""];
    const is_chosen = chosen !== null && idOf(row.rank) === idOf(chosen);
    const made = element("tr", { class: is_chosen ? "chosen" : "" }, ...cells.map((text, n) => element("td", { "data-label": RECORD_COLUMNS[n] }, element("span", {}, text))));
    made.firstChild.title = `id ${idOf(row.rank)}`;
    return made;
  });
}

/** Shows the recorded candidate tables of a request, one per attempt. */
async function showRecord(id) {
  setText($("record-title"), `Decision for ${id}`);
  setText($("record-summary"), "Loading");
  $("record-table").replaceChildren();
  $("record").showModal();
  try {
    const response = await request(`decisions/${encodeURIComponent(id)}`);
    const answer = await response.json();
    if (!response.ok) return setText($("record-summary"), answer.error.message);
    const { decisions } = answer;
    const last = decisions[decisions.length - 1];
    const margin = last.margin === null ? "" : `, ${cost(Math.abs(last.margin), last.policy)} ${last.margin < 0 ? "dearer" : "cheaper"} than the runner-up ${last.runner_up.name}`;
    const attempts = decisions.length > 1 ? `, last of ${decisions.length} attempts` : "";
    setText($("record-summary"), `Model ${last.model}, policy ${last.policy}, ${whole(last.prompt_tokens)} prompt tokens${attempts}${margin}. The table as it was then.`);
    const head = element("tr", {}, ...RECORD_COLUMNS.map((column) => element("th", { scope: "col" }, column)));
    $("record-table").replaceChildren(element("thead", {}, head), element("tbody", {}, ...recordRows(last)));
  } catch {
    setText($("record-summary"), "The gateway does not respond.");
  }
}

function part(name, title, columns) {
  const head = element("tr", {}, ...columns.map((column) => element("th", { scope: "col" }, column)));
  return element("section", { "data-part": name, "aria-label": title }, element("h3", {}, title), element("table", {}, element("thead", {}, head), element("tbody")));
}

// ---- models ----

function makeModel(model) {
  const head = element("tr", {}, ...RANK_COLUMNS.map(([label]) => element("th", { scope: "col" }, label)));
  const ranks = element("table", { class: "wide" }, element("caption", { hidden: "" }, `Ranks of ${model.name}`), element("thead", {}, head), element("tbody"));
  const decisionHead = element("tr", {}, ...DECISION_COLUMNS.map(([label]) => element("th", { scope: "col" }, label)));
  const decisions = element("table", { class: "wide" }, element("thead", {}, decisionHead), element("tbody"));
  return element(
    "section",
    { class: "model", "aria-label": `Model ${model.name}` },
    element("h2", {}, model.name),
    element("p", { class: "facts" }),
    element("p", { class: "state" }),
    element("div", { class: "tiles" }),
    element("div", { class: "ranks" }, ranks, element("p", { class: "ranks-hidden muted" })),
    element("section", { "data-part": "decisions", "aria-label": "Last decisions" }, element("h3", {}, "Last decisions"), decisions),
    element(
      "div",
      { class: "columns" },
      part("shadows", "Saved by the policy", ["Instead of", "Tokens so far, about", "In samples", "Same rank", "Mean TTFT"]),
      part("queue", "Queue", ["Class", "Requests", "Tokens", "Oldest"]),
      part("replicas", "Other replicas", ["Replica", "State", "Last summary", "Weight"]),
      part("legs", "Prefills", ["Place", "Requests"]),
      part("pairs", "Prefill and decode ranks", ["Prefill → decode", "Requests"]),
    ),
  );
}

function showModel(section, model, isOnly) {
  const [heading, facts, state] = section.children;
  heading.className = `mark ${model.level}`;
  const role = model.role === "aggregated" ? "" : `${model.role}, `;
  const serving = `${model.ranks_eligible} of ${model.ranks_registered} ranks can serve`;
  const period = model.hits.seconds === null ? "since the start" : `in the last ${seconds(model.hits.seconds)}`;
  const [predicted, delivered] = hitShares(model.hits);
  const cached = model.hits.prompt_tokens > 0 ? `, hits ${period}: ${predicted} of prompt tokens predicted, ${delivered} delivered` : "";
  setText(facts, `${serving}, ${role}policy ${model.policy}, blocks of ${model.block_size} tokens, ${whole(model.leases)} bookings and waiting requests${cached}`);
  showTiles(section, model);
  state.hidden = isOnly;
  setText(state, model.sentence);
  showRanks(section, model);
  showDecisions(section, model.decisions);
  const age = (value) => (value === null ? "–" : seconds(value));
  const ttft = (row) => (row.ttft_seconds === null ? "–" : `${row.chosen_ttft_seconds.toFixed(3)} s, not ${row.ttft_seconds.toFixed(3)} s`);
  table(section, "shadows", model.shadows.map((row) => [row.policy, whole(row.saved_tokens_estimate), whole(row.saved_tokens), `${share(row.agreements / row.decisions)} of ${whole(row.decisions)}`, ttft(row)]));
  table(section, "queue", model.queue.map((row) => [row.class, whole(row.requests), whole(row.tokens), age(row.oldest_age_seconds)]));
  table(section, "replicas", model.replicas.map((row) => [row.replica, row.state, `${seconds(row.summary_age_seconds)} ago`, row.weight.toFixed(2)]));
  table(section, "legs", (model.legs?.results ?? []).map((row) => [row.result, whole(row.requests)]));
  table(section, "pairs", (model.legs?.pairs ?? []).map((row) => [`${row.prefill} → ${row.decode}`, whole(row.requests)]));
}

function show(snapshot) {
  const sentence = $("sentence");
  sentence.className = `mark ${snapshot.level}`;
  sentence.hidden = false;
  setText(sentence, snapshot.sentence);
  document.body.dataset.number = snapshot.number;
  const isOnly = snapshot.models.length === 1;
  keyed($("models"), snapshot.models, (model) => model.name, makeModel, (section, model) => showModel(section, model, isOnly));
}

// ---- connection ----

function showConnection() {
  const age = performance.now() - receivedAt;
  const isCurrent = newest !== null && age < STALE_MS;
  const status = $("connection");
  status.className = isCurrent || !token ? "" : "lost";
  let text = "Not connected";
  if (isCurrent) text = `Live, version ${newest.version}`;
  else if (newest !== null) text = `No connection since ${seconds(age / 1000)}`;
  setText(status, text);
}

/** Passes each server-sent event of a response to `receive`, until the stream ends. */
async function readEvents(response, receive) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const whole = text.split("\n\n");
    text = whole.pop();
    for (const event of whole) {
      const data = event.split("\n").find((line) => line.startsWith("data: "));
      if (data) receive(JSON.parse(data.slice("data: ".length)));
    }
  }
}

function request(path, signal) {
  return fetch(path, { headers: { Authorization: `Bearer ${token}` }, cache: "no-store", signal });
}

let connection = null;

async function connect() {
  connection?.abort();
  connection = new AbortController();
  const { signal } = connection;
  while (!signal.aborted) {
    try {
      const response = await request("live", signal);
      if (response.status === 401) return askForToken("The gateway does not accept this token.");
      if (response.ok) {
        await readEvents(response, (snapshot) => {
          newest = snapshot;
          receivedAt = performance.now();
          show(snapshot);
          showConnection();
        });
      }
    } catch {
      // The gateway ended or restarts.
    }
    if (!signal.aborted) await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function askForToken(problem) {
  connection?.abort();
  sessionStorage.removeItem(TOKEN_KEY);
  token = null;
  newest = null;
  setText($("login-error"), problem);
  showPage();
  $("token").focus();
}

function showPage() {
  const isConnected = token !== null;
  $("login").hidden = isConnected;
  $("filter-field").hidden = !isConnected;
  $("logout").hidden = !isConnected;
  if (!isConnected) {
    $("models").replaceChildren();
    $("sentence").hidden = true;
  }
  showConnection();
}

// ---- input ----

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  $("token").value = "";
  setText($("login-error"), "");
  sessionStorage.setItem(TOKEN_KEY, token);
  showPage();
  connect();
});

$("logout").addEventListener("click", () => askForToken(""));

// The fragment holds the filter, so that a link shows the same ranks.
$("filter").value = decodeURIComponent(location.hash.slice(1));
$("filter").addEventListener("input", () => {
  history.replaceState(null, "", `#${encodeURIComponent($("filter").value)}`);
  if (newest) show(newest);
});

document.addEventListener("keydown", (event) => {
  const isTyping = event.target instanceof HTMLInputElement;
  if (event.key === "/" && !isTyping && token !== null) {
    event.preventDefault();
    $("filter").focus();
  } else if (event.key === "Escape" && event.target === $("filter")) {
    $("filter").value = "";
    $("filter").dispatchEvent(new Event("input"));
    $("filter").blur();
  }
});

setInterval(showConnection, 500);
showPage();
if (token !== null) connect();
else $("token").focus();
