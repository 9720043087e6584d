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

// ---- ranks ----

const RANK_COLUMNS = [
  ["Rank", rankName],
  ["Requests", requests],
  ["Prefill left", prefill],
  ["KV blocks", blocks],
  ["Hits predicted / delivered", hits],
  ["KV events", events],
];

const nameOf = (rank) => `${rank.worker}/${rank.rank}`;

function rankName(cell, rank) {
  if (!cell.firstChild) {
    cell.append(element("div", { class: "rank-name" }), element("div", { class: "endpoint" }), element("div"));
  }
  const [name, endpoint, problems] = cell.children;
  name.className = `rank-name mark ${rank.level}`;
  setText(name, `${nameOf(rank)} ${rank.status}`);
  setText(endpoint, rank.endpoint);
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
  const matches = (rank) => `${nameOf(rank)} ${rank.endpoint} ${rank.status} ${rank.problems.join(" ")}`.toLowerCase().includes(filter);
  const ranks = model.ranks.filter(matches);
  const hidden = model.ranks_registered - ranks.length;
  const body = section.querySelector(".ranks tbody");
  keyed(body, ranks, nameOf, makeRow(RANK_COLUMNS), (row, rank) => {
    RANK_COLUMNS.forEach(([, show], column) => show(row.children[column], rank));
  });
  setText(section.querySelector(".ranks-hidden"), hidden > 0 ? `${whole(hidden)} further ranks, with less trouble or another name.` : "");
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
  ["Prompt tokens", (cell, known) => lines(cell, whole(known.prompt_tokens), `${whole(known.cached_tokens)} cached`)],
  ["Chosen", (cell, known) => lines(cell, known.chosen ?? "none", known.rejection ?? "")],
  ["Runner-up", (cell, known) => lines(cell, known.runner_up ?? "–", known.margin === null ? "" : `margin ${known.margin.toPrecision(3)}`)],
];

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

/** Rows of the candidate table, the lowest cost first. */
function recordRows(decision) {
  const ofRank = (rank) => `${rank.worker}/${rank.rank}`;
  const chosen = decision.chosen && ofRank(decision.chosen);
  const candidates = decision.explanation.ranks.map((row) => ({ ...row, name: ofRank(row.rank) }));
  candidates.sort((a, b) => Boolean(a.excluded_by) - Boolean(b.excluded_by) || a.cost_max - b.cost_max);
  return candidates.map((row) => {
    const cost = row.exact || row.cost_min === row.cost_max ? row.cost_max.toPrecision(4) : `${row.cost_min.toPrecision(4)} to ${row.cost_max.toPrecision(4)}`;
    const cells = [row.name, row.excluded_by ? "–" : cost, whole(row.cached_tokens), whole(row.prefill_tokens), whole(row.active_requests), row.excluded_by ?? ""];
    return element("tr", { class: row.name === chosen ? "chosen" : "" }, ...cells.map((text) => element("td", {}, text)));
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
    const margin = last.margin === null ? "" : `, margin ${last.margin.toPrecision(3)} to the runner-up`;
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
