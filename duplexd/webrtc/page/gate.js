// Decides whether the character can be heard: the only place that mutes and unmutes the audio element.
//
// 1. Muting is at once and remembers the position: what was heard ends there, whatever is decoded after it.
// 2. Unmuting waits for an RTP timestamp, so that nothing of the old epoch is heard and nothing of the new one is lost.
//    The element's volume acts where samples leave the jitter buffer, before the output device: the device's delay is
//    therefore not subtracted. What leaves the jitter buffer lags the reported source by about LEAD_MS.
// 3. An order acts once, whatever the number of its copies; a hold that arrives after its own resume or flush is over.
// 4. No mute is for ever. Each reason has a deadline, and the page says in its log when one was needed.
//
//    open --onset--> self-muted --hold--> held --resume/flush--> waiting for rtp --reached--> open
//      \--------------hold---------------/  \------------------- deadline ------------------> open

import { RTP_PER_MS, rtpAdd, rtpDistance } from "./position.js";

export const LEAD_MS = 4; // NetEq plays 10 ms at a time: at 12 the first 10 ms of a reply were lost, at 6 some of the old one was heard
export const DEADLINES_MS = Object.freeze({ onset: 2500, hold: 5000, wait: 3000 });
const ORDERS_REMEMBERED = 256;

export class Gate {
  /**
   * @param {object} parts
   * @param {(muted: boolean) => void} parts.setMuted mutes the element, synchronously
   * @param {() => null|{rtp: number, age_ms: number}} parts.position null before any packet
   * @param {(kind: string, detail: object) => void} parts.note one line for the page's log
   */
  constructor({ setMuted, position, note }) {
    this.setMuted = setMuted;
    this.position = position;
    this.note = note;
    this.reset();
  }

  reset() {
    this.muted = false;
    this.frozen = null; // position at which the sound ended
    this.hold = 0; // id of the hold in force
    this.settled = 0; // newest hold that has had its resume or flush
    this.target = null; // RTP timestamp at which to unmute
    this.deadline = null;
    this.epoch = 0;
    this.orders = new Set();
    this.setMuted(false);
  }

  /** The page's own detector heard a person: mute before anything else. Returns the position heard, null if muted before. */
  onset(now) {
    if (this.muted) return null; // the server has the word already, and its order stands
    this.mute(now, DEADLINES_MS.onset);
    return this.frozen;
  }

  /** A hold, resume or flush of the fast channel. Returns true the first time, false for a copy. */
  order(message, now) {
    if (this.orders.has(message.id)) return false;
    this.orders.add(message.id);
    if (this.orders.size > ORDERS_REMEMBERED) this.orders.delete(this.orders.values().next().value);
    this.epoch = Math.max(this.epoch, message.epoch);
    if (message.t === "hold") this.takeHold(message, now);
    else this.takeOpening(message, now);
    return true;
  }

  takeHold({ hold }, now) {
    if (hold <= this.settled) return this.note("hold-over", { hold });
    this.hold = hold;
    this.target = null;
    this.mute(now, DEADLINES_MS.hold);
    return undefined;
  }

  takeOpening({ t, hold, rtp }, now) {
    if (this.hold && hold && hold < this.hold) return this.note("order-over", { order: t, hold });
    this.settled = Math.max(this.settled, hold, this.hold);
    this.hold = 0;
    this.mute(now, DEADLINES_MS.wait);
    this.target = rtp >>> 0;
    this.check(now);
    return undefined;
  }

  mute(now, forMs) {
    if (!this.muted) {
      this.muted = true;
      this.setMuted(true);
      this.frozen = this.position();
      this.note("muted", { ...this.frozen });
    }
    this.deadline = now + forMs;
  }

  /** RTP timestamp at the point where the element's volume acts; null before any packet. */
  playing() {
    const at = this.position();
    return at ? rtpAdd(at.rtp, at.age_ms - LEAD_MS) : null;
  }

  /** Opens the gate when its timestamp or a deadline has come. Returns true if it opened now. */
  check(now) {
    if (!this.muted) return false;
    const playing = this.target === null ? null : this.playing();
    const past = playing === null ? -1 : rtpDistance(playing, this.target);
    if (past >= 0) return this.open("unmuted", { rtp: this.target, late_ms: past / RTP_PER_MS });
    if (now < this.deadline) return false;
    return this.open("unmuted-by-deadline", { hold: this.hold, rtp: this.target, playing });
  }

  open(kind, detail) {
    // What comes after a deadline without an answer must not be muted again by a late copy of the same hold.
    this.settled = Math.max(this.settled, this.hold);
    this.hold = 0;
    this.target = null;
    this.deadline = null;
    this.frozen = null;
    this.muted = false;
    this.setMuted(false);
    this.note(kind, detail);
    return true;
  }

  /** What is being heard, as `pos` wants it: while muted the position stands where the sound ended. */
  heard() {
    return this.muted ? this.frozen : this.position();
  }
}
