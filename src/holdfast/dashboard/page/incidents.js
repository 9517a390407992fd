// The table of incidents, a page at a time, and one of them with all that is known.

import { byId, clock, count, duration, make, many, say } from "./format.js";

const PAGE = 20;
let rows = []; // by order of number, which is that of time
let places = new Map(); // of a number, in that order
let found = rows; // those that are searched for
const kinds = new Set();
let page = 0;
let asked = 0; // the newest question for a whole incident: its answer alone is shown

export function begin() {
  byId("kind").addEventListener("change", restart);
  byId("search").addEventListener("input", restart);
  byId("newer").addEventListener("click", () => turn(page - 1));
  byId("older").addEventListener("click", () => turn(page + 1));
  const dialog = byId("incident");
  dialog.querySelector(".close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
}

export function clear() {
  rows = [];
  places = new Map();
}

/** New ones, and those of which more is known. Of ten thousand, only these are touched. */
export function add(list) {
  for (const row of list) {
    if (!places.has(row[0])) {
      places.set(row[0], rows.length);
      rows.push(row);
    } else rows[places.get(row[0])] = row;
    if (!kinds.has(row[2])) {
      kinds.add(row[2]);
      const option = make("option", "", row[2]);
      option.value = row[2];
      byId("kind").append(option);
    }
  }
  search();
  draw();
}

export const byTime = () => rows;

function restart() {
  page = 0;
  search();
  draw();
}

function search() {
  const kind = byId("kind").value;
  const words = byId("search").value.trim().toLowerCase();
  found = rows;
  if (kind || words) {
    found = rows.filter((row) => {
      if (kind && row[2] !== kind) return false;
      return !words || `#${row[0]} ${row[3]} ${row[5]}`.toLowerCase().includes(words);
    });
  }
}

function turn(to) {
  page = to;
  draw();
}

function draw() {
  const pages = Math.max(1, Math.ceil(found.length / PAGE));
  page = Math.min(Math.max(0, page), pages - 1);
  const end = found.length - page * PAGE;
  const shown = found.slice(Math.max(0, end - PAGE), end).reverse();
  update(byId("incidents").tBodies[0], shown);
  byId("incidents").hidden = shown.length === 0;
  byId("none").hidden = shown.length > 0;
  say(byId("none"), rows.length ? "None of them is like that." : "None so far.");
  byId("pages").hidden = pages < 2;
  byId("newer").disabled = page === 0;
  byId("older").disabled = page === pages - 1;
  const first = page * PAGE + 1;
  say(byId("where"), `${count(first)} to ${count(first + shown.length - 1)} of ${count(found.length)}`);
}

/** Rows that are there already stay, and with them the focus. */
function update(body, shown) {
  const there = new Map([...body.rows].map((line) => [line.row, line]));
  const lines = shown.map((row) => there.get(row) ?? lineOf(row));
  if (lines.length !== body.rows.length || lines.some((line, at) => line !== body.rows[at])) body.replaceChildren(...lines);
}

function lineOf(row) {
  const [number, , kind, what, , , failed_s, lost_s, restarted, closed, failedAgain] = row;
  const open = make("button", "link", what);
  open.type = "button";
  open.addEventListener("click", () => show(number));
  const then = !restarted ? "no restart" : failedAgain ? "failed again" : closed ? "recovered" : "recovering";
  const cells = [
    ["#", String(number)], ["When", clock(failed_s)], ["What", open], ["Cause", make("span", "tag", kind)],
    ["Lost", duration(lost_s)], ["Then", then],
  ].map(([name, content]) => {
    const cell = make("td", "", content);
    cell.dataset.name = name;
    return cell;
  });
  const line = make("tr", restarted ? "" : "final", ...cells);
  line.dataset.number = number;
  line.row = row;
  return line;
}

// -- one of them ------------------------------------------------------------------------------------------------------

export async function show(number) {
  const dialog = byId("incident");
  const mine = (asked += 1);
  say(byId("incident-title"), `Incident ${number}`);
  const body = dialog.querySelector(".body");
  body.replaceChildren(make("p", "soft", "Loading"));
  if (!dialog.open) dialog.showModal();
  let content;
  try {
    const answer = await fetch(`incident/${number}`);
    content = answer.ok ? whole(await answer.json()) : [make("p", "", (await answer.text()).trim())];
  } catch {
    content = [make("p", "", "The page's server does not answer. The incident is in the run directory, in incidents/.")];
  }
  if (mine === asked) {
    body.replaceChildren(...content);
    dialog.scrollTop = 0;
  }
}

function whole(one) {
  const told = make("p", "told", one.what);
  const parts = [told, facts(one), make("h3", "", `Time lost: ${duration(one.lost_s)}`), phases(one)];
  if (one.groups.length) parts.push(make("h3", "", "What the ranks were doing"), ...stacks(one));
  if (one.traceback) parts.push(make("h3", "", "Traceback"), block(one.traceback));
  if (one.stderr_tail.length) parts.push(make("h3", "", "The last lines of its stderr"), block(one.stderr_tail.join("\n")));
  if (one.followers.length) {
    const items = one.followers.map((each) => {
      const who = each.rank === null ? each.node : `rank ${each.rank}${each.node ? ` on ${each.node}` : ""}`;
      return make("li", "", `${who}: ${each.headline}`);
    });
    parts.push(make("h3", "", "What followed from it"), make("ul", "", ...items));
  }
  return parts;
}

function facts(one) {
  const who = one.rank === null ? one.node || "no single rank" : `rank ${one.rank}${one.node ? ` on ${one.node}` : ""}`;
  const waited = one.suspects.length ? `; the others seem to wait for rank ${one.suspects.join(", ")}` : "";
  const ended = one.status === null ? "" : one.status < 0 ? `, ended by signal ${-one.status}` : `, ended with ${one.status}`;
  const steps = one.steps === null ? "" : one.steps ? `, at step ${count(one.steps)} of its world` : ", before its first step";
  const list = [
    ["Cause", one.kind],
    ["Blame", `${who}${one.pid ? ` (pid ${one.pid}${ended})` : ""}${waited}`],
    ["When", `${clock(one.failed_s)} after the start${one.failed_at ? `, ${one.failed_at.replace("T", " ").replace(/\.\d+Z$/, " UTC")}` : ""}`],
    ["World", `generation ${one.generation}, ${duration(one.uptime_s)} after it began${steps}`],
    ["Answer", one.action || (one.restarted ? "a restart" : "the end")],
  ];
  return make("dl", "facts", ...list.flatMap(([name, text]) => [make("dt", "", name), make("dd", "", text)]));
}

function phases(one) {
  if (!one.phases_s.length) return make("p", "soft", one.closed ? "None." : "Not known yet.");
  const bar = make("div", "bar");
  bar.setAttribute("aria-hidden", "true");
  const list = make("ul", "phases");
  one.phases_s.forEach(([name, seconds], at) => {
    const part = make("span", `phase-${at % 6}`);
    part.style.flexGrow = String(Math.max(seconds, one.lost_s * 0.004));
    bar.append(part);
    list.append(make("li", "", make("span", `key phase-${at % 6}`), `${name} ${duration(seconds)}`));
  });
  return make("div", "", bar, list);
}

function stacks(one) {
  return one.groups.map((group) => {
    const named = group.ranks.join(", ") + (group.count > group.ranks.length ? ", …" : "");
    const suspected = group.ranks.some((rank) => one.suspects.includes(rank));
    const head = make("summary", "", `${many(group.count, "rank")} ${group.stuck ? "" : "in "}${group.what}`,
      suspected ? make("span", "tag warn", "the others wait for this") : null);
    const more = `rank ${named}${group.node ? ` on ${group.node}` : ""}`;
    const details = make("details", "", head, make("p", "soft", more), block(group.frames.join("\n") || "no frames"));
    details.open = suspected || one.groups.length === 1;
    return details;
  });
}

function block(text) {
  const pre = make("pre", "", text);
  pre.tabIndex = 0;
  return pre;
}
