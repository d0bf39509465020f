// Synthetic sounds for the detector's tests: Float32Array at RATE, seeded, full scale 1.0.

import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

export const RATE = 48000;
export const HOP = RATE / 100;

/** Uniform random numbers in [-1, 1): mulberry32. */
export function random(seed) {
  let a = seed >>> 0;
  return () => {
    a = (a + 0x6d2b79f5) >>> 0;
    let t = Math.imul(a ^ (a >>> 15), a | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return (((t ^ (t >>> 14)) >>> 0) / 2 ** 31) - 1;
  };
}

export const silence = (seconds) => new Float32Array(Math.round(seconds * RATE));
export const gain = (x, db) => x.map((v) => v * 10 ** (db / 20));

export function mix(...parts) {
  const out = new Float32Array(Math.max(...parts.map((p) => p.length)));
  for (const part of parts) for (let i = 0; i < part.length; i++) out[i] += part[i];
  return out;
}

export function join2(...parts) {
  const out = new Float32Array(parts.reduce((n, p) => n + p.length, 0));
  let at = 0;
  for (const part of parts) { out.set(part, at); at += part.length; }
  return out;
}

export const delayed = (x, ms) => join2(silence(ms / 1000), x);

export function rms(x) {
  return Math.sqrt(x.reduce((sum, v) => sum + v * v, 0) / x.length);
}

/** Scales to an RMS level in dBFS over the whole of it. */
export const level = (x, db) => gain(x, db - 20 * Math.log10(rms(x)));

export function noise(seconds, seed) {
  const next = random(seed);
  return silence(seconds).map(() => next());
}

/** Noise that falls 6 dB per octave: a fan, a street. */
export function brown(seconds, seed) {
  const next = random(seed);
  let y = 0;
  return silence(seconds).map(() => (y = 0.98 * y + 0.1 * next()));
}

/** Decaying resonances, as keys and taps make them. */
export function clicks(seconds, perSecond, seed, { decayMs = 5 } = {}) {
  const next = random(seed);
  const out = silence(seconds);
  for (let at = 0.3; at < seconds - 0.1; at += (1 / perSecond) * (1 + 0.6 * next())) {
    const hz = 900 + 700 * (1 + next());
    const tau = (decayMs / 1000) * (1 + 0.5 * next());
    const begin = Math.round(at * RATE);
    for (let n = 0; n < tau * 8 * RATE && begin + n < out.length; n++) {
      const t = n / RATE;
      out[begin + n] += Math.exp(-t / tau) * (0.6 * Math.sin(2 * Math.PI * hz * t) + 0.4 * next());
    }
  }
  return out;
}

/** A chord of harmonic tones, equal temperament, struck every `every` seconds. */
export function chords(seconds, every = 1.2) {
  const roots = [261.63, 220.0, 174.61, 196.0];
  return silence(seconds).map((_, n) => {
    const t = n / RATE;
    const bar = Math.floor(t / every);
    const decay = Math.exp(-(t - bar * every) / 0.9);
    let y = 0;
    for (const third of [0, 4, 7, 12]) {
      const hz = roots[bar % 4] * 2 ** (third / 12);
      for (let h = 1; h <= 4; h++) y += Math.sin(2 * Math.PI * hz * h * t + third) / (h * h);
    }
    return 0.1 * decay * y;
  });
}

/** A vowel: glottal pulses with jitter through three resonances; syllables of 180 ms with gaps of 70 ms. */
export function vowels(seconds, { pitch = 120, seed = 1, formants = [700, 1200, 2500] } = {}) {
  const next = random(seed);
  const source = silence(seconds);
  for (let at = 0; at < source.length; at += (RATE / pitch) * (1 + 0.02 * next())) source[Math.floor(at)] = 1;
  let out = silence(seconds);
  for (const hz of formants) out = mix(out, resonate(source, hz, 90));
  return out.map((v, n) => v * syllable(n / RATE));
}

function resonate(x, hz, width) {
  const r = Math.exp((-Math.PI * width) / RATE);
  const a1 = 2 * r * Math.cos((2 * Math.PI * hz) / RATE);
  let y1 = 0, y2 = 0;
  return x.map((v) => { const y = v + a1 * y1 - r * r * y2; y2 = y1; y1 = y; return y * 0.1; });
}

function syllable(t) {
  const at = t % 0.25;
  return at < 0.02 ? at / 0.02 : at < 0.16 ? 1 : at < 0.18 ? (0.18 - at) / 0.02 : 0;
}

/** A sentence by espeak-ng or flite, resampled to RATE; null when the program is not installed. */
export function speech(program, text, voice) {
  const dir = mkdtempSync(join(tmpdir(), "duplexd-"));
  const file = join(dir, "a.wav");
  const args = { "espeak-ng": ["-v", voice ?? "en", "-w", file, text], flite: ["-voice", voice ?? "slt", "-t", text, "-o", file] };
  try {
    execFileSync(program, args[program], { stdio: "ignore" });
    return readWav(readFileSync(file));
  } catch (error) {
    if (error.code === "ENOENT") return null;
    throw error;
  } finally {
    rmSync(dir, { recursive: true });
  }
}

/** 16-bit PCM WAV, first channel, linear interpolation to RATE. */
export function readWav(bytes) {
  const rate = bytes.readUInt32LE(24);
  const channels = bytes.readUInt16LE(22);
  const begin = bytes.indexOf("data") + 8;
  const count = Math.floor((bytes.length - begin) / 2 / channels);
  const out = new Float32Array(Math.floor(((count - 1) * RATE) / rate));
  for (let i = 0; i < out.length; i++) {
    const at = (i * rate) / RATE;
    const k = Math.floor(at);
    const a = bytes.readInt16LE(begin + 2 * channels * k);
    const b = bytes.readInt16LE(begin + 2 * channels * Math.min(k + 1, count - 1));
    out[i] = (a + (b - a) * (at - k)) / 32768;
  }
  return out;
}

/** Without the quiet before the first sound: sample of the first 10 ms above `db` below the peak level. */
export function trimStart(x, db = 25) {
  const peak = x.reduce((m, v) => Math.max(m, Math.abs(v)), 0) * 10 ** (-db / 20);
  return x.subarray(Math.max(0, x.findIndex((v) => Math.abs(v) > peak)));
}

/** Runs a detector over whole recordings; returns its events with their times in ms. */
export function run(detector, mic, remote = null, { audible = () => true } = {}) {
  const events = [];
  for (let at = 0; at + HOP <= mic.length; at += HOP) {
    const far = remote ? sliceOf(remote, at) : null;
    const found = detector.hop(mic.subarray(at, at + HOP), far, audible((at / RATE) * 1000));
    if (found.event) events.push({ event: found.event, ms: ((at + HOP) / RATE) * 1000, playing: found.playing });
  }
  return events;
}

function sliceOf(x, at) {
  if (at + HOP <= x.length) return x.subarray(at, at + HOP);
  const out = new Float32Array(HOP);
  out.set(x.subarray(Math.min(at, x.length)));
  return out;
}

export const onsets = (events) => events.filter((e) => e.event === "on");
