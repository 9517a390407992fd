// Curves and the timeline, on canvases. They are drawn once a frame at most, and only if something changed.

import { byId, clock, count, duration, many, say, three } from "./format.js";

const LEFT = 54;
const APART = 8; // pixels between two incidents; where there are more of them, lines would hide the curve
const BOTTOM = 20;
const TOP = 6;
const RIGHT = 8;
const TIMES_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
const REACH = 12; // pixels from an incident that still mean it

const data = { now_s: 0, paces: [], losses: [], worlds: [], incidents: [] };
let range_s = 0;
let dirty = false;
let onIncident = () => {};

const CURVES = [
  { id: "step", name: "Step", points: () => data.paces, y: (p) => p[1], show: count, zero: false },
  { id: "loss", name: "Loss", points: () => data.losses, y: (p) => p[2], show: three, zero: false },
  { id: "pace", name: "Step time", points: () => data.paces, y: (p) => p[2], show: duration, zero: true },
];

export function begin(open) {
  onIncident = open;
  for (const input of document.querySelectorAll("#range input")) {
    input.addEventListener("change", () => {
      range_s = Number(input.value);
      redraw();
    });
  }
  for (const curve of CURVES) {
    curve.canvas = byId(`chart-${curve.id}`);
    curve.reading = byId(`read-${curve.id}`);
    curve.at = null;
    follow(curve.canvas, (x) => {
      curve.at = x;
      redraw();
    });
  }
  const timeline = byId("timeline");
  follow(timeline, (x) => {
    timeline.at = x;
    redraw();
  });
  timeline.addEventListener("click", (event) => {
    const found = near(event.offsetX, scale(timeline.clientWidth, 0));
    if (found) onIncident(found[0]);
  });
  const watcher = new ResizeObserver(redraw);
  for (const canvas of document.querySelectorAll("canvas")) watcher.observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

/** Some of `now_s`, `paces`, `losses`, `worlds` and `incidents`, these by order of time. */
export function show(some) {
  Object.assign(data, some);
  redraw();
}

/** Time alone is drawn only once it makes half a pixel. */
export function pass(now_s) {
  const shown_s = range_s || data.now_s;
  if ((now_s - data.now_s) * byId("timeline").clientWidth > shown_s / 2) show({ now_s });
}

function follow(canvas, tell) {
  canvas.addEventListener("pointermove", (event) => tell(event.offsetX));
  canvas.addEventListener("pointerdown", (event) => tell(event.offsetX));
  canvas.addEventListener("pointerleave", () => tell(null));
}

let counted = new Map(); // incidents at each pixel, for one drawing of all: three curves are alike

function redraw() {
  if (dirty) return;
  dirty = true;
  requestAnimationFrame(() => {
    dirty = false;
    counted = new Map();
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    drawTimeline(byId("timeline"), colour);
    for (const curve of CURVES) drawCurve(curve, colour);
  });
}

/** From seconds to pixels, and back. */
function scale(width, left) {
  const until = Math.max(data.now_s, 1);
  const from = range_s ? Math.max(0, until - range_s) : 0;
  const each = (width - left - RIGHT) / (until - from);
  return { from, until, left, each, x: (s) => left + (s - from) * each, s: (x) => from + (x - left) / each };
}

function prepared(canvas) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  return [pen, width, height];
}

// -- curves -----------------------------------------------------------------------------------------------------------

function drawCurve(curve, colour) {
  const [pen, width, height] = prepared(curve.canvas);
  const across = scale(width, LEFT);
  const points = visible(curve.points(), across.from).filter((point) => Number.isFinite(curve.y(point)));
  if (points.length === 0) {
    pen.fillStyle = colour("soft");
    pen.textAlign = "center";
    pen.fillText(curve.id === "loss" ? "none is told: see holdfast.init" : "no step yet", width / 2, height / 2);
    say(curve.reading, "");
    label(curve, "nothing yet");
    return;
  }
  const up = vertical(points.map(curve.y), height, curve.zero);
  axes(pen, width, height, across, up, curve.show, colour);
  const marks = columns(across);
  if (marks.size * APART < width) drawMarks(pen, marks, height, colour);
  pen.strokeStyle = colour("accent");
  pen.lineWidth = 1.75;
  pen.lineJoin = "round";
  pen.beginPath();
  for (const point of points) pen.lineTo(across.x(point[0]), up.y(curve.y(point)));
  pen.stroke();
  if (points.length === 1) dot(pen, across.x(points[0][0]), up.y(curve.y(points[0])), colour("accent"));
  read(curve, points, across, up, pen, colour);
}

