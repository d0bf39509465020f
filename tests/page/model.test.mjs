// Positions, cursors, words and latencies as data.

import assert from "node:assert/strict";
import { test } from "node:test";

import { ShownCursor } from "../../duplexd/webrtc/page/cursor.js";
import { HELP, closedSentence, microphoneCode, refusalCode } from "../../duplexd/webrtc/page/help.js";
import { complete } from "../../duplexd/webrtc/page/latency.js";
import { DelayMeter, ageMs, passed, rtpAdd, rtpDistance } from "../../duplexd/webrtc/page/position.js";
import { LipSync, SightMeter, WAIT_FIRST_MS } from "../../duplexd/webrtc/page/sight.js";
import { Transcript } from "../../duplexd/webrtc/page/transcript.js";
import { isShown } from "../../duplexd/webrtc/page/words.js";

const word = (text, start, end) => ({ text, start, end });
const WORDS = [word("One", 0, 100), word(" two", 100, 200), word(" three", 200, 300)];

test("RTP distances and sums hold across the wrap", () => {
  assert.equal(rtpDistance(10, 2 ** 32 - 10), 20);
  assert.equal(rtpDistance(2 ** 32 - 10, 10), -20);
  assert.equal(rtpAdd(2 ** 32 - 48, 2), 48);
});

test("a source's age is read from either clock and stays within bounds", () => {
  assert.equal(ageMs(1_000_000 + 500, 530, 1_000_000), 30);
  assert.equal(ageMs(500, 530, 1_000_000), 30);
  assert.equal(ageMs(600, 530, 1_000_000), 0);
  assert.equal(ageMs(0, 90_000, 1_000_000_000), 5000);
});

test("delays are means of what passed between two readings; a reset of the counters keeps the last", () => {
  const meter = new DelayMeter();
  const reading = (delay, count, buffer, emitted) => [
    { type: "media-playout", totalPlayoutDelay: delay, totalSamplesCount: count },
    { type: "inbound-rtp", kind: "audio", jitterBufferDelay: buffer, jitterBufferEmittedCount: emitted },
    { type: "inbound-rtp", kind: "video", jitterBufferDelay: 9e9, jitterBufferEmittedCount: 1 },
  ];
  meter.take(reading(1000, 10_000, 5000, 20_000));
  assert.deepEqual([meter.playoutMs, meter.bufferMs], [0, 0]);
  meter.take(reading(1000 + 9600 * 0.03, 19_600, 5000 + 9600 * 0.05, 29_600));
  assert.deepEqual([Math.round(meter.playoutMs), Math.round(meter.bufferMs)], [30, 50]);
  meter.take(reading(1, 10, 1, 10));
  assert.deepEqual([Math.round(meter.playoutMs), Math.round(meter.bufferMs)], [30, 50]);
});

test("where a muted sound ended: the middle of the steps that may have left, shifted by what was stretched", () => {
  const meter = new DelayMeter();
  const counters = { type: "inbound-rtp", kind: "audio", packetsLost: 0, packetsDiscarded: 0, concealedSamples: 765 };
  assert.equal(meter.phaseMs, null);
  meter.take([{ ...counters, insertedSamplesForDeceleration: 2160, removedSamplesForAcceleration: 120 }]);
  assert.ok(Math.abs(meter.phaseMs - 8.44) < 0.01);
  // Measured with these counters: -6.6 or 3.4 ms behind the newest packet's timestamp.
  assert.ok(Math.abs(passed(5, meter.phaseMs).passed_ms - -1.6) < 0.1);
  assert.ok(passed(24, meter.phaseMs).passed_ms > passed(5, meter.phaseMs).passed_ms);
  assert.ok(passed(5, meter.phaseMs).bound_ms < passed(5, null).bound_ms);
  assert.ok(passed(200, meter.phaseMs).bound_ms === passed(5, null).bound_ms);
  meter.take([{ ...counters, insertedSamplesForDeceleration: 100, removedSamplesForAcceleration: 2000, concealedSamples: 0 }]);
  assert.ok(Math.abs(meter.phaseMs - 20 / 48) < 0.01);
  meter.take([{ ...counters, insertedSamplesForDeceleration: 2160, removedSamplesForAcceleration: 120, packetsLost: 1 }]);
  assert.equal(meter.phaseMs, null);
  meter.take([counters]);
  assert.equal(meter.phaseMs, null);
});

