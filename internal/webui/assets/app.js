// The page of a router: what /ui/events tells, drawn; and a chat. Everything that comes from outside is put in as text, never as
// markup: model output and client ids are hostile.
"use strict";

const $ = (id) => document.getElementById(id);
const KEY = "baton.key";

// el makes an element. Children are nodes or text.
function el(tag, cls, ...children) {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  for (const c of children) if (c !== null && c !== undefined) e.append(c instanceof Node ? c : String(c));
  return e;
}

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return Object.assign(key ? { Authorization: "Bearer " + key } : {}, more);
}

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

// --- numbers for people ---

function span(ms) {
  if (ms === undefined || ms === null) return "–";
  if (ms < 10) return ms.toFixed(1) + " ms";
  if (ms < 1000) return Math.round(ms) + " ms";
  if (ms < 60000) return (ms / 1000).toFixed(ms < 10000 ? 2 : 1) + " s";
  return Math.floor(ms / 60000) + " min " + Math.round((ms % 60000) / 1000) + " s";
}

const clock = (ms) => new Date(ms).toLocaleTimeString([], { hour12: false });

// --- the stream of states ---

// events calls f with the name and data of each server-sent event of a response's body.
async function events(body, f) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    let end;
    while ((end = rest.search(/\r?\n\r?\n/)) >= 0) {
      const block = rest.slice(0, end);
      rest = rest.slice(end).replace(/^\r?\n\r?\n/, "");
      let name = "message";
      const data = [];
      for (const line of block.split(/\r?\n/)) {
        if (line.startsWith("event:")) name = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      }
      if (data.length && f(name, data.join("\n")) === false) return;
    }
  }
}

const requests = new Map(); // id: { data, node, key }
const MOST = 320;
let show = "all";
let paused = false;
let keyGiven = null;

async function follow() {
  for (let wait = 500; ; wait = Math.min(wait * 2, 5000)) {
    try {
      const r = await fetch("/ui/events", { headers: headers(), cache: "no-store" });
      if (r.status === 401 || r.status === 403) {
        await askForKey(sessionStorage.getItem(KEY) ? (r.status === 401 ? "The router does not know this key." : "This key may not see the page.") : "");
        wait = 500;
        continue;
      }
      if (!r.ok) throw new Error("status " + r.status);
      $("ask").hidden = true;
      $("main").hidden = false;
      $("forget").hidden = !sessionStorage.getItem(KEY);
      link("on", "live");
      wait = 250;
      await events(r.body, (name, data) => {
        if (name === "state") draw(JSON.parse(data));
      });
    } catch (err) {
      // The router is gone, or restarts: try again.
    }
    link("off", "no connection");
    await sleep(wait);
  }
}

function link(cls, text) {
  const l = $("link");
  if (l.className !== "link " + cls) l.className = "link " + cls;
  if (l.textContent !== text) l.textContent = text;
}

function askForKey(why) {
  link("off", "key needed");
  $("main").hidden = true;
  $("ask").hidden = false;
  $("askwhy").textContent = why;
  $("key").focus();
  return new Promise((done) => { keyGiven = done; });
}

// --- drawing ---

let epoch = null; // of the router that the rows are from

let held = null; // what came while the page was paused: the latest state, with every request that changed

function draw(s) {
  if (paused) {
    const all = held ? held.all : new Map();
    for (const r of s.requests || []) all.set(r.id, r);
    held = { s, all };
    return;
  }
  if (s.started !== epoch) { // another router, or the same one anew
    epoch = s.started;
    requests.clear();
    $("requests").replaceChildren();
    loadModels();
  }
  drawFacts(s);
  for (const id of ["h-workers", "h-phases"]) $(id).parentElement.hidden = !s.operator;
  if (s.operator) {
    keyed($("workers"), s.workers || [], (w) => w.id, drawWorker);
    drawPhases(s.phases);
  }
  for (const r of s.requests || []) drawRequest(r);
  while (requests.size > MOST) {
    const oldest = Math.min(...requests.keys());
    requests.get(oldest).node.remove();
    requests.delete(oldest);
  }
  $("none").hidden = requests.size > 0;
}

function drawFacts(s) {
  const facts = [["in flight", s.inflight], ["queued", s.queued], ["version", s.version || "–"]];
  if (s.operator) facts.splice(2, 0, ["policy", s.policy]);
  keyed($("facts"), facts, (f) => f[0], (f) => el("div", "", el("dt", "", f[0]), el("dd", "", f[1])));
}

