// The page: takes the whole state once, then what changes, and hands each part to whoever draws it.

import * as charts from "./charts.js";
import * as control from "./control.js";
import { byId, bytes, clock, count, duration, make, many, say, three } from "./format.js";
import * as incidents from "./incidents.js";
import * as ranks from "./ranks.js";

const RETRY_MS = 1000;
const LATER_MS = 2000; // where the server has said that it ends: somebody may start it again
const PHASES = {
  training: ["●", "Training"], starting: ["◐", "Starting"], recovering: ["↻", "Recovering"], succeeded: ["✓", "Succeeded"],
  preempted: ["■", "Stopped"], gone: ["✕", "The agent is gone without a word"],
};
const TILES = ["Step", "Loss", "Step time", "Time lost", "Incidents", "Checkpoint", "Running for"];

let head = null;
let heard_ms = 0; // when `head.now_s` was
let nodes = [];
let worlds = []; // by order of generation
let places = new Map(); // of a generation, in that order
const points = { paces: [], losses: [] };
const tiles = new Map();
let source = null;

function take(change) {
  if (change.head) [head, heard_ms] = [change.head, performance.now()];
  nodes = change.nodes ?? nodes;
  if (change.all_ranks) ranks.all(change.all_ranks);
  if (change.ranks) ranks.some(change.ranks);
  if (change.pace) ranks.paces(change.pace);
  if (change.incidents) incidents.add(change.incidents);
  for (const world of change.worlds ?? []) {
    if (!places.has(world[0])) places.set(world[0], worlds.length);
    worlds[places.get(world[0])] = world;
  }
  for (const name of ["paces", "losses"]) {
    if (!change[name]) continue;
    const [anew, some] = change[name];
    points[name] = anew ? some : points[name].concat(some);
  }
  if (change.worlds || change.incidents || change.paces || change.losses) {
    charts.show({ now_s: now(), worlds, incidents: incidents.byTime(), ...points });
  }
  show();
}

/** Of the record. Where the agent is on another machine, its newest line is all that is known. */
function now() {
  if (!head) return 0;
  const ticks = head.standing === "here" && !head.ended;
  return head.now_s + (ticks ? (performance.now() - heard_ms) / 1000 : 0);
}

// -- what is on top ---------------------------------------------------------------------------------------------------

function show() {
  if (!head) return;
  const [sign, word] = PHASES[head.phase] ?? ["✕", `Failed: ${head.phase}`];
  const name = head.run_id || "no job yet";
  document.title = `${sign} ${name}, holdfast`;
  say(byId("run"), name);
  say(byId("program"), head.program);
  const slow = head.stragglers.length ? `, slow: ${some(head.stragglers)}` : "";
  const of = head.generation === null ? "" : `: generation ${head.generation}, ${many(head.size, "rank")} on ${many(head.nodes, "node")}`;
  say(byId("state"), head.ended || head.phase === "gone" ? word : `${word}${of}${slow}`);
  byId("state").dataset.sign = sign;
  byId("state").dataset.phase = PHASES[head.phase] ? head.phase : "failed";
  const reason = head.ended ? head.ended[1] : "";
  byId("reason").hidden = !reason;
  say(byId("reason"), reason);
  const spare = nodes.filter(([name, , , ended]) => !ended && !ranks.hasNode(name)).map(([name]) => name);
  const beside = spare.length && head.generation !== null ? `, beside it: ${spare.length > 3 ? many(spare.length, "node") : spare.join(", ")}` : "";
  const [waiting, host, gpu] = head.standby;
  const memory = `${bytes(host)}${gpu ? `, ${bytes(gpu)} on GPUs` : ""}`;
  const standby = waiting ? `, ${waiting === 1 ? "1 process stands" : `${count(waiting)} processes stand`} by (${memory})` : "";
  say(byId("world"), of.slice(2) + beside + standby);
  byId("said").replaceChildren(...head.said.map((line) => make("li", "", line)));
  byId("s-said").hidden = head.said.length === 0;
  const acts = head.standing === "here" && !head.ended;
  byId("drain").hidden = !acts;
  ranks.allow(acts);
  tick();
}

const some = (list) => (list.length > 4 ? `${many(list.length, "rank")}` : `rank ${list.join(", ")}`);

