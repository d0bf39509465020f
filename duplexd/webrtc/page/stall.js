// Whether what comes from the server has stopped: the picture alone, or everything.
//
// 1. The server sends 50 packets of voice a second, silence too, a message a second, and to a page that is seen a picture
//    a second at least, where nothing moves as well. So two seconds without are no pause.
// 2. A picture that stands still is told and no more: decoder or encoder may be slow, and the conversation goes on.
//    Only where voice and messages have stopped too is the connection taken to be broken.
// 3. A page that did not look for a while has itself stood still, and judges nobody: every clock begins anew.

export const STALLED_MS = 2_000;
const BLIND_MS = 1_000; // between two looks; five a second are usual

export class StallWatch {
  constructor() {
    this.lookedAt = null;
    this.voice = new Flow();
    this.picture = new Flow();
    this.anewAt = 0; // nothing before this is anybody's fault but the page's
  }

  /**
   * @param {Iterable<object>} reports the values of one RTCStatsReport  @param {number} now milliseconds
   * @param {{seen: boolean, messageAt: number}} page whether anybody can see it; when its last message came
   * @returns {"none" | "picture" | "all"} what has stopped
   */
  look(reports, now, { seen, messageAt }) {
    if (this.lookedAt === null || now - this.lookedAt > BLIND_MS) this.anewAt = now;
    this.lookedAt = now;
    for (const report of reports) {
      if (report.type !== "inbound-rtp") continue;
      if (report.kind === "audio") this.voice.take(report.packetsReceived, now);
      if (report.kind === "video") this.picture.take(report.framesReceived, now);
    }
    if (!seen) this.picture.at &&= now; // none is made for a hidden page
    const stopped = (at) => at !== null && now - Math.max(at, this.anewAt) >= STALLED_MS;
    if (stopped(this.voice.at) && stopped(messageAt)) return "all";
    return stopped(this.picture.at) ? "picture" : "none";
  }
}

/** When a count last grew; null before its first. */
class Flow {
  constructor() {
    this.count = 0;
    this.at = null;
  }

  take(count, now) {
    if (!(count > this.count)) return;
    this.count = count;
    this.at = now;
  }
}
