// The form's fields as a request. Knows no network.

const $ = (id) => document.getElementById(id);
const KEY = "paceline-key";
// What an emptied field means.
const DEFAULTS = { "max-tokens": 96, temperature: 0, seed: 1, k: null };

function number(id) {
  return $(id).value === "" ? DEFAULTS[id] : Number($(id).value);
}

// With proposals, from where the form says, or without: the run to compare with.
export function requestBody(history, hasProposals) {
  const system = $("system").value.trim();
  const speculation = { include_rounds: true };
  if (!hasProposals) speculation.method = "off";
  if (hasProposals && method()) speculation.method = method();
  if (hasProposals && number("k") !== null) speculation.max_tokens = number("k");
  if (mode()) speculation.mode = mode();
  return {
    model: $("model").value,
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...history,
      { role: "user", content: $("prompt").value },
    ],
    max_tokens: number("max-tokens"),
    temperature: number("temperature"),
    seed: number("seed"),
    stream: true,
    stream_options: { include_usage: true },
    speculation,
  };
}

export function method() {
  return $("method").value;
}

export function mode() {
  return $("mode").value;
}

// In these modes a seed does not bring the same text back; only its law is the target's. Which one
// the service uses by itself is not known here.
export function mayDiffer() {
  return number("temperature") > 0 && ["", "rejection", "block"].includes(mode());
}

export function isTogether() {
  return $("order").value === "together";
}

export function hasModels() {
  return $("model").options.length > 0;
}

// Model -> method -> why it has not got that one.
let refusals = new Map();

// The chosen one stays chosen where it is still served.
export function showModels(models) {
  const chosen = $("model").value;
  refusals = new Map(models.map((model) => [model.id, model.refused_speculation_methods]));
  $("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
  if (refusals.has(chosen)) $("model").value = chosen;
  showSettings();
}

// What the model cannot do cannot be chosen, and says why.
function showMethods() {
  const reasons = refusals.get($("model").value) ?? {};
  for (const option of $("method").options) {
    option.dataset.name ??= option.textContent;
    const reason = reasons[option.value] ?? "";
    option.disabled = reason !== "";
    option.title = reason;
    option.textContent = [option.dataset.name, reason].filter(Boolean).join(": ");
  }
  if ($("method").selectedOptions[0]?.disabled) $("method").value = "";
}

export function showSettings() {
  showMethods();
  const k = number("k");
  $("settings-now").textContent = [
    $("model").value,
    `${number("max-tokens")} tokens`,
    `temperature ${number("temperature")}`,
    `seed ${number("seed")}`,
    ...(k === null ? [] : [`K up to ${k}`]),
    ...(method() ? [method()] : []),
    ...(mode() ? [mode()] : []),
    ...($("system").value.trim() ? ["with a system prompt"] : []),
  ]
    .filter(Boolean)
    .join(", ");
}

export function key() {
  return $("key").value.trim();
}

export function recallKey() {
  $("key").value = sessionStorage.getItem(KEY) ?? "";
  $("key-field").hidden = !$("key").value;
}

export function rememberKey() {
  if (key()) sessionStorage.setItem(KEY, key());
  else sessionStorage.removeItem(KEY);
}

export function askForKey(takesFocus) {
  $("key-field").hidden = false;
  if (!takesFocus) return;
  $("key").focus();
  $("key").select();
}
