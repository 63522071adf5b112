// The token viewer: rows of the records, their tokens coloured by what happened to them. Text enters by textContent only.
(function () {
"use strict";

const data = JSON.parse(document.getElementById("report-data").textContent).tokens;
const root = document.getElementById("token-view");
if (!data || !root) return;

const WINDOW = 1500; // tokens in the document at a time
const ROWS = 30; // rows in the list at a time
const POLICY = 1, KEPT = 2, CUT = 4;
const UNKNOWN = 0xffff;
const decoded = new Map(); // row -> its numbers

function element(name, text, parent, kind) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (kind) made.className = kind;
  if (parent) parent.append(made);
  return made;
}

function bytes(text) {
  const binary = atob(text), made = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) made[i] = binary.charCodeAt(i);
  return made;
}

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, part = bits & 1023;
  if (exponent === 31) return part ? NaN : sign * Infinity;
  return sign * (exponent ? (1 + part / 1024) * 2 ** (exponent - 15) : part * 2 ** -24);
}

const halves = (value) => (typeof value === "string" ? Array.from(new Uint16Array(bytes(value).buffer), half) : value);
const at = (column, i) => (Array.isArray(column) ? column[i] : column);

function numbersOf(row) {
  if (!decoded.has(row)) {
    const made = { flags: bytes(row.flags), kinds: bytes(row.kinds), rollout: new Float32Array(bytes(row.rollout).buffer) };
    made.train = row.train ? new Float32Array(bytes(row.train).buffer) : null;
    made.ids = row.ids ? new Uint16Array(bytes(row.ids).buffer) : null;
    made.prompt = row.prompt ? new Uint16Array(bytes(row.prompt).buffer) : null;
    for (const name of ["weight", "advantage", "entropy", "noise", "age"]) made[name] = halves(row[name] ?? null);
    decoded.set(row, made);
  }
  return decoded.get(row);
}

