// The page's voice detector: is a person speaking into this microphone, and not the character out of the loudspeaker?
//
// 1. Pure: samples in, findings out. No clock, no audio API: the worklet and the node tests run the same file.
// 2. A hop is 10 ms. Levels are dBFS of the band 200-3400 Hz, so that hum and hiss count for little.
// 3. A hop is *voiced* when it stands out of the noise floor, repeats itself at a pitch of 70-400 Hz, does not decay like
//    a click, and is louder than the echo could be. Six voiced hops of the last ten are an onset.
// 4. Echo: the loudest the character was 20-400 ms ago, plus the learned coupling, plus 6 dB must be exceeded. Until the
//    coupling is learned a strong one is assumed: a person must then speak louder, but the character never stops itself.
// 5. Echo cancellation holds a person's first 30-500 ms back while the character speaks (measured in Chromium 156). `TwinDetector`
//    therefore listens to the same microphone without it as well: with headphones, or a weak echo, that ear is faster.
//
//    mic ----> band 8 kHz --+--> level, floor, pitch --> voiced? --> 6 of 10 --> on / off
//    remote -> band 8 kHz --+--> level history --> echo bound ---^

export const HOP_MS = 10;
const SILENT_DB = -100;

export const DEFAULTS = Object.freeze({
  pitchMinHz: 70,
  pitchMaxHz: 400,
  periodicity: 0.58, // white noise peaks near 0.3, vowels lie above 0.8
  keepPeriodicity: 0.42,
  overFloorDb: 8,
  keepOverFloorDb: 5,
  quietestDb: -52, // nothing below this is speech to the microphone
  decayDb: 8, // this much below the loudest of the last 60 ms: a click dying away
  decayHops: 6,
  onsetHops: 6,
  onsetWindow: 10,
  offHops: 30,
  echoMarginDb: 6,
  echoFromHops: 2,
  echoToHops: 40,
  remoteActiveDb: -50,
  couplingStrongDb: -3, // assumed until learned, microphone without echo cancellation
  couplingCancelledDb: -18, // assumed until learned, microphone with echo cancellation
  learnHops: 150,
  learnHopsCancelled: 50,
  couplingHops: 500,
  couplingFloorDb: -60,
  likenessMax: 0.85, // an onset whose envelope follows the character's more closely than this is echo
});

/** One second-order section, RBJ cookbook form. `process` filters one sample. */
class Biquad {
  constructor(kind, hz, rate, q) {
    const w = (2 * Math.PI * hz) / rate;
    const cos = Math.cos(w);
    const alpha = Math.sin(w) / (2 * q);
    const edge = kind === "low" ? 1 - cos : 1 + cos;
    const a0 = 1 + alpha;
    this.b0 = edge / 2 / a0;
    this.b1 = (kind === "low" ? edge : -edge) / a0;
    this.a1 = (-2 * cos) / a0;
    this.a2 = (1 - alpha) / a0;
    this.s1 = 0;
    this.s2 = 0;
  }

  process(x) {
    const y = this.b0 * x + this.s1;
    this.s1 = this.b1 * x - this.a1 * y + this.s2;
    this.s2 = this.b0 * x - this.a2 * y;
    return y;
  }
}

/** Brings any rate down to about 8 kHz, 200-3400 Hz, and keeps the newest `keep` samples. */
class Band {
  constructor(rate, keep) {
    this.step = Math.max(1, Math.floor(rate / 8000));
    this.rate = rate / this.step;
    const top = Math.min(3400, rate * 0.45);
    this.low1 = new Biquad("low", top, rate, 0.541); // the two Q of a fourth-order Butterworth
    this.low2 = new Biquad("low", top, rate, 1.307);
    this.high = new Biquad("high", 200, this.rate, 0.707);
    this.phase = 0;
    this.recent = new Float32Array(keep);
  }

  /** Takes one hop; returns its level in dBFS. A hop that holds a number that is not finite counts as silence. */
  level(samples) {
    const fresh = [];
    for (let i = 0; i < samples.length; i++) {
      const x = Number.isFinite(samples[i]) ? samples[i] : 0;
      const y = this.low2.process(this.low1.process(x));
      if (++this.phase >= this.step) {
        this.phase = 0;
        fresh.push(this.high.process(y));
      }
    }
    this.recent.copyWithin(0, fresh.length);
    this.recent.set(fresh, this.recent.length - fresh.length);
    let energy = 0;
    for (const y of fresh) energy += y * y;
    return toDb(energy / Math.max(1, fresh.length));
  }
}