function drawMarks(pen, marks, height, colour) {
  pen.strokeStyle = colour("bad");
  pen.globalAlpha = 0.28;
  pen.lineWidth = 1;
  pen.beginPath();
  for (const x of marks.keys()) {
    pen.moveTo(x + 0.5, TOP);
    pen.lineTo(x + 0.5, height - BOTTOM);
  }
  pen.stroke();
  pen.globalAlpha = 1;
}

function read(curve, points, across, up, pen, colour) {
  const last = points[points.length - 1];
  let point = last;
  if (curve.at !== null) {
    const at_s = across.s(curve.at);
    point = points.reduce((best, each) => (Math.abs(each[0] - at_s) < Math.abs(best[0] - at_s) ? each : best), last);
    dot(pen, across.x(point[0]), up.y(curve.y(point)), colour("accent"));
  }
  const step = curve.id === "step" ? "" : ` at step ${count(point[1])}`;
  say(curve.reading, `${curve.show(curve.y(point))}${step}, ${clock(point[0])}`);
  label(curve, `from ${curve.show(curve.y(points[0]))} to ${curve.show(curve.y(last))}, at step ${count(last[1])}`);
}

function label(curve, text) {
  const words = `${curve.name}: ${text}`;
  if (curve.canvas.getAttribute("aria-label") !== words) curve.canvas.setAttribute("aria-label", words);
}

function dot(pen, x, y, colour) {
  pen.fillStyle = colour;
  pen.beginPath();
  pen.arc(x, y, 3.5, 0, 2 * Math.PI);
  pen.fill();
}

/** Those of the time that is shown, and the one before, so that a line comes in from the left. */
function visible(points, from) {
  const first = points.findIndex((point) => point[0] >= from);
  return first < 0 ? [] : points.slice(Math.max(0, first - 1));
}

function vertical(values, height, zero) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (zero) low = 0;
  if (high - low < Math.abs(high) * 1e-6 || high === low) {
    high += Math.abs(high) * 0.1 || 1;
    low -= zero ? 0 : Math.abs(low) * 0.1;
  }
  const pad = (high - low) * 0.06;
  const bottom = zero ? 0 : low - pad;
  const each = (height - BOTTOM - TOP) / (high + pad - bottom);
  return { low: bottom, high: high + pad, y: (value) => height - BOTTOM - (value - bottom) * each };
}

function axes(pen, width, height, across, up, show, colour) {
  pen.strokeStyle = colour("line");
  pen.fillStyle = colour("soft");
  pen.lineWidth = 1;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  pen.beginPath();
  for (const value of ticks(up.low, up.high, 4)) {
    const y = Math.round(up.y(value)) + 0.5;
    pen.moveTo(LEFT, y);
    pen.lineTo(width - RIGHT, y);
    pen.fillText(show(value), LEFT - 5, y);
  }
  pen.stroke();
  times(pen, width, height, across);
}

function times(pen, width, height, across) {
  pen.textBaseline = "alphabetic";
  for (const at_s of ticks(across.from, across.until, Math.max(2, Math.floor(width / 90)), true)) {
    const x = across.x(at_s);
    const half = pen.measureText(clock(at_s)).width / 2;
    pen.textAlign = "center";
    pen.fillText(clock(at_s), Math.min(Math.max(x, half), width - half), height - 5);
  }
}