// keyed makes box show one node for each of list, in order; nodes whose data is as before stay.
function keyed(box, list, keyOf, make) {
  const old = new Map([...box.children].map((n) => [n.dataset.key, n]));
  let at = 0;
  for (const item of list) {
    const key = String(keyOf(item)), text = JSON.stringify(item);
    let n = old.get(key);
    old.delete(key);
    if (!n || n.dataset.text !== text) {
      const fresh = make(item);
      fresh.dataset.key = key;
      fresh.dataset.text = text;
      if (n) n.replaceWith(fresh);
      n = fresh;
    }
    if (box.children[at] !== n) box.insertBefore(n, box.children[at] || null);
    at++;
  }
  for (const n of old.values()) n.remove();
}

function meter(name, used, quarantine, total, text) {
  const fill = el("span", "fill"), q = el("span", "fill q");
  fill.style.width = total ? (100 * used) / total + "%" : "0";
  q.style.width = total ? (100 * quarantine) / total + "%" : "0";
  return el("div", "meter", el("span", "", name), el("span", "track", fill, q), el("span", "", text));
}

function drawWorker(w) {
  const state = w.state === "out" ? "out" : w.ejected ? "ejected" : w.draining ? "draining" : w.state;
  const c = el("article", "card worker " + state);
  const chips = el("span", "", el("span", "chip " + state, state === "ejected" ? "ejected " + Math.ceil(w.ejected) + " s" : state));
  c.append(el("div", "top", el("span", "name", w.name), chips));
  c.append(el("div", "dim", w.leg + " · " + (w.kind || "kind not known") + " · " + w.inflight + " in flight"));
  if (w.reason && state === "out") c.append(el("div", "why", w.reason));
  if (w.pages_total) {
    const used = w.pages_total - w.pages_free - w.pages_quarantine;
    c.append(meter("pages", used, w.pages_quarantine, w.pages_total,
      used + (w.pages_quarantine ? " + " + w.pages_quarantine + " held" : "") + " / " + w.pages_total));
  }
  if (w.cells_total) c.append(meter("cells", w.cells_used, 0, w.cells_total, w.cells_used + " / " + w.cells_total));
  return c;
}

const GROUPS = [
  ["router", ["queued", "waiting", "streaming"]],
  ["prefill", ["bootstrapping", "waiting", "prefilling", "transferring"]],
  ["decode", ["prealloc", "bootstrapping", "transferring", "decoding", "preempted"]],
];

function drawPhases(all) {
  keyed($("phases"), GROUPS.map(([leg, names]) => [leg, names.map((n) => [n, ((all || {})[leg] || {})[n] || 0])]), (g) => g[0], ([leg, cells]) => {
    const row = el("div", "cells");
    for (const [name, n] of cells) {
      const c = el("div", n ? "cell some" : "cell", el("b", "", n), el("span", "", name.replace("strapping", "\u00adstrapping").replace("ferring", "\u00adferring")));
      c.title = n + " " + name + " (" + leg + ")";
      row.append(c);
    }
    return el("div", "card group", el("span", "", leg), row);
  });
}

const KINDS = [
  ["queue", "queued"], ["wait", "waits for the other side or memory"], ["chunk", "prompt, by chunks"],
  ["transfer", "KV travels"], ["first", "first token"], ["decode", "tokens"],
];

function drawLegend() {
  for (const [kind, words] of KINDS) $("legend").append(el("li", "", el("i", kind), words));
  const t = el("i", "");
  t.style.background = "var(--text)";
  t.style.width = "2px";
  $("legend").append(el("li", "", t, "a chunk has landed"));
}

const failed = (r) => r.outcome === "error" || r.outcome === "stream_error";

function visible(r) {
  return show === "all" || (show === "live" ? !r.outcome : failed(r));
}

function drawRequest(r) {
  const known = requests.get(r.id);
  const open = known ? known.open : false;
  const node = requestNode(r, open);
  node.hidden = !visible(r);
  if (known) {
    const focus = known.node.contains(document.activeElement);
    if (known.node.classList.contains("flash")) node.classList.add("flash");
    known.node.replaceWith(node);
    if (focus) node.querySelector("button").focus({ preventScroll: true });
  } else {
    // Newest first. Ids grow, so a new one nearly always goes to the top.
    let before = $("requests").firstChild;
    while (before && Number(before.dataset.id) > r.id) before = before.nextSibling;
    $("requests").insertBefore(node, before);
  }
  requests.set(r.id, { data: r, node, open });
}

