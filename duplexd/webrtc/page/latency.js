// Where the time of the last turns went: one stacked bar a turn on a common scale, and a legend that sums to the total.

const TURNS_MAX = 5;
const ROUNDING_MS = 1;

/** Parts that sum to the total: a rest the server did not name is shown as such, never hidden in a neighbour. */
export function complete({ parts, total_ms: total }) {
  const rest = total - parts.reduce((sum, [, ms]) => sum + ms, 0);
  return Math.abs(rest) < ROUNDING_MS ? parts : [...parts, ["unaccounted", rest]];
}

export function plain(name) {
  const words = name.replaceAll("_", " ");
  return words.charAt(0).toUpperCase() + words.slice(1);
}

export class LatencyView {
  constructor({ bars, legend, empty }) {
    this.bars = bars;
    this.legend = legend;
    this.empty = empty;
    this.clear();
  }

  clear() {
    this.turns = [];
    this.names = [];
    this.render();
  }

  take(message) {
    const turn = { ...message, parts: complete(message) };
    for (const [name] of turn.parts) if (!this.names.includes(name)) this.names.push(name);
    this.turns = [...this.turns, turn].slice(-TURNS_MAX);
    this.render();
  }

  shade(name) {
    const share = this.names.length > 1 ? this.names.indexOf(name) / (this.names.length - 1) : 0;
    return `color-mix(in oklab, var(--accent) ${Math.round(100 - 78 * share)}%, var(--shade-end))`;
  }

  render() {
    this.empty.hidden = this.turns.length > 0;
    const longest = Math.max(...this.turns.map((t) => t.total_ms), 1);
    this.bars.replaceChildren(...this.turns.map((turn) => this.bar(turn, longest)));
    this.legend.replaceChildren(...(this.turns.length ? this.legendOf(this.turns.at(-1)) : []));
  }

  bar(turn, longest) {
    const row = element("li", "turn");
    row.append(element("span", "turn-name", `Turn ${turn.turn}`));
    const bar = element("span", "turn-bar");
    bar.setAttribute("aria-hidden", "true");
    for (const [name, ms] of turn.parts) if (ms > 0) bar.append(this.part(name, ms, longest));
    row.append(bar, element("span", "turn-total", `${Math.round(turn.total_ms)} ms`));
    return row;
  }

  part(name, ms, longest) {
    const part = element("span", "part");
    part.style.width = `${(Math.max(0, ms) / longest) * 100}%`;
    part.style.background = this.shade(name);
    part.title = `${plain(name)}: ${Math.round(ms)} ms`;
    return part;
  }

  legendOf(turn) {
    const items = turn.parts.map(([name, ms]) => {
      const item = element("li", "legend-item");
      const swatch = element("span", "swatch");
      swatch.style.background = this.shade(name);
      item.append(swatch, element("span", "", plain(name)), element("span", "ms", `${Math.round(ms)} ms`));
      return item;
    });
    const total = element("li", "legend-item legend-total");
    total.append(element("span", "", `Turn ${turn.turn}, total`), element("span", "ms", `${Math.round(turn.total_ms)} ms`));
    return [...items, total];
  }
}

function element(tag, className, text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}
