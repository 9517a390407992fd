// The grid of ranks. A cell is touched only when its rank's state changes, so a thousand of them cost nothing.

import { byId, count, duration, make, many, say } from "./format.js";

const MEANINGS = { exited: "ended well" };
const SLOW = { step: "slow by its own time", section: "slow in its sections" };
const LARGE = 128; // with more ranks than that, cells have no number

const grid = byId("grid");
const cells = new Map();
let ranks = []; // rows, by order of rank
let places = new Map(); // of a rank, in that order
let names = new Map(); // of nodes that have ranks
let pace = [[], [], [], []];
let chosen = null;
let focused = null;
let onKill = () => {};
let mayAct = false;

export function begin(kill) {
  onKill = kill;
  grid.addEventListener("keydown", onKey);
  grid.addEventListener("click", (event) => {
    const cell = event.target.closest(".cell");
    if (cell) choose(Number(cell.dataset.rank));
  });
}

export function all(rows) {
  ranks = rows;
  places = new Map(rows.map((row, at) => [row[0], at]));
  cells.clear();
  const nodes = new Map();
  names = nodes;
  for (const row of rows) {
    if (!nodes.has(row[1])) nodes.set(row[1], []);
    nodes.get(row[1]).push(row);
  }
  grid.classList.toggle("small", rows.length > LARGE);
  grid.replaceChildren(...[...nodes].map(([name, of]) => node(name, of)));
  if (!cells.has(focused)) focused = rows.length ? rows[0][0] : null;
  if (cells.has(focused)) cells.get(focused).tabIndex = 0;
  if (!cells.has(chosen)) chosen = null;
  legend();
  panel();
}

export function some(rows) {
  for (const row of rows) {
    ranks[places.get(row[0])] = row;
    draw(cells.get(row[0]), row);
  }
  legend();
  panel();
}

export function paces(columns) {
  pace = columns;
  panel();
}

export const hasNode = (name) => names.has(name);

export function allow(allowed) {
  if (mayAct !== allowed) {
    mayAct = allowed;
    panel();
  }
}

function node(name, rows) {
  const head = make("div", "name", name);
  head.setAttribute("role", "rowheader");
  const row = make("div", "node", head, make("div", "cells", ...rows.map(cellOf)));
  row.lastChild.setAttribute("role", "presentation");
  row.setAttribute("role", "row");
  return row;
}

function cellOf(row) {
  const cell = make("div", "cell", grid.classList.contains("small") ? "" : String(row[0]));
  cell.setAttribute("role", "gridcell");
  cell.dataset.rank = row[0];
  cell.tabIndex = -1;
  cells.set(row[0], cell);
  draw(cell, row);
  return cell;
}

function draw(cell, [rank, , , state, slowBy]) {
  cell.dataset.state = state; // the style sheet has a colour for it, and a sign for those who do not see that
  cell.classList.toggle("slow", slowBy !== "");
  cell.setAttribute("aria-label", `rank ${rank}: ${MEANINGS[state] ?? state}${slowBy ? ", slow" : ""}`);
}

function legend() {
  const counts = new Map();
  for (const [, , , state, slowBy] of ranks) {
    counts.set(state, (counts.get(state) ?? 0) + 1);
    if (slowBy) counts.set("slow", (counts.get("slow") ?? 0) + 1);
  }
  const told = [...counts].join();
  if (byId("legend").dataset.told === told) return;
  byId("legend").dataset.told = told;
  const items = [...counts].map(([state, number]) => {
    const key = make("span", state === "slow" ? "cell slow" : "cell");
    key.dataset.state = state === "slow" ? "" : state;
    key.setAttribute("aria-hidden", "true");
    return make("li", "", key, `${count(number)} ${MEANINGS[state] ?? state}`);
  });
  byId("legend").replaceChildren(...items);
}

function choose(rank) {
  if (chosen !== null) cells.get(chosen)?.removeAttribute("aria-selected");
  chosen = rank;
  move(rank);
  panel();
}

/** One cell is reached by Tab, the others from there. */
function move(rank) {
  if (focused !== null && cells.has(focused)) cells.get(focused).tabIndex = -1;
  focused = rank;
  cells.get(rank).tabIndex = 0;
  cells.get(rank).focus();
}

function onKey(event) {
  if (focused === null || event.altKey || event.ctrlKey || event.metaKey) return;
  const at = places.get(focused);
  const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: ranks.length - 1 }[event.key];
  if (next !== undefined) {
    event.preventDefault();
    if (ranks[next]) move(ranks[next][0]);
  } else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
    event.preventDefault();
    const found = beyond(event.key === "ArrowDown" ? 1 : -1);
    if (found !== null) move(found);
  } else if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    choose(focused);
  }
}

/** The rank on the next line of the screen that is nearest below, or above, the focused one. */
function beyond(direction) {
  const from = cells.get(focused).getBoundingClientRect();
  let best = null;
  let least = Infinity;
  for (const [rank, cell] of cells) {
    const to = cell.getBoundingClientRect();
    const down = (to.top - from.top) * direction;
    const far = down * 1000 + Math.abs(to.left - from.left);
    if (down > 2 && far < least) [best, least] = [rank, far];
  }
  return best;
}

function panel() {
  const box = byId("rank");
  const row = chosen === null ? undefined : ranks[places.get(chosen)];
  box.hidden = row === undefined;
  if (row === undefined) return;
  const [rank, name, pid, state, slowBy, text] = row;
  cells.get(rank).setAttribute("aria-selected", "true");
  const at = places.get(rank);
  const [steps, step_s, own_s, section_s] = pace.map((column) => column[at] ?? 0);
  const words = [
    `${MEANINGS[state] ?? state}${slowBy ? `, ${SLOW[slowBy] ?? "slow"}` : ""}`,
    steps ? `${many(steps, "step")} in this world` : "no step yet",
    step_s ? `${duration(step_s)} each` : "",
    own_s ? `${duration(own_s)} of that for itself` : "",
    section_s ? `${duration(section_s)} in sections` : "",
    name ? `on ${name}` : "",
    pid ? `pid ${pid}` : "",
  ];
  if (Number(box.dataset.rank) !== rank || !box.firstChild) {
    box.dataset.rank = rank;
    const kill = make("button", "danger", `Kill rank ${rank}…`);
    kill.type = "button";
    kill.addEventListener("click", () => onKill(rank));
    box.replaceChildren(make("h3", "", `Rank ${rank}`), make("p", "words"), make("p", "why"), kill);
  }
  say(box.querySelector(".words"), words.filter(Boolean).join(" · "));
  say(box.querySelector(".why"), text);
  box.querySelector("button").hidden = !mayAct || !pid || state === "exited" || state === "failed";
}