test("the shown cursor moves with time, never past what was delivered and never back by a small correction", () => {
  const cursor = new ShownCursor();
  assert.equal(cursor.playback(0, true), null);
  const message = { epoch: 0, generation: 50_000, delivery: 14_400, playback: 4800, budget: 72_000, assumed: false };
  cursor.take(message, 1000);
  assert.equal(cursor.playback(1100, true), 4800 + 4800);
  assert.equal(cursor.playback(1900, true), 14_400);
  cursor.take({ ...message, playback: 13_000 }, 1900);
  assert.equal(cursor.playback(1900, false), 14_400);
  cursor.take({ ...message, epoch: 1, playback: 0, delivery: 0 }, 2000);
  assert.equal(cursor.playback(2000, true), 0);
  cursor.take(message, 2100);
  assert.equal(cursor.last.epoch, 1);
});

test("the lookahead is generation minus playback in milliseconds", () => {
  const cursor = new ShownCursor();
  cursor.take({ epoch: 0, generation: 48_000, delivery: 9600, playback: 4800, budget: 72_000, assumed: true }, 0);
  assert.deepEqual(cursor.ahead(0, false), { playback: 4800, lookahead: 900, delivered: 100, budget: 1500, assumed: true });
});

test("words are pending, now, heard, and struck once it is certain that they were never heard", () => {
  const transcript = new Transcript();
  transcript.reply({ response: 1, epoch: 0, state: "created", reason: "" });
  const entry = transcript.words({ response: 1, first: 0, words: WORDS });
  const fates = (playback) => WORDS.map((_, i) => Transcript.fate(entry, i, playback));
  assert.deepEqual(fates(150), ["heard", "now", "pending"]);
  assert.deepEqual(fates(null), ["pending", "pending", "pending"]);
  transcript.heard({ response: 1, words: 1, ambiguous: [1], estimated: false, final: true });
  assert.deepEqual(fates(250), ["heard", "struck", "struck"]);
  const [view] = transcript.snapshot();
  assert.deepEqual([view.text, view.heard, view.struck, view.ambiguous], ["One two three", "One", "two three", ["two"]]);
});

test("words that arrive twice or in two messages stand once and in order", () => {
  const transcript = new Transcript();
  transcript.words({ response: 1, first: 0, words: WORDS.slice(0, 2) });
  transcript.words({ response: 1, first: 1, words: WORDS.slice(1) });
  assert.equal(transcript.snapshot()[0].text, "One two three");
});

test("the person's words grow in place and the final ones are all stable", () => {
  const transcript = new Transcript();
  transcript.user({ turn: 1, text: "what ti", stable: 4, final: false });
  transcript.user({ turn: 1, text: "what time", stable: 4, final: true });
  assert.deepEqual(transcript.snapshot().map((e) => [e.text, e.stable]), [["what time", 9]]);
});

test("a transcript of days keeps only its newest entries", () => {
  const transcript = new Transcript(10);
  for (let turn = 0; turn < 100; turn++) transcript.user({ turn, text: "x", stable: 1, final: true });
  assert.equal(transcript.entries.length, 10);
  assert.equal(transcript.turns.size, 10);
});

test("latency parts always sum to the total: what is not named is shown as unaccounted", () => {
  assert.deepEqual(complete({ parts: [["a", 10], ["b", 5]], total_ms: 15.4 }), [["a", 10], ["b", 5]]);
  assert.deepEqual(complete({ parts: [["a", 10]], total_ms: 25 }), [["a", 10], ["unaccounted", 15]]);
});

test("every dead end has its own sentence", () => {
  assert.equal(microphoneCode({ name: "NotAllowedError" }), "denied");
  assert.equal(microphoneCode({ name: "NotFoundError" }), "no-device");
  assert.equal(microphoneCode({ name: "NotReadableError" }), "device-busy");
  assert.deepEqual([401, 429, 503, 500].map(refusalCode), ["token", "busy", "busy", "refused"]);
  assert.deepEqual(["loading", "busy"].map((code) => refusalCode(503, code)), ["unreachable", "busy"]);
  assert.equal(closedSentence("the thinker failed 3 times"), "Reason: the thinker failed 3 times.");
  assert.match(closedSentence("engine restarted"), /engine restarted/i);
  assert.equal(closedSentence("something new"), "Reason: something new.");
  assert.equal(new Set(Object.values(HELP).map((h) => h.title)).size, Object.keys(HELP).length);
});

