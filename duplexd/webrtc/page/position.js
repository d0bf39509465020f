// Where the ear is, in RTP timestamps of the downlink (u32, 48 kHz).
//
// The newest synchronization source says which packet last left the jitter buffer, and when. Statistics add how long the
// output device still holds a sample. Lifetime means of these statistics are useless; differences over 200 ms are right.

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

/** Output device and jitter buffer delay in milliseconds, from two readings of getStats(). */
export class DelayMeter {
  constructor() {
    this.playoutMs = 0;
    this.bufferMs = 0;
    this.playoutLast = null;
    this.bufferLast = null;
  }

  /** @param {Iterable<object>} reports the values of one RTCStatsReport */
  take(reports) {
    for (const report of reports) {
      if (report.type === "media-playout") this.takePlayout(report);
      if (report.type === "inbound-rtp" && report.kind === "audio") this.takeBuffer(report);
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

/** Mean delay in ms of what passed between two readings; null when nothing did or the counters began anew. */
function difference(last, delay, count) {
  if (!last || !(count > last.count) || !(delay >= last.delay)) return null;
  return ((delay - last.delay) / (count - last.count)) * 1000;
}
