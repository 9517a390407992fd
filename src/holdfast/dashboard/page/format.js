// Words and numbers for people, and elements that hold text and never markup.

const whole = new Intl.NumberFormat("en");

export const byId = (id) => document.getElementById(id);

/** An element with classes and children; a string is text, whatever is in it. */
export function make(tag, classes, ...children) {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

/** Change a text only if it differs: the browser has nothing to do then. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const count = (number) => whole.format(number);

export const many = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

export function duration(seconds) {
  if (seconds === 0) return "0 s";
  if (seconds < 0.00095) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 0.9995) return `${three(seconds * 1000)} ms`;
  if (seconds < 119.95) return `${three(seconds)} s`;
  const total = Math.round(seconds);
  const [days, hours, minutes] = [Math.floor(total / 86400), Math.floor(total / 3600) % 24, Math.floor(total / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${total % 60} s`;
}

/** Three digits are what anybody reads. */
export function three(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  return size >= 100 ? count(Math.round(value)) : String(Number(value.toPrecision(3)));
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${three(value)} ${units[at]}`;
}

/** 00:12:31 since the start, for columns; with days in front where there are any. */
export function clock(seconds) {
  const total = Math.max(0, Math.floor(seconds));
  const parts = [Math.floor(total / 3600) % 24, Math.floor(total / 60) % 60, total % 60];
  const days = Math.floor(total / 86400);
  return (days ? `${days} d ` : "") + parts.map((part) => String(part).padStart(2, "0")).join(":");
}
