// The rounds as rows: counts, and a bar of the time of each stage. Knows no text.

export const STAGES = ["draft", "wire", "queue", "verify"];
// Older rounds leave the table; the figures count all of them.
export const MAX_ROWS = 400;

function cell(text, name = "") {
  const td = document.createElement("td");
  td.className = name;
  td.textContent = text;
  return td;
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
    const times = STAGES.map((stage) => round[`${stage}_ms`]);
    const total = times.reduce((sum, ms) => sum + ms, 0);
    if (total > this.slowest) {
      this.slowest = total;
      for (const part of this.rows.querySelectorAll(".bar span")) this.scale(part);
    }
    this.rows.prepend(this.row(round, times, total));
    if (this.rows.childElementCount > MAX_ROWS) this.rows.lastElementChild.remove();
    this.onCount(this.rows.childElementCount);
  }

  row(round, times, total) {
    const tr = document.createElement("tr");
    const bars = cell("", "bars");
    bars.append(this.bar(times));
    tr.append(
      cell(round.round),
      cell(round.num_speculative_tokens),
      cell(`${round.accepted} of ${round.proposed}`),
      bars,
      ...times.map((ms) => cell(ms.toFixed(1), "number")),
      cell(total.toFixed(1)),
    );
    return tr;
  }

  bar(times) {
    const bar = document.createElement("div");
    bar.className = "bar";
    bar.setAttribute("role", "img");
    bar.title = STAGES.map((stage, index) => `${stage} ${times[index].toFixed(1)} ms`).join(", ");
    bar.setAttribute("aria-label", bar.title);
    STAGES.forEach((stage, index) => {
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