export function toDb(power) {
  return power > 1e-10 ? 10 * Math.log10(power) : SILENT_DB;
}

/** Highest normalised autocorrelation of the newest `width` samples over lags [from, to]; 0..1. */
export function periodicity(x, width, from, to) {
  const end = x.length;
  const start = end - width;
  let now = 0;
  for (let n = start; n < end; n++) now += x[n] * x[n];
  if (now < 1e-9) return 0;
  let past = 0;
  for (let n = start - from; n < end - from; n++) past += x[n] * x[n];
  let best = 0;
  for (let lag = from; lag <= to; lag++) {
    let dot = 0;
    for (let n = start; n < end; n++) dot += x[n] * x[n - lag];
    if (dot > 0 && past > 1e-9) best = Math.max(best, dot / Math.sqrt(now * past));
    const out = x[end - 1 - lag];
    const into = x[start - 1 - lag];
    past += into * into - out * out;
  }
  return best;
}

/** Lowest smoothed level of the last 1.5 s: speech has gaps that reach it, a fan or a held chord becomes it. */
class NoiseFloor {
  constructor() {
    this.blocks = new Float32Array(15).fill(0);
    this.filled = 0;
    this.hops = 0;
    this.smooth = null;
    this.lowest = 0;
  }

  take(level) {
    this.smooth = this.smooth === null ? level : this.smooth + 0.35 * (level - this.smooth);
    this.lowest = this.hops === 0 ? this.smooth : Math.min(this.lowest, this.smooth);
    if (++this.hops < 10) return;
    this.blocks[this.filled % this.blocks.length] = this.lowest;
    this.filled += 1;
    this.hops = 0;
  }

  /** dBFS; before the first tenth of a second a quiet room is assumed. */
  get db() {
    const count = Math.min(this.filled, this.blocks.length);
    if (count === 0) return -65;
    let lowest = this.hops ? this.lowest : this.blocks[0];
    for (let i = 0; i < count; i++) lowest = Math.min(lowest, this.blocks[i]);
    return lowest;
  }
}

/** How much of what the loudspeaker plays comes back into the microphone, in dB. */
class Echo {
  constructor(options, cancelled) {
    this.options = options;
    this.remote = new Float32Array(128).fill(SILENT_DB);
    this.mic = new Float32Array(128).fill(SILENT_DB);
    this.at = 0;
    this.waiting = []; // learned only if no voice began in the 300 ms after: a person's first syllable is not echo
    this.couplings = [];
    this.seen = 0;
    this.learned = null;
    this.cancelled = cancelled;
  }

  setCancelled(cancelled) {
    if (cancelled === this.cancelled) return;
    this.cancelled = cancelled;
    this.forget();
  }

  forget() {
    this.waiting.length = 0;
    this.couplings.length = 0;
    this.seen = 0;
    this.learned = null;
  }

  take(micDb, remoteDb) {
    this.at = (this.at + 1) % 128;
    this.mic[this.at] = micDb;
    this.remote[this.at] = remoteDb;
  }

  /** The loudest the character was within the time its echo can still arrive, dBFS. */
  get reference() {
    const { echoFromHops, echoToHops } = this.options;
    let loudest = SILENT_DB;
    for (let d = echoFromHops; d <= echoToHops; d++) loudest = Math.max(loudest, this.remote[(this.at - d + 128) % 128]);
    return loudest;
  }

  /** Of the hops before this one. */
  loudestMic(hops) {
    let loudest = SILENT_DB;
    for (let d = 1; d <= hops; d++) loudest = Math.max(loudest, this.mic[(this.at - d + 128) % 128]);
    return loudest;
  }

  get coupling() {
    const { couplingStrongDb, couplingCancelledDb, learnHops, learnHopsCancelled } = this.options;
    const assumed = this.cancelled ? couplingCancelledDb : couplingStrongDb;
    if (this.learned === null) return assumed;
    const needed = this.cancelled ? learnHopsCancelled : learnHops;
    return this.seen < needed ? Math.max(assumed, this.learned) : this.learned;
  }

