// The cursors as they are shown: ten messages a second become a movement at the screen's rate.

export const TICKS_PER_MS = 48;
const STALE_MS = 600; // older than that and the bar stands still instead of guessing
const SNAP_TICKS = 250 * TICKS_PER_MS; // a correction larger than this is shown at once; a smaller one never runs backwards

export class ShownCursor {
  constructor() {
    this.clear();
  }

  clear() {
    this.last = null;
    this.at = 0;
    this.shown = null;
  }

  take(message, now) {
    if (this.last && message.epoch < this.last.epoch) return; // late: its epoch is over
    if (this.last && message.epoch > this.last.epoch) this.shown = null;
    this.last = message;
    this.at = now;
  }

  /** Playback in ticks at `now`; `moving` while the character is speaking and not muted. Null before any message. */
  playback(now, moving) {
    if (!this.last) return null;
    const { playback, delivery } = this.last;
    const elapsed = moving ? Math.min(STALE_MS, Math.max(0, now - this.at)) : 0;
    // Nothing can be heard that was not delivered, whatever the clock says.
    const value = Math.min(playback + elapsed * TICKS_PER_MS, Math.max(playback, delivery));
    const back = this.shown === null ? Infinity : this.shown - value;
    if (back <= 0 || back > SNAP_TICKS) this.shown = value;
    return this.shown;
  }

  /** Milliseconds of each thing, relative to playback. */
  ahead(now, moving) {
    const playback = this.playback(now, moving);
    if (playback === null) return null;
    const { generation, delivery, budget, assumed } = this.last;
    const ms = (ticks) => Math.max(0, ticks - playback) / TICKS_PER_MS;
    return { playback, lookahead: ms(generation), delivered: ms(delivery), budget: budget / TICKS_PER_MS, assumed };
  }
}
