// One run on the page: its text with origins, its figures, its rounds. Knows no network.

const STAGES = ["draft", "wire", "queue", "verify"];
// Older rounds leave the table; the figures count all of them.
export const MAX_ROWS = 400;

export class RunView {
  // `rows`: the table body for its rounds, null to show none.
  constructor(section, rows, now = () => performance.now()) {
    this.textBox = section.querySelector("[data-text]");
    this.figures = new Map(
      [...section.querySelectorAll("[data-figure]")].map((dd) => [dd.dataset.figure, dd]),
    );
    this.rows = rows;
    this.now = now;
    this.clear();
  }

  clear() {
    this.textBox.replaceChildren();
    this.rows?.replaceChildren();
    for (const dd of this.figures.values()) dd.textContent = "-";
    this.text = "";
    this.tokens = 0;
    this.rounds = this.proposed = this.accepted = 0;
    this.slowest = 1;
    this.began = this.first = this.ended = null;
    this.usage = null;
  }

  begin() {
    this.clear();
    this.began = this.now();
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const round of chunk.speculation?.rounds ?? []) this.addRound(round);
    const pieces = chunk.speculation?.pieces ?? [];
    if (pieces.length && this.first === null) this.first = this.now();
    const atEnd = this.isAtEnd();
    for (const piece of pieces) this.addPiece(piece);
    if (atEnd) this.textBox.scrollTop = this.textBox.scrollHeight;
    this.show();
  }

  isAtEnd() {
    const box = this.textBox;
    return box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  }

  addPiece({ text, origin }) {
    if (!text) return;
    this.text += text;
    const span = document.createElement("span");
    span.className = `token ${origin}`;
    span.title = origin;
    span.textContent = text;
    this.textBox.append(span);
  }

  addRound(round) {
    this.rounds += 1;
    this.proposed += round.proposed;
    this.accepted += round.accepted;
    this.figures.get("k").textContent = String(round.num_speculative_tokens);
    if (!this.rows) return;
    const times = STAGES.map((stage) => round[`${stage}_ms`]);
    const total = times.reduce((sum, ms) => sum + ms, 0);
    if (total > this.slowest) {
      this.slowest = total;
      for (const bar of this.rows.querySelectorAll(".bar")) this.scale(bar);
    }
    this.rows.prepend(this.row(round, times, total));
    if (this.rows.childElementCount > MAX_ROWS) this.rows.lastElementChild.remove();
  }

  row(round, times, total) {
    const tr = document.createElement("tr");
    const cell = (text) => {
      const td = document.createElement("td");
      td.textContent = text;
      tr.append(td);
      return td;
    };
    cell(round.round);
    cell(round.num_speculative_tokens);
    cell(`${round.accepted} of ${round.proposed}`);
    const bar = document.createElement("div");
    bar.className = "bar";
    bar.setAttribute("role", "img");
    bar.setAttribute(
      "aria-label",
      STAGES.map((stage, index) => `${stage} ${times[index].toFixed(1)} ms`).join(", "),
    );
    bar.title = bar.getAttribute("aria-label");
    STAGES.forEach((stage, index) => {
      const part = document.createElement("span");
      part.className = stage;
      part.dataset.ms = times[index];
      bar.append(part);
    });
    this.scale(bar);
    const bars = cell("");
    bars.className = "bars";
    bars.append(bar);
    cell(total.toFixed(1));
    return tr;
  }

  scale(bar) {
    for (const part of bar.children) {
      part.style.width = `${(100 * part.dataset.ms) / this.slowest}%`;
    }
  }

  end() {
    this.ended = this.now();
    this.show();
  }

  get seconds() {
    return this.began === null ? 0 : ((this.ended ?? this.now()) - this.began) / 1000;
  }

  // Of the whole answer, once its usage is known; until then as many as its rounds made.
  get speed() {
    const tokens = this.usage?.completion_tokens ?? this.rounds + this.accepted;
    return this.seconds > 0 ? tokens / this.seconds : 0;
  }

  show() {
    const set = (name, text) => (this.figures.get(name).textContent = text);
    set("speed", this.speed.toFixed(1));
    if (this.first !== null) set("first", `${Math.round(this.first - this.began)} ms`);
    const counts = this.usage?.speculation;
    const [proposed, accepted] = counts
      ? [counts.proposed, counts.accepted]
      : [this.proposed, this.accepted];
    set("rate", proposed ? `${Math.round((100 * accepted) / proposed)} %` : "-");
    if (this.rounds) set("length", (1 + this.accepted / this.rounds).toFixed(2));
  }
}
