// Draining a job and killing a rank: asked twice, and with the control token, which is kept in this tab alone.

import { byId, say } from "./format.js";

const KEPT = "holdfast-control";
let wanted = null;

export function begin() {
  const dialog = byId("act");
  byId("act-no").addEventListener("click", () => dialog.close());
  dialog.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
}

export function ask(title, text, button, address) {
  wanted = address;
  say(byId("act-title"), title);
  say(byId("act-text"), text);
  say(byId("act-yes"), button);
  byId("act-yes").hidden = false;
  say(byId("act-no"), "Cancel");
  byId("act-answer").hidden = true;
  needToken(sessionStorage.getItem(KEPT) === null);
  byId("act").showModal();
}

function needToken(needed) {
  const label = byId("act-token");
  label.hidden = !needed;
  const input = label.querySelector("input");
  input.disabled = !needed;
  input.value = "";
}

async function act() {
  const input = byId("act-token").querySelector("input");
  const token = input.disabled ? sessionStorage.getItem(KEPT) : input.value.trim();
  byId("act-yes").disabled = true;
  try {
    const answer = await fetch(wanted, { method: "POST", headers: { "X-Holdfast-Control": token } });
    if (answer.status === 401) {
      sessionStorage.removeItem(KEPT);
      needToken(true);
      tell((await answer.text()).trim(), false);
      return;
    }
    sessionStorage.setItem(KEPT, token);
    needToken(false);
    const isJson = answer.headers.get("Content-Type") === "application/json";
    const said = isJson ? await answer.json() : { why: (await answer.text()).trim() };
    tell(said.done ?? `Nothing was done: ${said.why}`, true);
  } catch {
    tell("The page's server does not answer; nothing was done.", true);
  } finally {
    byId("act-yes").disabled = false;
  }
}

function tell(text, over) {
  const answer = byId("act-answer");
  answer.hidden = false;
  say(answer, text);
  byId("act-yes").hidden = over;
  say(byId("act-no"), over ? "Close" : "Cancel");
  answer.focus();
}