function requestNode(r, open) {
  const node = el("article", "card req" + (failed(r) ? " failed" : ""));
  node.dataset.id = r.id;
  const cls = !r.outcome ? "warn" : r.outcome === "ok" ? "ok" : failed(r) ? "bad" : "";
  const last = r.attempts[r.attempts.length - 1];
  const way = last ? (last.prefill ? last.prefill + " → " : "") + last.decode : r.path;
  const what = el("span", "what", el("span", "chip " + cls, r.outcome ? r.outcome.replace("_", " ") : r.phase), el("span", "way", way));
  if (r.attempts.length > 1) what.append(el("span", "chip warn", r.attempts.length + " attempts"));
  what.append(el("span", "id", r.request_id || r.rid || ""));
  const nums = el("span", "nums");
  const count = r.tokens || r.worker_tokens;
  if (count) nums.append(el("b", "", count), " tokens · ");
  if (r.first_token_ms !== undefined) nums.append("first ", el("b", "", span(r.first_token_ms)), " · ");
  nums.append(el("b", "", span(r.total_ms)), " · " + clock(r.start_ms));
  const b = el("button", "", what, nums);
  b.type = "button";
  b.setAttribute("aria-expanded", String(open));
  b.addEventListener("click", () => {
    const known = requests.get(r.id);
    known.open = !known.open;
    drawRequest(known.data);
    const kept = requests.get(r.id);
    kept.node.querySelector("button").focus({ preventScroll: true });
  });
  if (r.cause) b.append(el("span", "cause", causeText(r.cause)));
  node.append(b, lanes(r, open));
  if (open) node.append(details(r));
  return node;
}

function causeText(c) {
  const where = [c.side, c.worker, c.phase].filter(Boolean).join(" · ");
  return c.code + (where ? " (" + where + ")" : "") + (c.detail ? ": " + c.detail : "");
}

function lanes(r, open) {
  const box = el("div", open ? "lanes wide" : "lanes");
  const whole = Math.max(r.total_ms, 0.001);
  let attempt = 0;
  for (const l of r.lanes) {
    if (l.leg === "router" && !l.bars) continue;
    if (l.attempt !== attempt) {
      attempt = l.attempt;
      const before = r.attempts[attempt - 1];
      box.append(el("div", "again", "attempt " + (attempt + 1) + (before && before.cause ? ", after " + causeText(before.cause) : "")));
    }
    const rail = el("div", "rail");
    const place = (i, from, to) => {
      i.style.left = Math.min((100 * from) / whole, 100) + "%";
      if (to !== null) i.style.width = Math.max((100 * (Math.min(to, whole) - from)) / whole, 0) + "%";
      rail.append(i);
    };
    for (const b of l.bars || []) {
      const i = el("i", b.kind + (b.open ? " open" : ""));
      i.title = b.kind + ": " + span(b.to - b.from) + (b.open ? " so far" : "") + ", from " + span(b.from);
      place(i, b.from, b.to);
    }
    for (const t of l.ticks || []) place(el("i", "tick"), t, null);
    const who = el("span", "who", open && l.worker ? l.leg + " " + l.worker : l.leg);
    who.title = l.leg + (l.worker ? " " + l.worker : "");
    box.append(el("div", "lane" + (l.failed ? " failed" : ""), who, rail));
  }
  return box;
}

function details(r) {
  const box = el("div", ""), list = el("dl", "more");
  const axis = el("div", "axis");
  for (const part of [0, 0.25, 0.5, 0.75, 1]) axis.append(el("span", "", span(r.total_ms * part)));
  const add = (name, v) => { if (v !== undefined && v !== null && v !== "") list.append(el("dt", "", name), el("dd", "", v)); };
  add("request", r.request_id);
  add("rid", r.rid);
  add("asked for", r.path + (r.model ? ", model " + r.model : "") + (r.stream ? ", streamed" : "") + (r.choices > 1 ? ", " + r.choices + " answers" : ""));
  add("key", r.key);
  add("status", r.status || undefined);
  add("queue", span(r.queue_ms));
  add("first byte", r.first_byte_ms === undefined ? undefined : span(r.first_byte_ms));
  add("tokens", r.prompt_tokens ? r.prompt_tokens + " prompt, " + (r.tokens || r.worker_tokens || 0) + " answer" : undefined);
  r.attempts.forEach((a, i) => {
    const n = r.attempts.length > 1 ? " " + (i + 1) : "";
    add("room" + n, a.room);
    add("pair" + n, (a.prefill || "–") + " → " + a.decode + (a.kind ? " (" + a.kind + ")" : ""));
    if (a.at) add("where" + n, a.at);
    if (a.cause) add("cause" + n, causeText(a.cause));
  });
  box.append(axis, list);
  return box;
}

function choose(which) {
  show = which;
  for (const b of document.querySelectorAll("[data-show]")) b.setAttribute("aria-pressed", String(b.dataset.show === which));
  for (const k of requests.values()) k.node.hidden = !visible(k.data);
}

// --- chat ---

const HINT = "Answers stream through this router. Stop ends the request at both its workers.";
const talk = []; // messages so far
let running = null; // AbortController

