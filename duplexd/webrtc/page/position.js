// Where the ear is, in RTP timestamps of the downlink (u32, 48 kHz).
//
// The newest synchronization source says which packet was last decoded, and when. Statistics add how long the output
// device still holds a sample. Lifetime means of these statistics are useless; differences over 200 ms are right.
//
// A position that moves is the source's timestamp plus its age. One that stands, because the element was muted, is not:
// sound leaves the jitter buffer in steps of 10 ms, and what has left when the element is muted is heard. So the age says
// no more than how many steps have left, and the statistics tell where the steps lie: what was inserted and concealed,
// less what was removed, shifts them (`phaseMs`). Measured at a loudspeaker, 130 cuts in 8 sessions: with the phase every
// cut lies on the steps within 0.3 ms, and the middle of two steps is right within 5 ms but for one in a hundred. After a
// lost packet the counters do not add up any more, and the phase is unknown.

export const RTP_PER_MS = 48;
const AGE_MAX_MS = 5000;

/** Signed distance a - b of two u32 timestamps, right across a wrap. */
export function rtpDistance(a, b) {
  return (a - b) | 0;
}

export function rtpAdd(rtp, ms) {
  return (rtp + Math.round(ms * RTP_PER_MS)) >>> 0;
}

/** Milliseconds since a source's timestamp. Chromium counts from 1970, others from the page's start: take what fits. */
export function ageMs(timestamp, now, origin) {
  const age = Math.abs(origin + now - timestamp) < Math.abs(now - timestamp) ? origin + now - timestamp : now - timestamp;
  return Math.min(AGE_MAX_MS, Math.max(0, age));
}

const STEP_SAMPLES = 480; // NetEq hands out 10 ms at a time
const STEPS_AT_MS = 1.8; // a decoded packet's sound against its timestamp, phase 0
const PHASE_UNKNOWN_MS = 9.3; // the most frequent one after losses
const BOUND_MS = 6;
const BOUND_UNKNOWN_MS = 20;

/** What had been let through behind the newest source's timestamp when the element was muted, and how sure that is. */
export function passed(age, phaseMs) {
  const middle = age < 21 ? 5 : age < 30 ? 10 : 15; // of the steps that may have left by then
  const known = phaseMs !== null && age < 40; // older: packets are missing
  return {
    passed_ms: middle + STEPS_AT_MS - (known ? phaseMs : PHASE_UNKNOWN_MS),
    bound_ms: known ? BOUND_MS : BOUND_UNKNOWN_MS,
  };
}

/** Output device and jitter buffer delay in milliseconds, from two readings of getStats(). */
export class DelayMeter {
  constructor() {
    this.playoutMs = 0;
    this.bufferMs = 0;
    this.phaseMs = null; // where the steps of the jitter buffer lie, 0..10; null when that is unknown
    this.playoutLast = null;
    this.bufferLast = null;
  }

  /** @param {Iterable<object>} reports the values of one RTCStatsReport */
  take(reports) {
    for (const report of reports) {
      if (report.type === "media-playout") this.takePlayout(report);
      if (report.type === "inbound-rtp" && report.kind === "audio") {
        this.takeBuffer(report);
        this.phaseMs = phaseOf(report);
      }
    }
  }

  takePlayout({ totalPlayoutDelay: delay, totalSamplesCount: count }) {
    const ms = difference(this.playoutLast, delay, count);
    if (ms !== null) this.playoutMs = ms;
    this.playoutLast = { delay, count };
  }

  takeBuffer({ jitterBufferDelay: delay, jitterBufferEmittedCount: count }) {
    const ms = difference(this.bufferLast, delay, count);
    if (ms !== null) this.bufferMs = ms;
    this.bufferLast = { delay, count };
  }
}

/** Milliseconds by which stretching, squeezing and concealing have shifted the steps; null when they cannot tell. */
function phaseOf(report) {
  const { insertedSamplesForDeceleration: more, removedSamplesForAcceleration: less, concealedSamples: made } = report;
  const shift = more - less + made;
  if (report.packetsLost !== 0 || report.packetsDiscarded !== 0 || !Number.isFinite(shift)) return null;
  return (((shift % STEP_SAMPLES) + STEP_SAMPLES) % STEP_SAMPLES) / RTP_PER_MS;
}

/** Mean delay in ms of what passed between two readings; null when nothing did or the counters began anew. */
function difference(last, delay, count) {
  if (!last || !(count > last.count) || !(delay >= last.delay)) return null;
  return ((delay - last.delay) / (count - last.count)) * 1000;
}