function shown(value) {
  if (value === null || value === undefined) return "not recorded";
  if (typeof value === "string") return value;
  if (!Number.isFinite(value)) return String(value);
  if (value === Math.round(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  return Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

// ---- What a token is coloured by: a number, the number at which the colour is full, and what it means.

const logRatio = (n, i) => (n.train ? n.train[i] - n.rollout[i] : null);
function overNoise(n, i) {
  const noise = at(n.noise, i), l = logRatio(n, i);
  return l === null || !noise || !data.floor ? null : l / (noise * data.floor);
}
const COLOURINGS = {
  "log-ratio": [logRatio, 0.5, "orange: likelier for the trainer than for the engine; blue: less likely; full at 0.5 nats"],
  "log-ratio over expected noise": [overNoise, 6, "in multiples of what rounding gives such a token; full at 6: a wrong token, not a rare one"],
  "weight": [(n, i) => (n.weight === null ? null : at(n.weight, i) - 1), 1, "importance weight less 1; orange above, blue below"],
  "what happened": [(n, i) => (n.flags[i] & KEPT ? (n.flags[i] & CUT ? 1 : 0) : -1), 1, "struck out and blue: rejected; orange: weight truncated, or 0 by a band"],
  "advantage": [(n, i) => at(n.advantage, i), 2, "orange: to be made likelier; blue: less likely; full at 2"],
  "entropy": [(n, i) => at(n.entropy, i), 3, "of the trainer's distribution; full at 3 nats"],
  "age": [(n, i) => at(n.age, i), 4, "steps of training between the weights that sampled it and those that train on it; full at 4"],
  "probability": [(n, i) => 1 - Math.exp((n.train || n.rollout)[i]), 1, "the stronger, the less likely"],
};

function shade(value, full) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  const strength = Math.min(Math.abs(value) / full, 1) * 0.6;
  if (strength < 0.02) return "";
  return value > 0 ? `rgba(230, 120, 0, ${strength.toFixed(2)})` : `rgba(0, 114, 200, ${strength.toFixed(2)})`;
}

// The turn of a token of the policy, from 0.
function turnOf(row, i) {
  let end = -1;
  const flags = numbersOf(row).flags;
  for (let j = 0; j <= i; j++) if (flags[j] & POLICY && !(j && flags[j - 1] & POLICY)) end += 1;
  return end;
}

function turnsInWords(row) {
  const { tokens, rewards, waits } = row.turns;
  if (!rewards && tokens.length < 2) return "";
  let words = `; ${tokens.length} turn${tokens.length === 1 ? "" : "s"}`;
  if (rewards) words += `, rewards ${rewards.map(shown).join(", ")}`;
  if (waits) words += `, waited ${shown(waits.reduce((sum, wait) => sum + wait, 0))} s`;
  return words;
}

function pieceOf(ids, i, kinds) {
  if (!ids || ids[i] === UNKNOWN) return "▪";
  const text = data.pieces[ids[i]][1];
  return text === "" ? "▫" : text.slice(0, 200).replace(/\n/g, "⏎\n").replace(/\t/g, "⇥");
}

// ---- The list of rows.

const SORTS = {
  "as recorded": null,
  "gap": (row) => (typeof row.gap === "number" ? row.gap : Infinity),
  "length": (row) => row.length,
  "score": (row) => (typeof row.score === "number" ? row.score : -Infinity),
  "step": (row) => row.step,
  "rejected": (row) => rejectedShare(row),
  "turns": (row) => row.turns.tokens.length,
};

function rejectedShare(row) {
  const flags = bytes(row.flags);
  let policy = 0, rejected = 0;
  for (const flag of flags) {
    if (!(flag & POLICY)) continue;
    policy += 1;
    rejected += flag & KEPT ? 0 : 1;
  }
  return policy ? rejected / policy : 0;
}

const state = { sort: "as recorded", step: "all", colouring: "log-ratio", row: data.rows[0], from: 0, token: 0, rows: ROWS };

function choice(label, names, name, changed, parent) {
  const box = element("label", label + " ", parent), select = element("select", "", box);
  for (const text of names) element("option", text, select).value = text;
  select.value = state[name];
  select.addEventListener("change", () => {
    state[name] = select.value;
    changed();
  });
}

const controls = element("p", "", root, "controls");
choice("colour by", Object.keys(COLOURINGS), "colouring", drawRow, controls);
choice("sort rows by", Object.keys(SORTS), "sort", drawList, controls);
choice("step", ["all", ...[...new Set(data.rows.map((row) => String(row.step)))].sort((a, b) => a - b)], "step", drawList, controls);
const meaning = element("p", "", root, "about");
const heading = element("p", "", root);
const strip = element("canvas", "", root, "strip");
strip.setAttribute("role", "img");
strip.setAttribute("aria-label", "the whole row, one column a token");
const text = element("div", "", root, "token-text");
text.tabIndex = 0;
text.setAttribute("role", "group");
text.setAttribute("aria-label", "tokens; arrow keys move from one to the next");
const readout = element("p", "", root, "readout");
readout.setAttribute("aria-live", "polite");
const pager = element("p", "", root, "controls");
const list = element("div", "", root, "scroll");
list.tabIndex = 0;

function drawList() {
  const order = SORTS[state.sort];
  let rows = data.rows.filter((row) => state.step === "all" || String(row.step) === state.step);
  if (order) rows = [...rows].sort((a, b) => order(b) - order(a));
  list.replaceChildren();
  const table = element("table", "", list), head = element("tr", "", element("thead", "", table));
  for (const name of ["", "step", "row", "chosen", "source", "score", "tokens", "turns", "Σl²", "rejected"]) element("th", name, head).scope = "col";
  const body = element("tbody", "", table);
  for (const row of rows.slice(0, state.rows)) {
    const line = element("tr", "", body), button = element("button", "show", element("td", "", line));
    button.setAttribute("aria-pressed", String(row === state.row));
    button.addEventListener("click", () => {
      [state.row, state.from, state.token] = [row, 0, 0];
      drawList();
      drawRow();
    });
    const cells = [row.step, row.row, row.chosen_by, row.source, row.score, row.length, row.turns.tokens.length, row.gap];
    for (const cell of [...cells.map(shown), (100 * rejectedShare(row)).toFixed(0) + " %"]) element("td", cell, line);
  }
  if (rows.length > state.rows) {
    const more = element("button", `${rows.length - state.rows} more`, list);
    more.addEventListener("click", () => {
      state.rows += 100;
      drawList();
    });
  }
}

// ---- One row.

function drawRow() {
  const row = state.row, n = numbersOf(row), [value, full, words] = COLOURINGS[state.colouring];
  const unknown = value(n, 0) === null || value(n, 0) === undefined;
  meaning.textContent = state.colouring + ": " + (unknown ? "not recorded in this row" : words);
  const end = row.finished === null ? "end not recorded" : row.finished ? "ended by itself" : "cut off";
  heading.textContent = `Step ${row.step}, row ${row.row} (${row.chosen_by}), ${row.source}: score ${shown(row.score)}, ` +
    `${row.length} tokens, ${end}; advantage of its first token ${shown(at(n.advantage, 0))}${turnsInWords(row)}`;
  text.replaceChildren();
  for (const name of state.from === 0 ? row.pictures : []) {
    if (data.pictures[name]) element("img", "", text, "picture").src = "data:image;base64," + data.pictures[name];
  }
  if (n.prompt && state.from === 0) {
    const first = Math.max(0, n.prompt.length - WINDOW);
    if (first) element("span", `… ${first} tokens of the prompt … `, text, "prompt");
    element("span", Array.from(n.prompt.slice(first), (_, i) => pieceOf(n.prompt, first + i)).join(""), text, "prompt");
  }
  const last = Math.min(row.length, state.from + WINDOW);
  for (let i = state.from; i < last; i++) {
    const made = element("span", pieceOf(n.ids, i, n.kinds), text, kindOf(n, i));
    made.dataset.token = i;
    made.style.backgroundColor = n.flags[i] & POLICY ? shade(value(n, i), full) : "";
  }
  drawStrip(n, value, full);
  drawPager(row);
  say();
}

function kindOf(n, i) {
  if (!(n.flags[i] & POLICY)) return "token tool";
  const turn = i > 0 && !(n.flags[i - 1] & POLICY) ? " turn" : "";
  return "token" + (n.flags[i] & KEPT ? "" : " rejected") + turn;
}

function drawStrip(n, value, full) {
  const width = Math.max(1, state.row.length);
  [strip.width, strip.height] = [width, 1];
  const context = strip.getContext("2d");
  for (let i = 0; i < width && i < state.row.length; i++) {
    context.fillStyle = n.flags[i] & POLICY ? shade(value(n, i), full) || "rgba(128, 128, 128, 0.15)" : "rgba(128, 128, 128, 0.6)";
    context.fillRect(i, 0, 1, 1);
  }
}

function drawPager(row) {
  pager.replaceChildren();
  if (row.length <= WINDOW) return;
  const move = (from) => () => {
    [state.from, state.token] = [from, from];
    drawRow();
  };
  const before = element("button", "tokens before", pager), after = element("button", "tokens after", pager);
  before.disabled = state.from === 0;
  after.disabled = state.from + WINDOW >= row.length;
  before.addEventListener("click", move(Math.max(0, state.from - WINDOW)));
  after.addEventListener("click", move(state.from + WINDOW));
  element("span", ` tokens ${state.from} to ${Math.min(row.length, state.from + WINDOW) - 1} of ${row.length}`, pager);
}

function say() {
  const row = state.row, n = numbersOf(row), i = state.token;
  for (const old of text.querySelectorAll(".now")) old.classList.remove("now");
  const now = text.querySelector(`[data-token="${i}"]`);
  if (!now) return (readout.textContent = "");
  now.classList.add("now");
  const id = n.ids && n.ids[i] !== UNKNOWN ? ` (id ${data.pieces[n.ids[i]][0]})` : "";
  const words = [`token ${i} “${pieceOf(n.ids, i)}”${id}, ${data.classes[n.kinds[i]] || "unknown kind"}`];
  if (!(n.flags[i] & POLICY)) words.push("written by a tool or an environment, not by the policy");
  else {
    words.push(`log-prob of the engine ${shown(n.rollout[i])}, of the trainer ${shown(n.train && n.train[i])}`);
    words.push(`log-ratio ${shown(logRatio(n, i))}`, `over expected noise ${shown(overNoise(n, i))}`);
    words.push(`weight ${shown(at(n.weight, i))}${n.flags[i] & CUT ? " (truncated)" : ""}`, n.flags[i] & KEPT ? "kept" : "rejected");
    words.push(`advantage ${shown(at(n.advantage, i))}`, `entropy ${shown(at(n.entropy, i))}`, `age ${shown(at(n.age, i))}`);
    const { tokens, rewards, waits } = row.turns, turn = turnOf(row, i);
    if (tokens.length > 1) words.push(`turn ${turn + 1} of ${tokens.length}`);
    if (rewards) words.push(`reward of its turn ${shown(rewards[turn])}`);
    if (waits) words.push(`its reply took ${shown(waits[turn])} s`);
  }
  readout.textContent = words.join(", ");
}

text.addEventListener("pointerover", (event) => {
  if (event.target.dataset.token === undefined) return;
  state.token = Number(event.target.dataset.token);
  say();
});
text.addEventListener("keydown", (event) => {
  const last = Math.min(state.row.length, state.from + WINDOW) - 1;
  const next = { ArrowLeft: state.token - 1, ArrowRight: state.token + 1, Home: state.from, End: last }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  state.token = Math.min(Math.max(next, state.from), last);
  say();
});
strip.addEventListener("click", (event) => {
  const place = Math.min(state.row.length - 1, Math.floor((event.offsetX / strip.clientWidth) * state.row.length));
  state.from = Math.floor(place / WINDOW) * WINDOW;
  state.token = place;
  drawRow();
});

drawList();
drawRow();
window.tokenView = { state, drawRow };
})();