async function loadModels() {
  try {
    const r = await fetch("/v1/models", { headers: headers() });
    if (!r.ok) throw new Error("status " + r.status);
    const list = await r.json();
    $("model").replaceChildren(...(list.data || []).map((m) => { const o = el("option", "", m.id); o.value = m.id; return o; }));
  } catch (err) {
    $("model").replaceChildren(el("option", "", ""));
  }
}

function turn(who, text) {
  const t = el("div", "turn " + who, text);
  $("talk").append(t);
  $("talk").scrollTop = $("talk").scrollHeight;
  return t;
}

async function send() {
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  if (!talk.length) $("talk").replaceChildren();
  talk.push({ role: "user", content: text });
  turn("user", text);
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  const answer = turn("assistant", "");
  const began = performance.now();
  let first = null, events_ = 0, tokens = 0, said = "", id = "", ended = "";
  try {
    const body = { messages: talk, stream: true, stream_options: { include_usage: true }, max_tokens: Number($("max").value) || 256 };
    if ($("model").value) body.model = $("model").value;
    const r = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body), signal: running.signal,
    });
    id = r.headers.get("X-Request-Id") || "";
    if (!r.ok) throw await refusal(r);
    await events(r.body, (name, data) => {
      if (data === "[DONE]") { ended = ended || "end"; return false; }
      const m = JSON.parse(data);
      if (m.error) throw new Error(errorText(m.error));
      if (m.usage) tokens = m.usage.completion_tokens;
      const c = (m.choices || [])[0];
      if (!c) return true;
      const piece = (c.delta && (c.delta.content || c.delta.reasoning_content)) || "";
      if (piece) {
        events_++;
        if (first === null) first = performance.now() - began;
        said += piece;
        answer.append(piece);
        $("talk").scrollTop = $("talk").scrollHeight;
      }
      if (c.finish_reason) ended = c.finish_reason;
      return true;
    });
    if (!ended) throw new Error("the stream ended without a finish");
  } catch (err) {
    if (err.name === "AbortError") ended = "stopped";
    else {
      ended = "failed";
      turn("error", err.message);
    }
  }
  if (said) talk.push({ role: "assistant", content: said });
  else {
    answer.remove();
    talk.pop(); // an unanswered question would make the next one malformed for strict templates
  }
  const took = performance.now() - began;
  const n = tokens || events_;
  const note = el("button", "note", ended + (first === null ? "" : " · first token " + span(first)) + (n ? " · " + n + " tokens" : "") +
    (n > 1 && took > first ? " · " + ((n - 1) / ((took - first) / 1000)).toFixed(0) + " / s" : "") + " · show its way");
  note.type = "button";
  note.addEventListener("click", () => find(id));
  $("talk").append(note);
  $("talk").scrollTop = $("talk").scrollHeight;
  running = null;
  $("send").disabled = false;
  $("stop").disabled = true;
  $("text").focus();
}

function errorText(e) {
  const where = [e.side, e.peer, e.phase].filter(Boolean).join(" · ");
  return (e.cause || e.code || "error") + (where ? " (" + where + ")" : "") + ": " + e.message + (e.room ? "\nroom " + e.room : "");
}

async function refusal(r) {
  let text = "";
  try {
    text = await r.text();
    const e = JSON.parse(text).error;
    if (e && e.message) return new Error(errorText(e));
  } catch (err) {
    // Not an error object: the text says what there is.
  }
  return new Error("status " + r.status + " " + text.slice(0, 500));
}

// find opens the timeline of a request.
function find(id) {
  for (const k of requests.values()) {
    if (!id || k.data.request_id !== id) continue;
    choose("all");
    k.open = true;
    drawRequest(k.data);
    const n = requests.get(k.data.id).node;
    n.classList.add("flash");
    n.scrollIntoView({ block: "center", behavior: "smooth" });
    setTimeout(() => { const now = requests.get(k.data.id); if (now) now.node.classList.remove("flash"); }, 1500);
    return;
  }
}

// --- wiring ---

$("ask").addEventListener("submit", (e) => {
  e.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  if (keyGiven) keyGiven();
});
$("forget").addEventListener("click", () => { sessionStorage.removeItem(KEY); location.reload(); });
for (const b of document.querySelectorAll("[data-show]")) b.addEventListener("click", () => choose(b.dataset.show));
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  if (!paused && held) {
    const h = held;
    held = null;
    draw(Object.assign({}, h.s, { requests: [...h.all.values()] }));
  }
});
$("say").addEventListener("submit", (e) => { e.preventDefault(); send(); });
$("text").addEventListener("keydown", (e) => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); send(); }
});
$("stop").addEventListener("click", () => { if (running) running.abort(); });
$("clear").addEventListener("click", () => { if (!running) { talk.length = 0; $("talk").replaceChildren(el("p", "hint", HINT)); } });
$("talk").append(el("p", "hint", HINT));
drawLegend();
follow();
