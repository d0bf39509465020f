// A connection that broke is made anew: after 1, 2 and 4 seconds, and then it is the person's turn.

export const DELAYS_MS = [1_000, 2_000, 4_000];
const PASSING = new Set(["unreachable", "busy", "media", "lost"]); // what may be otherwise in a moment

export class Again {
  /**
   * @param {object} setup
   * @param {() => Promise<boolean>} setup.connect raises Trouble; false: the person has left meanwhile
   * @param {(step: {waits?: number, tries?: number, done?: boolean, error?: Error}) => void} setup.tell
   *   `waits`: ms until attempt `tries` of DELAYS_MS.length; without: it is being made; `done`: connected; `error`: given up
   * @param {(run: () => void, ms: number) => any} setup.after  @param {(timer: any) => void} setup.stop
   */
  constructor({ connect, tell, after, stop }) {
    Object.assign(this, { connect, tell, after, stop });
    this.round = 0; // what is left over of an earlier one acts no more
    this.active = false;
    this.timer = null;
  }

  /** Waiting for its time, with nothing torn down yet. */
  get waiting() {
    return this.timer !== null;
  }

  begin() {
    if (this.active) return;
    this.active = true;
    this.wait(0, ++this.round);
  }

  /** The connection lives after all, or the person has decided otherwise. */
  cancel() {
    if (this.waiting) this.stop(this.timer);
    this.timer = null;
    this.active = false;
    this.round += 1;
  }

  wait(index, round) {
    this.tell({ waits: DELAYS_MS[index], tries: index + 1 });
    this.timer = this.after(() => this.attempt(index, round), DELAYS_MS[index]);
  }

  async attempt(index, round) {
    this.timer = null;
    this.tell({ tries: index + 1 });
    let failed = null;
    try {
      if (!(await this.connect())) return;
    } catch (error) {
      failed = error;
    }
    if (round !== this.round) return;
    if (failed && PASSING.has(failed.code) && index + 1 < DELAYS_MS.length) return this.wait(index + 1, round);
    this.cancel();
    this.tell(failed ? { error: failed } : { done: true });
  }
}
