// The page's wiring: form in, two runs out, one after the other or together.

import { ApiError, chat, models } from "./stream.js";
import { RunView } from "./view.js";

const $ = (id) => document.getElementById(id);
const KEY = "paceline-key";
const withDraft = new RunView($("with"), $("rounds"));
const without = new RunView($("without"), null);
let history = [];
let running = null;

function number(id) {
  return $(id).value === "" ? null : Number($(id).value);
}

function body(speculation) {
  const system = $("system").value.trim();
  const k = number("k");
  return {
    model: $("model").value,
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...history,
      { role: "user", content: $("prompt").value },
    ],
    max_tokens: number("max-tokens") ?? 96,
    temperature: number("temperature") ?? 0,
    seed: number("seed") ?? 1,
    stream: true,
    stream_options: { include_usage: true },
    speculation: {
      include_rounds: true,
      ...(speculation === "on" && k !== null ? { max_tokens: k } : {}),
      ...(speculation === "off" ? { method: "off" } : {}),
    },
  };
}

async function runOne(view, speculation, signal) {
  view.begin();
  try {
    await chat(body(speculation), $("key").value, signal, (chunk) => view.take(chunk));
  } finally {
    view.end();
  }
}

function showError(error) {
  $("error").textContent = error.message;
  $("error").hidden = false;
  if (error instanceof ApiError && error.status === 401) {
    $("key-field").hidden = false;
    $("key-field").closest("details").open = true;
    $("key").focus();
  }
}

function summarize() {
  const ratio = without.speed > 0 ? withDraft.speed / without.speed : 0;
  const same = withDraft.text === without.text;
  $("summary").textContent =
    `${ratio.toFixed(2)} times the speed without the draft; ` +
    (same ? "the two texts are identical." : "the two texts DIFFER.");
}

// The turn that the two runs show is not among those above them.
function showHistory() {
  $("history").hidden = history.length === 0;
  $("history").replaceChildren(
    ...history.map((turn) => {
      const line = document.createElement("p");
      line.textContent = `${turn.role === "user" ? "You" : "Model"}: ${turn.content}`;
      return line;
    }),
  );
  $("history").scrollTop = $("history").scrollHeight;
}

function remember() {
  history.push({ role: "user", content: $("prompt").value });
  history.push({ role: "assistant", content: withDraft.text });
}

async function run(event) {
  event?.preventDefault();
  if (running || !$("ask").reportValidity()) return;
  running = new AbortController();
  const { signal } = running;
  if ($("key").value) sessionStorage.setItem(KEY, $("key").value);
  $("run").disabled = true;
  $("stop").disabled = false;
  $("error").hidden = true;
  $("summary").textContent = "Running ...";
  without.clear();
  showHistory();
  try {
    if (!$("model").options.length) await loadModels();
    const first = runOne(withDraft, "on", signal);
    if ($("order").value === "together") {
      await Promise.all([first, runOne(without, "off", signal)]);
    } else {
      await first;
      await runOne(without, "off", signal);
    }
    summarize();
    remember();
  } catch (error) {
    running.abort();
    $("summary").textContent = error.name === "AbortError" ? "Stopped." : "";
    if (error.name !== "AbortError") showError(error);
  } finally {
    running = null;
    $("run").disabled = false;
    $("stop").disabled = true;
  }
}

function stop() {
  running?.abort();
}

function clear() {
  stop();
  history = [];
  showHistory();
  withDraft.clear();
  without.clear();
  $("summary").textContent = "";
  $("error").hidden = true;
  $("prompt").focus();
}

async function loadModels() {
  const names = await models($("key").value);
  $("model").replaceChildren(
    ...names.map((name) => {
      const option = document.createElement("option");
      option.value = option.textContent = name;
      return option;
    }),
  );
}

$("ask").addEventListener("submit", run);
$("stop").addEventListener("click", stop);
$("clear").addEventListener("click", clear);
$("key").addEventListener("change", () => loadModels().catch(showError));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(event);
});
$("key").value = sessionStorage.getItem(KEY) ?? "";
loadModels().catch(showError);