/** What changes by itself as time goes by. */
function tick() {
  const at_s = now();
  const { step, step_s, steps_left, checkpoint } = head;
  const left = steps_left === null ? "" : `${count(steps_left)} left${step_s ? `, ${duration(steps_left * step_s)}` : ""}`;
  tile("Step", count(step), left);
  tile("Loss", head.loss === null ? "–" : three(head.loss), head.epoch ? `epoch ${head.epoch}` : "");
  tile("Step time", step_s ? duration(step_s) : "–", head.samples_per_s ? `${three(head.samples_per_s)} samples/s` : "");
  tile("Time lost", duration(head.lost_s), at_s ? `${percent(head.lost_s / at_s)} of the run` : "");
  const faults = head.faults ? ` · ${many(head.faults, "fault")} on purpose` : "";
  tile("Incidents", count(head.incidents), `${count(head.restarts)} of ${many(head.max_restarts, "restart")}${faults}`);
  const failures = head.checkpoint_failures ? `${many(head.checkpoint_failures, "save")} failed` : "";
  if (checkpoint) {
    const [saved, saved_s, , size, seconds] = checkpoint;
    const cost = size ? `${bytes(size)} a rank in ${duration(seconds)}` : "";
    const age = `${duration(Math.max(0, at_s - saved_s))} ${head.ended ? "before the end" : "ago"}`;
    tile("Checkpoint", `step ${count(saved)}`, [age, cost, failures].filter(Boolean).join(" · "));
  } else tile("Checkpoint", "–", failures || "none so far");
  const since = head.started ? `since ${head.started.slice(0, 16).replace("T", " ")} UTC` : "";
  tile(head.ended ? "Ran for" : "Running for", clock(head.ended ? head.ended[2] : at_s), since);
}

function percent(part) {
  return part >= 1 ? "all" : `${three(part * 100)} %`;
}

function tile(name, value, more) {
  const key = name === "Ran for" ? "Running for" : name;
  const [term, big, small] = tiles.get(key);
  say(term, name);
  say(big, value);
  say(small, more);
}

// -- the line to the server -------------------------------------------------------------------------------------------

function line(state, text) {
  byId("line").dataset.is = state;
  say(byId("line"), text);
}

async function connect() {
  source?.close();
  try {
    const answer = await fetch("state");
    if (answer.status === 401) {
      line("lost", "no access: open the address with its token");
      return;
    }
    const state = await answer.json();
    worlds = [];
    places = new Map();
    incidents.clear();
    take(state);
    listen(state.id);
  } catch {
    const ended = byId("line").dataset.is === "ended";
    if (!ended) line("lost", "the page's server is gone");
    setTimeout(connect, ended ? LATER_MS : RETRY_MS);
  }
}

function listen(since) {
  source?.close();
  const mine = new EventSource(`events?since=${since}`);
  source = mine;
  mine.onopen = () => line("live", "live");
  mine.onmessage = (event) => take(JSON.parse(event.data));
  mine.addEventListener("anew", connect);
  mine.addEventListener("bye", () => {
    mine.close();
    line("ended", "the page's server has ended");
    setTimeout(connect, LATER_MS);
  });
  mine.onerror = () => {
    line("lost", "connecting again");
    if (mine.readyState === EventSource.CLOSED) setTimeout(connect, RETRY_MS);
  };
}

function begin() {
  if (location.search) history.replaceState(null, "", location.pathname + location.hash);
  for (const name of TILES) {
    const parts = [make("dt", "", name), make("dd", "", "–"), make("dd", "more")];
    tiles.set(name, parts);
    byId("tiles").append(make("div", "", ...parts));
  }
  ranks.begin((rank) =>
    control.ask(`Kill rank ${rank}?`, "Its process gets SIGKILL. The job takes that as a failure: if a restart is left, a new world begins, and ranks that cannot stay in their processes start anew.",
      `Kill rank ${rank}`, `kill?rank=${rank}`));
  charts.begin(incidents.show);
  incidents.begin();
  control.begin();
  byId("drain").addEventListener("click", () =>
    control.ask("Drain this job?", head.nodes > 1
      ? `The agent ${head.lead} leaves: its ranks save where they can and end, and the other nodes go on without it.`
      : "Ranks save where they can, and end. The job is not restarted.", "Drain", "drain"));
  setInterval(() => head && (tick(), charts.pass(now())), 1000);
  // A browser opens six lines to one server; tabs that nobody sees must not take them all.
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) connect();
    else source?.close();
  });
  connect();
}

begin();