/** Round values, about so many of them. */
function ticks(low, high, number, inTime = false) {
  const rough = (high - low) / number;
  const size = 10 ** Math.floor(Math.log10(rough));
  const nice = inTime && rough >= 1 ? TIMES_S : [1, 2, 2.5, 5, 10].map((each) => each * size);
  const each = nice.find((value) => value >= rough) ?? nice[nice.length - 1];
  const found = [];
  for (let at = Math.ceil(low / each); at * each <= high && found.length < 20; at += 1) found.push(at * each || 0);
  return found;
}

// -- the timeline -----------------------------------------------------------------------------------------------------

/** How many incidents are at each pixel: of ten thousand, as many lines as the canvas is wide. */
function columns(across) {
  const key = [data.incidents.length, across.from, across.each, across.left].join();
  if (counted.has(key)) return counted.get(key);
  const found = new Map();
  counted.set(key, found);
  for (const incident of data.incidents) {
    if (incident[6] < across.from) continue;
    const x = Math.round(across.x(incident[6]));
    found.set(x, (found.get(x) ?? 0) + 1);
  }
  return found;
}

function near(x, across) {
  let best = null;
  let least = REACH;
  for (const incident of data.incidents) {
    const far = Math.abs(across.x(incident[6]) - x);
    if (far <= least) [best, least] = [incident, far];
  }
  return best;
}

function drawTimeline(canvas, colour) {
  const [pen, width, height] = prepared(canvas);
  const across = scale(width, 0);
  const [top, bar] = [26, 20];
  let drawn = -1; // of ten thousand generations, those that can be told apart
  for (const world of data.worlds) {
    const end = across.x(world[6] ?? data.now_s);
    if (end < across.left || end - drawn < 0.5) continue;
    drawn = end;
    drawWorld(pen, world, across, top, bar, colour);
  }
  pen.fillStyle = colour("bad");
  const marks = columns(across);
  const few = marks.size * APART < width;
  for (const [x, number] of marks) {
    const tall = Math.min(16, 4 + 3 * Math.log2(number));
    pen.fillRect(x - 0.5, top - 5 - tall, few ? 2 : 1, tall);
    if (!few) continue;
    pen.beginPath();
    pen.moveTo(x - 4, top - 6);
    pen.lineTo(x + 4, top - 6);
    pen.lineTo(x, top - 1);
    pen.fill();
  }
  pen.fillStyle = colour("soft");
  times(pen, width, height, across);
  const last = data.worlds[data.worlds.length - 1];
  const words = `${many(data.worlds.length, "generation")}, ${many(data.incidents.length, "incident")}`;
  const found = canvas.at === null || canvas.at === undefined ? null : near(canvas.at, across);
  canvas.style.cursor = found ? "pointer" : "default";
  say(byId("read-timeline"), found ? `#${found[0]} ${found[3]}` : last ? words : "none yet");
  const told = `${words}. The table below has each incident.`;
  if (canvas.getAttribute("aria-label") !== told) canvas.setAttribute("aria-label", told);
}

/** A generation: while it starts a thin bar, while it trains a full one; between two generations nothing ran. */
function drawWorld(pen, world, across, top, bar, colour) {
  const [generation, , , launched_s, , stepped_s, ended_s] = world;
  const until_s = ended_s ?? data.now_s;
  const began = Math.max(across.left, across.x(launched_s));
  const stepped = Math.max(began, across.x(Math.min(stepped_s ?? until_s, until_s)));
  const ended = Math.max(stepped, across.x(until_s));
  pen.fillStyle = colour("starting");
  pen.fillRect(began, top + bar / 3, Math.max(1, stepped - began), bar / 3);
  pen.fillStyle = colour(generation % 2 ? "training" : "training-too");
  if (stepped_s !== null) pen.fillRect(stepped, top, Math.max(1, ended - stepped - 1), bar);
  const name = String(generation);
  if (stepped_s !== null && ended - stepped > 14 && ended - stepped > pen.measureText(name).width + 8) {
    pen.fillStyle = colour("on-training");
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.fillText(name, stepped + 4, top + bar / 2 + 1);
  }
}