  /** The level below which a sound may be the character's own, dBFS. */
  get bound() {
    const reference = this.reference;
    return reference < this.options.remoteActiveDb ? SILENT_DB : reference + this.coupling + this.options.echoMarginDb;
  }

  learn(micDb) {
    const reference = this.reference;
    if (reference < this.options.remoteActiveDb) return;
    this.waiting.push(micDb - reference);
    if (this.waiting.length > 30) this.admit(this.waiting.shift());
  }

  admit(coupling) {
    this.couplings.push(coupling);
    if (this.couplings.length > this.options.couplingHops) this.couplings.shift();
    this.seen += 1;
    if (this.seen % 10 === 0) this.estimate();
  }

  estimate() {
    const sorted = Float32Array.from(this.couplings).sort();
    const high = sorted[Math.floor(sorted.length * 0.95)];
    this.learned = Math.min(0, Math.max(this.options.couplingFloorDb, high));
  }

  /** Best correlation of the microphone's envelope with the character's, over 400 ms and all echo delays; -1..1. */
  get likeness() {
    let best = -1;
    for (let d = this.options.echoFromHops; d <= this.options.echoToHops; d++) best = Math.max(best, this.envelopes(d));
    return best;
  }

  envelopes(delay) {
    let a = 0, b = 0, aa = 0, bb = 0, ab = 0;
    const n = 40;
    for (let i = 0; i < n; i++) {
      const x = Math.max(-65, this.mic[(this.at - i + 128) % 128]);
      const y = Math.max(-65, this.remote[(this.at - i - delay + 256) % 128]);
      a += x; b += y; aa += x * x; bb += y * y; ab += x * y;
    }
    const spread = Math.sqrt((aa - (a * a) / n) * (bb - (b * b) / n));
    return spread > 1e-6 ? (ab - (a * b) / n) / spread : 0;
  }
}

/**
 * Hop by hop detector.
 * @param {{rate: number, echoCancellation?: boolean, options?: object}} setup rate of both inputs in Hz, at least 8000
 */
export class VoiceDetector {
  constructor({ rate, echoCancellation = false, options = {} }) {
    if (!(rate >= 8000)) throw new RangeError(`the voice detector needs at least 8000 Hz, got ${rate}`);
    this.options = { ...DEFAULTS, ...options };
    this.hopSamples = Math.round((rate * HOP_MS) / 1000);
    const analysis = rate / Math.max(1, Math.floor(rate / 8000));
    this.lagFrom = Math.floor(analysis / this.options.pitchMaxHz);
    this.lagTo = Math.ceil(analysis / this.options.pitchMinHz);
    this.width = Math.round(analysis * 0.024);
    this.mic = new Band(rate, this.width + this.lagTo + 2);
    this.remote = new Band(rate, 1 + Math.ceil(analysis * 0.011));
    this.floor = new NoiseFloor();
    this.echo = new Echo(this.options, echoCancellation);
    this.voicedRun = new Uint8Array(this.options.onsetWindow);
    this.hops = 0;
    this.on = false;
    this.quietHops = 0;
    this.wasPlaying = false;
    this.onsetLikeness = -1;
    this.onsetCoupling = SILENT_DB;
  }

  setEchoCancellation(on) {
    this.echo.setCancelled(on);
  }

  /**
   * The front end called the last onset a false alarm. It teaches the echo guard only if that onset also moved like the
   * character's own voice: an "mhm" of the person must not make the next real interruption harder.
   */
  falseAlarm() {
    if (this.onsetLikeness < 0.6 || this.onsetCoupling <= this.echo.coupling) return;
    const copies = Math.ceil(this.options.couplingHops * 0.06);
    for (let i = 0; i < copies; i++) this.echo.admit(this.onsetCoupling);
    this.echo.estimate();
  }

