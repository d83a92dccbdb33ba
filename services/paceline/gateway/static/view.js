// One run on the page: its text with origins and its figures. Knows no network.

import { sourceMark } from "./rounds.js";

const ORIGINS = {
  accepted: "accepted: proposed by {}, kept by the target",
  recovered: "recovered: the target's, for a rejected proposal",
  bonus: "bonus: the target's, after a whole accepted block",
  plain: "plain: the target's, with no proposal",
};
const SOURCES = {
  model: "the draft model",
  ngram: "the ngram lookup",
  suffix: "the suffix lookup",
  medusa: "the Medusa heads",
};

export class RunView {
  // `waterfall` gets the rounds, null: nobody does.
  constructor(section, waterfall, now = () => performance.now()) {
    this.textBox = section.querySelector("[data-text]");
    this.state = section.querySelector("[data-state]");
    this.totals = section.querySelector("[data-totals]");
    this.sourceList = section.querySelector("[data-sources]");
    this.figures = new Map(
      [...section.querySelectorAll("[data-figure]")].map((dd) => [dd.dataset.figure, dd]),
    );
    this.waterfall = waterfall;
    this.now = now;
    this.clear();
  }

  clear(state = "") {
    this.textBox.replaceChildren();
    this.totals.textContent = "";
    this.waterfall?.clear();
    for (const dd of this.figures.values()) dd.textContent = "-";
    this.state.textContent = state;
    // All that the model wrote, and what of it belongs into the conversation: not its reasoning.
    this.text = this.content = "";
    this.rounds = this.proposed = this.accepted = 0;
    // Source -> proposals of it that were accepted, and of how many.
    this.sources = new Map();
    this.showSources();
    this.began = this.first = this.ended = this.usage = null;
  }

  begin() {
    this.clear("running");
    this.began = this.now();
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    this.content += chunk.choices[0]?.delta.content ?? "";
    for (const round of chunk.speculation?.rounds ?? []) this.addRound(round);
    const pieces = (chunk.speculation?.pieces ?? []).filter((piece) => piece.text);
    if (pieces.length) this.first ??= this.now();
    this.addPieces(pieces);
    this.show();
  }

  // The text follows its end, unless the reader has scrolled away from it.
  addPieces(pieces) {
    const box = this.textBox;
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    for (const { text, origin, source } of pieces) {
      this.text += text;
      const span = document.createElement("span");
      span.className = `token ${origin} ${source}`.trim();
      span.title = (ORIGINS[origin] ?? origin).replace("{}", SOURCES[source] ?? "a draft");
      span.textContent = text;
      box.append(span);
    }
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }

  addRound(round) {
    this.rounds += 1;
    this.proposed += round.proposed;
    this.accepted += round.accepted;
    if (round.source) {
      const [accepted, proposed] = this.sources.get(round.source) ?? [0, 0];
      this.sources.set(round.source, [accepted + round.accepted, proposed + round.proposed]);
      this.showSources();
    }
    this.set("k", String(round.num_speculative_tokens));
    this.waterfall?.add(round);
  }

  showSources() {
    if (!this.sourceList) return;
    this.sourceList.hidden = this.sources.size === 0;
    const items = [...this.sources].map(([source, [accepted, proposed]]) => {
      const item = document.createElement("li");
      item.append(sourceMark(source), ` ${accepted} of ${proposed}`);
      return item;
    });
    this.sourceList.replaceChildren(...items);
  }

  // What never began is no longer waited for.
  giveUp() {
    if (this.began === null) this.state.textContent = "";
  }

  end(state) {
    this.ended = this.now();
    this.state.textContent = state;
    this.show();
  }

  // So many until the usage is known: an accepted token each, and one of the target's per round.
  get tokens() {
    return this.usage?.completion_tokens ?? this.rounds + this.accepted;
  }

  get speed() {
    if (this.began === null) return 0;
    const seconds = ((this.ended ?? this.now()) - this.began) / 1000;
    return seconds > 0 ? this.tokens / seconds : 0;
  }

  set(name, text) {
    const dd = this.figures.get(name);
    if (dd) dd.textContent = text;
  }

  show() {
    if (!this.rounds) return;
    this.set("speed", this.speed.toFixed(1));
    if (this.first !== null) this.set("first", `${Math.round(this.first - this.began)} ms`);
    const whole = this.usage?.speculation;
    const { rounds, proposed, accepted } = whole ?? this;
    this.set("rounds", String(rounds));
    this.set("rate", proposed ? `${Math.round((100 * accepted) / proposed)} %` : "-");
    const length = whole?.mean_accepted_length ?? whole?.mean_acceptance_length;
    this.set("length", (length ?? 1 + accepted / rounds).toFixed(2));
    const drafted = proposed ? `; ${accepted} of ${proposed} proposed tokens accepted` : "";
    this.totals.textContent = `${this.tokens} tokens in ${rounds} rounds${drafted}.`;
  }
}
