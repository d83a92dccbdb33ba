// The page's wiring: form in, two runs out, one after the other or together.

import * as form from "./form.js";
import { Waterfall } from "./rounds.js";
import { ApiError, chat, models } from "./stream.js";
import { RunView } from "./view.js";

const $ = (id) => document.getElementById(id);
const waterfall = new Waterfall($("rounds"), (count) => {
  $("no-rounds").hidden = count > 0;
  $("waterfall").hidden = count === 0;
});
const withProposals = new RunView($("with"), waterfall);
const without = new RunView($("without"), null);
let history = [];
// The turn that the two runs show; it joins the history when it is followed up.
let turn = null;
let running = null;
let finished = Promise.resolve();

async function runOne(view, hasProposals, signal) {
  view.begin();
  let state = "failed";
  try {
    const body = form.requestBody(history, hasProposals);
    await chat(body, form.key(), signal, (chunk) => view.take(chunk));
    state = "";
  } catch (error) {
    if (signal.aborted) state = "stopped";
    throw error;
  } finally {
    view.end(state);
  }
}

async function runBoth(signal) {
  if (form.isTogether()) {
    say("Running with speculation and without ...");
    await Promise.all([runOne(withProposals, true, signal), runOne(without, false, signal)]);
    return;
  }
  say("Running with speculation ...");
  await runOne(withProposals, true, signal);
  say("Running without speculation ...");
  await runOne(without, false, signal);
}

function start() {
  if (!running && $("ask").reportValidity()) finished = run();
}

async function run() {
  running = new AbortController();
  const { signal } = running;
  const messages = form.requestBody([], true).messages.slice(-1);
  form.rememberKey();
  begin();
  try {
    if (!form.hasModels()) form.showModels(await models(form.key(), signal));
    await runBoth(signal);
    turn = [...messages, { role: "assistant", content: withProposals.content }];
    say(comparison());
  } catch (error) {
    const isStopped = signal.aborted;
    running.abort();
    without.giveUp();
    say(isStopped ? "Stopped." : "The run failed.");
    if (!isStopped) showError(error);
  } finally {
    running = null;
    showButtons();
  }
}

function begin() {
  turn = null;
  hideError();
  withProposals.clear();
  without.clear("waiting");
  showButtons();
}

// A button that goes dead must not take the focus with it.
function showButtons() {
  const wasRun = document.activeElement === $("run");
  const wasStop = document.activeElement === $("stop");
  $("run").disabled = running !== null;
  $("stop").disabled = running === null;
  $("follow").disabled = turn === null;
  if (wasRun && running) $("stop").focus();
  if (wasStop && !running) $("run").focus();
}

function comparison() {
  const ratio = without.speed > 0 ? withProposals.speed / without.speed : 0;
  const speed = `${ratio.toFixed(2)} times the speed without speculation`;
  if (withProposals.text === without.text) return `${speed}; the two texts are identical.`;
  let at = 0;
  while (withProposals.text[at] === without.text[at]) at += 1;
  const reason = form.mayDiffer()
    ? " In the modes rejection and block they may: only their law is the same."
    : "";
  return `${speed}; the two texts DIFFER after ${at} characters.${reason}`;
}

function say(sentence) {
  $("summary").textContent = sentence;
}

function showError(error, takesFocus = true) {
  $("error").textContent = error.message;
  $("error").hidden = false;
  if (error instanceof ApiError && error.status === 401) form.askForKey(takesFocus);
}

function hideError() {
  $("error").textContent = "";
  $("error").hidden = true;
}

function stop() {
  running?.abort();
}

function showHistory() {
  $("history").hidden = history.length === 0;
  $("history").replaceChildren(
    ...history.map(({ role, content }) => {
      const line = document.createElement("p");
      const who = document.createElement("b");
      who.textContent = role === "user" ? "You" : "Model";
      line.append(who, ` ${content}`);
      return line;
    }),
  );
  $("history").scrollTop = $("history").scrollHeight;
}

async function converse(messages) {
  stop();
  await finished;
  history = messages;
  turn = null;
  hideError();
  withProposals.clear();
  without.clear();
  showHistory();
  showButtons();
  $("prompt").focus();
}

async function followUp() {
  await converse([...history, ...turn]);
  $("prompt").value = "";
  say("Write the next message of this conversation.");
}

async function startOver() {
  await converse([]);
  say("Run the prompt to compare the two.");
}

async function loadModels(takesFocus) {
  try {
    form.showModels(await models(form.key()));
    hideError();
  } catch (error) {
    showError(error, takesFocus);
  }
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
// A field in a closed part of the page could not show what is wrong with it.
$("settings").addEventListener("invalid", () => ($("settings").open = true), true);
$("settings").addEventListener("input", form.showSettings);
$("stop").addEventListener("click", stop);
$("follow").addEventListener("click", followUp);
$("clear").addEventListener("click", startOver);
$("key").addEventListener("change", () => running || loadModels(false));
$("numbers").addEventListener("change", () => {
  $("waterfall").classList.toggle("numbers", $("numbers").checked);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    start();
  }
});
form.recallKey();
form.showSettings();
loadModels(true);