  /**
   * @param {Float32Array} mic one hop
   * @param {Float32Array|null} remote one hop of what the character plays; null when it is not there
   * @param {boolean} audible false while the element is muted: then nothing of `remote` reaches the room
   * @returns {{micDb: number, remoteDb: number, playing: boolean, voiced: boolean, event: null|"on"|"off", onsetHops: number}}
   *   `onsetHops`: how many hops ago the first voiced hop of an "on" was; "on" comes again when the character begins to
   *   play into a person who is still speaking.
   */
  hop(mic, remote, audible = true) {
    const micDb = this.mic.level(mic);
    const remoteDb = remote && audible ? this.remote.level(remote) : SILENT_DB;
    this.echo.take(micDb, remoteDb);
    const voiced = this.isVoiced(micDb);
    this.floor.take(micDb);
    const playing = audible && this.recentRemote() > this.options.remoteActiveDb;
    const event = this.decide(voiced, playing);
    const again = event === null && this.on && playing && !this.wasPlaying && this.count() >= this.options.onsetHops;
    // Remember "playing" only once it has been answered: the person's words may need a few hops to stand out of the echo.
    this.wasPlaying = playing && (this.wasPlaying || !this.on || again || event === "on");
    if (!this.on) this.echo.learn(micDb);
    if (event === "on") this.noteOnset(micDb);
    return { micDb, remoteDb, playing, voiced, event: again ? "on" : event, onsetHops: this.sinceFirst() };
  }

  isVoiced(micDb) {
    const o = this.options;
    const above = this.on ? o.keepOverFloorDb : o.overFloorDb;
    if (micDb < o.quietestDb || micDb < this.floor.db + above) return false;
    if (micDb < this.echo.loudestMic(o.decayHops) - o.decayDb || micDb < this.echo.bound) return false;
    const wanted = this.on ? o.keepPeriodicity : o.periodicity;
    return periodicity(this.mic.recent, this.width, this.lagFrom, this.lagTo) >= wanted;
  }

  decide(voiced, playing) {
    this.voicedRun[this.hops % this.options.onsetWindow] = voiced ? 1 : 0;
    this.hops += 1;
    this.quietHops = voiced ? 0 : this.quietHops + 1;
    if (!this.on && this.count() >= this.options.onsetHops) {
      if (playing && this.echo.likeness > this.options.likenessMax) return null;
      this.on = true;
      return "on";
    }
    if (this.on && this.quietHops >= this.options.offHops) {
      this.on = false;
      return "off";
    }
    return null;
  }

  noteOnset(micDb) {
    this.onsetLikeness = this.echo.likeness;
    this.onsetCoupling = micDb - this.echo.reference;
    this.echo.waiting.length = 0;
  }

  count() {
    let sum = 0;
    for (const v of this.voicedRun) sum += v;
    return sum;
  }

  sinceFirst() {
    const n = this.options.onsetWindow;
    for (let back = Math.min(n, this.hops); back > 0; back--) if (this.voicedRun[(this.hops - back) % n]) return back;
    return 0;
  }

  recentRemote() {
    let loudest = SILENT_DB;
    for (let d = 0; d < 20; d++) loudest = Math.max(loudest, this.echo.remote[(this.echo.at - d + 128) % 128]);
    return loudest;
  }
}

/** Two detectors on one microphone, cancelled and raw; the first that hears a person speaks for both. */
export class TwinDetector {
  /** @param {{rate: number, echoCancellation: boolean}} setup of the cancelled input */
  constructor({ rate, echoCancellation }) {
    this.main = new VoiceDetector({ rate, echoCancellation });
    this.raw = new VoiceDetector({ rate, echoCancellation: false });
    this.hopSamples = this.main.hopSamples;
    this.on = false;
    this.onWhilePlaying = false;
  }

  setEchoCancellation(on) {
    this.main.setEchoCancellation(on);
  }

  falseAlarm() {
    this.main.falseAlarm();
    this.raw.falseAlarm();
  }

  get coupling() {
    return this.main.echo.coupling;
  }

  /** As VoiceDetector.hop; `raw` is null where there is no second ear. */
  hop(mic, raw, remote, audible = true) {
    const found = this.main.hop(mic, remote, audible);
    const early = raw ? this.raw.hop(raw, remote, audible) : null;
    return { ...found, ...this.combine(found, early), ear: early?.event === "on" && found.event !== "on" ? "raw" : "main" };
  }

  combine(found, early) {
    const began = [found, early].filter((f) => f?.event === "on");
    const playing = began.some((f) => f.playing);
    const onsetHops = Math.max(0, ...began.map((f) => f.onsetHops));
    if (began.length && (!this.on || (playing && !this.onWhilePlaying))) {
      this.on = true;
      this.onWhilePlaying = playing;
      return { event: "on", onsetHops };
    }
    if (!this.on || this.main.on || (early && this.raw.on)) return { event: null, onsetHops };
    this.on = false;
    this.onWhilePlaying = false;
    return { event: "off", onsetHops };
  }
}
