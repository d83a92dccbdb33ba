// The rounds as rows: counts, and a bar of the time of each stage. Knows no text.

// In the order in which a round goes through them; together they are the round.
export const STAGES = {
  wire_back: "wire back",
  rewind: "rewind",
  draft: "draft",
  wire_out: "wire out",
  window: "window",
  queue: "queue",
  verify: "verify",
  sample: "sample",
};
// Older rounds leave the table; the figures count all of them.
export const MAX_ROWS = 400;

function cell(text, name = "") {
  const td = document.createElement("td");
  td.className = name;
  td.textContent = text;
  return td;
}

// What made proposals, marked as in the text.
export function sourceMark(source) {
  const mark = document.createElement("span");
  mark.className = `source ${source}`;
  mark.textContent = source;
  return mark;
}

export class Waterfall {
  constructor(rows, onCount) {
    this.rows = rows;
    this.onCount = onCount;
    this.clear();
  }

  clear() {
    this.rows.replaceChildren();
    this.slowest = 1;
    this.onCount(0);
  }

  add(round) {
    const times = Object.keys(STAGES).map((stage) => round[`${stage}_ms`]);
    if (round.wall_ms > this.slowest) {
      this.slowest = round.wall_ms;
      for (const part of this.rows.querySelectorAll(".bar span")) this.scale(part);
    }
    this.rows.prepend(this.row(round, times));
    if (this.rows.childElementCount > MAX_ROWS) this.rows.lastElementChild.remove();
    this.onCount(this.rows.childElementCount);
  }

  row(round, times) {
    const tr = document.createElement("tr");
    const bars = cell("", "bars");
    bars.append(this.bar(times));
    const source = cell(round.source ? "" : "-");
    if (round.source) source.append(sourceMark(round.source));
    tr.append(
      cell(round.round),
      source,
      cell(round.num_speculative_tokens),
      cell(`${round.accepted} of ${round.proposed}`),
      bars,
      ...times.map((ms) => cell(ms.toFixed(1), "number")),
      cell(round.wall_ms.toFixed(1)),
    );
    return tr;
  }

  bar(times) {
    const bar = document.createElement("div");
    bar.className = "bar";
    bar.setAttribute("role", "img");
    const said = Object.values(STAGES).map((name, at) => `${name} ${times[at].toFixed(1)} ms`);
    bar.title = said.join(", ");
    bar.setAttribute("aria-label", bar.title);
    Object.keys(STAGES).forEach((stage, index) => {
      const part = document.createElement("span");
      part.className = stage;
      part.dataset.ms = times[index];
      this.scale(part);
      bar.append(part);
    });
    return bar;
  }

  scale(part) {
    part.style.width = `${(100 * part.dataset.ms) / this.slowest}%`;
  }
}
