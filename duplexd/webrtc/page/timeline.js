// The timeline bar: what has been heard, what is on its way, what is made ahead, and how far ahead it may be made.
// It stands still with nothing to show and moves with the character's voice; with reduced motion it steps.

import { TICKS_PER_MS } from "./cursor.js";

const PAST_MS = 1400;
const BAR_TOP = 34;
const BAR_HEIGHT = 14;

export class Timeline {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.readColours();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.readColours());
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    this.colours = {
      ink: read("--ink"), pale: read("--pale"), line: read("--line"), accent: read("--accent"), surface: read("--surface"),
    };
    this.font = getComputedStyle(document.body).fontFamily;
  }

  /** Fits the bitmap to the element and the screen's pixels; returns CSS pixels. */
  fit() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const scale = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * scale)) this.canvas.width = Math.round(width * scale);
    if (this.canvas.height !== Math.round(height * scale)) this.canvas.height = Math.round(height * scale);
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.context.clearRect(0, 0, width, height);
    return { width, height };
  }

  /**
   * @param {object|null} ahead of ShownCursor.ahead
   * @param {object[]} words of the live response, ticks
   */
  draw(ahead, words) {
    const { width } = this.fit();
    if (!width) return;
    const future = Math.max(2400, (ahead?.budget ?? 0) + 500);
    const perMs = width / (PAST_MS + future);
    const x = (ms) => (PAST_MS + ms) * perMs;
    this.rail(width);
    if (!ahead) return;
    this.ticks(ahead.playback, x, width);
    this.fill(0, x(0), 0.22);
    this.fill(x(0), x(ahead.lookahead), 0.38);
    this.fill(x(0), x(ahead.delivered), 1);
    this.budget(x(ahead.budget));
    this.words(words, ahead.playback, x, width);
    this.head(x(0));
  }

  rail(width) {
    this.context.fillStyle = this.colours.line;
    this.round(0, width);
  }

  round(from, to) {
    this.context.beginPath();
    this.context.roundRect(from, BAR_TOP, Math.max(0, to - from), BAR_HEIGHT, 4);
    this.context.fill();
  }

  fill(from, to, alpha) {
    if (to - from < 0.5) return;
    this.context.globalAlpha = alpha;
    this.context.fillStyle = this.colours.accent;
    this.round(from, to);
    this.context.globalAlpha = 1;
  }

  ticks(playback, x, width) {
    const step = 500 * TICKS_PER_MS;
    const begin = playback - PAST_MS * TICKS_PER_MS;
    this.context.fillStyle = this.colours.pale;
    for (let at = Math.ceil(begin / step) * step; ; at += step) {
      const where = x((at - playback) / TICKS_PER_MS);
      if (where > width) return;
      this.context.fillRect(where, BAR_TOP + BAR_HEIGHT + 5, 1, at % (2 * step) ? 4 : 7);
    }
  }

  budget(where) {
    this.context.fillStyle = this.colours.ink;
    this.context.fillRect(where - 1, BAR_TOP - 4, 2, BAR_HEIGHT + 8);
  }

  head(where) {
    this.context.fillStyle = this.colours.ink;
    this.context.beginPath();
    this.context.roundRect(where - 1.5, BAR_TOP - 8, 3, BAR_HEIGHT + 16, 1.5);
    this.context.fill();
  }

  words(words, playback, x, width) {
    this.context.textBaseline = "alphabetic";
    let free = -Infinity; // a word that would run into the one before is left out: the transcript has it
    for (const word of words) {
      const from = x((word.start - playback) / TICKS_PER_MS);
      const to = x((word.end - playback) / TICKS_PER_MS);
      const now = word.start <= playback && playback < word.end;
      if (to < 0 || from < Math.max(0, free)) continue;
      if (from > width) return;
      this.context.font = `${now ? 600 : 400} 13px ${this.font}`;
      this.context.fillStyle = now ? this.colours.accent : word.end <= playback ? this.colours.ink : this.colours.pale;
      this.context.fillText(word.text.trim(), from, BAR_TOP - 14);
      free = from + this.context.measureText(word.text.trim()).width + 6;
    }
  }
}