test("a reply that failed before its first word is shown, one that nobody heard is not", () => {
  const transcript = new Transcript();
  const reply = (response, state) => transcript.reply({ response, epoch: 0, state, reason: "" });
  const ended = (response, state) => {
    transcript.heard({ response, words: 0, ambiguous: [], estimated: false, final: true });
    return isShown(reply(response, state));
  };
  assert.equal(isShown(reply(1, "created")), false);
  assert.deepEqual([ended(2, "failed"), ended(3, "completed"), ended(4, "cancelled")], [true, true, false]);
  transcript.words({ response: 5, first: 0, words: WORDS });
  assert.equal(isShown(reply(5, "created")), true);
  assert.equal(ended(5, "cancelled"), false);
});

test("a voice that failed behind whole words is told apart from a reply that failed", () => {
  const transcript = new Transcript();
  const failed = (response, outputs) => transcript.reply({ response, epoch: 0, state: "failed", reason: "", outputs });
  assert.equal(failed(1, { text: "completed", voice: "failed" }).partial, true);
  assert.equal(failed(2, { text: "failed", voice: "failed" }).partial, false);
  assert.equal(transcript.snapshot()[0].partial, true);
});

// -- what is seen

/** A second of pictures of which the voice is `skew` ms ahead, from `at` ms on; 25 frames. */
function second(lips, { voice, face, at, skew }) {
  for (let frame = 0; frame < 25; frame += 1) {
    const ms = at + 40 * frame;
    const heard = { rtp: (voice + Math.round(48 * (ms + skew - 30))) >>> 0, ms: 30 };
    lips.show((face + 90 * ms) >>> 0, heard);
  }
}

const CLOCKS = { voice: 2 ** 32 - 480_000, face: 2 ** 32 - 90_000 }; // both wrap within ten seconds

test("the picture waits for the voice, as long as it is early", () => {
  const waits = [];
  const lips = new LipSync((ms) => waits.push(Math.round(ms)));
  second(lips, { ...CLOCKS, at: 0, skew: -55 });
  assert.deepEqual([waits, lips.skewMs], [[WAIT_FIRST_MS], null]); // nothing is known before the server's word
  lips.begin(CLOCKS);
  second(lips, { ...CLOCKS, at: 1000, skew: -55 });
  assert.equal(Math.round(lips.skewMs), -55);
  assert.deepEqual(waits, [WAIT_FIRST_MS, WAIT_FIRST_MS + 40]); // 15 ms early is where it shall be
});

test("a picture that is late waits less, never less than nothing, and the voice is never asked to wait", () => {
  const waits = [];
  const lips = new LipSync((ms) => waits.push(Math.round(ms)));
  lips.begin(CLOCKS);
  second(lips, { ...CLOCKS, at: 0, skew: 0 });
  second(lips, { ...CLOCKS, at: 1000, skew: 400 });
  second(lips, { ...CLOCKS, at: 2000, skew: 400 });
  assert.deepEqual(waits, [WAIT_FIRST_MS, WAIT_FIRST_MS - 15, 0]);
});

test("small differences are left alone, and the timestamps' wraps are none", () => {
  const waits = [];
  const lips = new LipSync((ms) => waits.push(ms));
  lips.begin(CLOCKS);
  for (let at = 0; at < 20_000; at += 1000) second(lips, { ...CLOCKS, at, skew: at % 2000 ? -22 : -8 });
  assert.deepEqual(waits, [WAIT_FIRST_MS]);
});

test("a voice that stands still says nothing of the lips", () => {
  const lips = new LipSync(() => {});
  lips.begin(CLOCKS);
  second(lips, { ...CLOCKS, at: 0, skew: -9000 });
  assert.equal(lips.skewMs, null);
});

test("figures of the picture are differences over a second or more", () => {
  const meter = new SightMeter();
  const reading = (timestamp, frames) => [
    { type: "inbound-rtp", kind: "audio", timestamp, framesReceived: 9e9 },
    { type: "inbound-rtp", kind: "video", timestamp, framesReceived: frames, framesDecoded: frames - 1, bytesReceived: frames * 1000 },
  ];
  meter.take(reading(0, 0));
  meter.take(reading(100, 10));
  meter.take(reading(600, 20));
  assert.equal(meter.figures, null);
  meter.take(reading(2100, 60));
  assert.deepEqual(meter.figures, { received: 60, decoded: 59, dropped: 0, freezes: 0, fps: 25, kbit: 200 });
});
