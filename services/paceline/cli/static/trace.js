// The page of one trace: rounds are chosen by pointer or keys, the timeline grows. Asks nobody.

const rounds = JSON.parse(document.getElementById("data").textContent);
const canvas = document.querySelector(".canvas");
const scroll = document.querySelector(".scroll");
const detail = document.getElementById("detail");
const byIndex = (one, other) => one.dataset.index - other.dataset.index;
const buttons = [...document.querySelectorAll(".rounds .round")].sort(byIndex);
const bands = [...document.querySelectorAll(".band")];
const rows = [...document.querySelectorAll("tbody tr")];
const MAX_WIDTH = 4e6;
const TICK_PX = 110;
let chosen = 0;

function add(parent, name, text, kind = "") {
  const element = document.createElement(name);
  element.className = kind;
  element.textContent = text;
  parent.append(element);
  return element;
}

function show(index) {
  const { title, facts } = rounds[index];
  detail.replaceChildren();
  add(detail, "h2", title);
  const list = add(detail, "dl", "");
  for (const [name, value] of facts) {
    const line = add(list, "div", "");
    add(line, "dt", name);
    add(line, "dd", value);
  }
  for (const items of [buttons, bands, rows]) {
    items.forEach((item, at) => item.classList.toggle("chosen", at === index));
  }
}

// One button of the row takes the Tab key; arrows move between them.
function choose(index, takesFocus) {
  chosen = Math.max(0, Math.min(buttons.length - 1, index));
  buttons.forEach((button, at) => (button.tabIndex = at === chosen ? 0 : -1));
  show(chosen);
  if (takesFocus) buttons[chosen].focus({ preventScroll: true });
  const { offsetLeft, offsetWidth } = buttons[chosen];
  const isIn = offsetLeft >= scroll.scrollLeft
    && offsetLeft + offsetWidth <= scroll.scrollLeft + scroll.clientWidth;
  if (!isIn) scroll.scrollLeft = offsetLeft + offsetWidth / 2 - scroll.clientWidth / 2;
}

function step(least) {
  const unit = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((digit) => digit * unit).find((size) => size >= least) ?? 10 * unit;
}

function drawTicks() {
  const ticks = canvas.querySelector(".ticks");
  const from = Number(canvas.dataset.from);
  const span = Number(canvas.dataset.span);
  const each = step((span * TICK_PX) / canvas.clientWidth);
  // Of a long timeline only what can be seen, and a screen on both sides.
  const perPx = span / canvas.clientWidth;
  const low = from + Math.max(0, scroll.scrollLeft - scroll.clientWidth) * perPx;
  const high = Math.min(from + span, from + (scroll.scrollLeft + 2 * scroll.clientWidth) * perPx);
  ticks.replaceChildren();
  for (let at = Math.ceil(low / each); at * each < high; at += 1) {
    const label = `${Number((at * each).toPrecision(9))} ms`;
    const left = (100 * (at * each - from)) / span;
    const tick = add(ticks, "span", label);
    tick.style.left = `${left}%`;
    if (((100 - left) * canvas.clientWidth) / 100 < 60) tick.textContent = "";
  }
}

function zoom(factor) {
  const middle = (scroll.scrollLeft + scroll.clientWidth / 2) / canvas.clientWidth;
  const width = factor ? canvas.clientWidth * factor : scroll.clientWidth;
  canvas.style.width = `${Math.min(MAX_WIDTH, Math.max(scroll.clientWidth, width))}px`;
  scroll.scrollLeft = middle * canvas.clientWidth - scroll.clientWidth / 2;
  drawTicks();
}

const MOVES = {
  ArrowRight: () => chosen + 1,
  ArrowLeft: () => chosen - 1,
  Home: () => 0,
  End: () => buttons.length - 1,
};

canvas.addEventListener("keydown", (event) => {
  if (!MOVES[event.key]) return;
  event.preventDefault();
  choose(MOVES[event.key](), true);
});
document.querySelector(".timeline").addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const factor = { "+": 2, "=": 2, "-": 0.5, 0: 0 }[event.key];
  if (factor !== undefined) zoom(factor);
});
buttons.forEach((button, index) => {
  button.addEventListener("click", () => choose(index, true));
  button.addEventListener("pointerenter", () => show(index));
  button.addEventListener("pointerleave", () => show(chosen));
});
rows.forEach((row, index) => {
  row.querySelector("button").addEventListener("click", () => choose(index, false));
});
for (const part of document.querySelectorAll(".part[data-index]")) {
  part.addEventListener("click", () => choose(Number(part.dataset.index), false));
  part.addEventListener("pointerenter", () => show(Number(part.dataset.index)));
  part.addEventListener("pointerleave", () => show(chosen));
}
document.getElementById("closer").addEventListener("click", () => zoom(2));
document.getElementById("farther").addEventListener("click", () => zoom(0.5));
document.getElementById("fit").addEventListener("click", () => zoom(0));
scroll.addEventListener("scroll", drawTicks);
addEventListener("resize", drawTicks);
document.getElementById("zoom").hidden = false;
// What is a little wider than the page is not worth scrolling.
zoom(canvas.clientWidth < 1.5 * scroll.clientWidth ? 0 : 1);
if (buttons.length) choose(0, false);
