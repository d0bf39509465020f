// When the character may be heard: holds, resumes and flushes in every order in which a lossy channel delivers them.

import assert from "node:assert/strict";
import { test } from "node:test";

import { DEADLINES_MS, Gate, LEAD_MS } from "../../duplexd/webrtc/page/gate.js";

/** A gate over an ear that plays from RTP `start` on, 48 a millisecond; time is `ear.now`. */
function scene(start = 1000) {
  const ear = { now: 0, muted: null, mutes: 0, notes: [], start };
  const gate = new Gate({
    setMuted: (muted) => { ear.mutes += ear.muted !== muted ? 1 : 0; ear.muted = muted; },
    position: () => (ear.start === null ? null : { rtp: (ear.start + 48 * ear.now) >>> 0, age_ms: 0, playout_ms: 30 }),
    note: (kind) => ear.notes.push(kind),
  });
  const wait = (ms) => { for (let i = 0; i < ms; i += 5) { ear.now += 5; gate.check(ear.now); } };
  return { ear, gate, wait };
}

const at = (ms) => (1000 + 48 * ms) >>> 0;

test("a hold mutes at once and the position stands where the sound ended", () => {
  const { ear, gate, wait } = scene();
  wait(100);
  assert.equal(gate.order({ t: "hold", id: 1, hold: 1, epoch: 0 }, ear.now), true);
  assert.equal(ear.muted, true);
  wait(200);
  assert.deepEqual(gate.heard(), { rtp: at(100), age_ms: 0, playout_ms: 30 });
});

test("copies of an order act once", () => {
  const { ear, gate } = scene();
  const hold = { t: "hold", id: 1, hold: 1, epoch: 0 };
  assert.deepEqual([gate.order(hold, 0), gate.order(hold, 20), gate.order(hold, 60)], [true, false, false]);
  assert.equal(ear.notes.filter((n) => n === "muted").length, 1);
});

test("a flush opens exactly when its timestamp leaves the jitter buffer, not before", () => {
  const { ear, gate, wait } = scene();
  gate.order({ t: "hold", id: 1, hold: 1, epoch: 0 }, 0);
  gate.order({ t: "flush", id: 2, hold: 1, epoch: 1, rtp: at(300) }, 0);
  wait(300 + LEAD_MS - 5);
  assert.equal(ear.muted, true);
  wait(10);
  assert.equal(ear.muted, false);
  assert.equal(gate.epoch, 1);
});

test("a flush without a hold mutes until its timestamp", () => {
  const { ear, gate, wait } = scene();
  gate.order({ t: "flush", id: 1, hold: 0, epoch: 1, rtp: at(100) }, 0);
  assert.equal(ear.muted, true);
  wait(100 + LEAD_MS + 5);
  assert.equal(ear.muted, false);
});

test("a timestamp that has passed opens at once", () => {
  const { ear, gate, wait } = scene();
  wait(200);
  gate.order({ t: "resume", id: 1, hold: 1, epoch: 0, rtp: at(100) }, ear.now);
  assert.equal(ear.muted, false);
});

test("timestamps are compared across the wrap of 32 bits", () => {
  const { ear, gate, wait } = scene(2 ** 32 - 48 * 50);
  gate.order({ t: "flush", id: 1, hold: 0, epoch: 1, rtp: 48 * 50 }, 0);
  wait(95);
  assert.equal(ear.muted, true);
  wait(30);
  assert.equal(ear.muted, false);
});

test("a hold that arrives after its own resume does not mute again", () => {
  const { ear, gate, wait } = scene();
  gate.order({ t: "resume", id: 2, hold: 1, epoch: 0, rtp: at(20) }, 0);
  wait(60);
  gate.order({ t: "hold", id: 1, hold: 1, epoch: 0 }, ear.now);
  assert.equal(ear.muted, false);
  gate.order({ t: "hold", id: 3, hold: 2, epoch: 0 }, ear.now);
  assert.equal(ear.muted, true);
});

test("an old resume does not open a newer hold", () => {
  const { ear, gate, wait } = scene();
  gate.order({ t: "hold", id: 1, hold: 1, epoch: 0 }, 0);
  gate.order({ t: "hold", id: 3, hold: 2, epoch: 0 }, 0);
  gate.order({ t: "resume", id: 2, hold: 1, epoch: 0, rtp: at(0) }, 0);
  wait(500);
  assert.equal(ear.muted, true);
  gate.order({ t: "flush", id: 4, hold: 2, epoch: 1, rtp: at(500) }, ear.now);
  wait(50);
  assert.equal(ear.muted, false);
});

test("the answer to a hold after the page's own mute is where the page muted", () => {
  const { ear, gate, wait } = scene();
  wait(100);
  assert.deepEqual(gate.onset(ear.now), { rtp: at(100), age_ms: 0, playout_ms: 30 });
  wait(40);
  gate.order({ t: "hold", id: 1, hold: 1, epoch: 0 }, ear.now);
  assert.equal(gate.heard().rtp, at(100));
  assert.equal(gate.onset(ear.now), null);
});

test("no mute is for ever: without an answer the gate opens by its deadline and says so", () => {
  for (const [begin, ms] of [
    [(gate) => gate.onset(0), DEADLINES_MS.onset],
    [(gate) => gate.order({ t: "hold", id: 1, hold: 1, epoch: 0 }, 0), DEADLINES_MS.hold],
    [(gate) => gate.order({ t: "flush", id: 1, hold: 0, epoch: 1, rtp: at(60_000) }, 0), DEADLINES_MS.wait],
  ]) {
    const { ear, gate, wait } = scene();
    begin(gate);
    wait(ms - 5);
    assert.equal(ear.muted, true);
    wait(10);
    assert.equal(ear.muted, false);
    assert.equal(ear.notes.at(-1), "unmuted-by-deadline");
  }
});

test("before any packet a hold mutes and no position is made up", () => {
  const { ear, gate } = scene(null);
  gate.order({ t: "hold", id: 1, hold: 1, epoch: 0 }, 0);
  assert.equal(ear.muted, true);
  assert.equal(gate.heard(), null);
});

test("the memory of orders is bounded", () => {
  const { gate } = scene();
  for (let id = 1; id <= 2000; id++) gate.order({ t: "hold", id, hold: id, epoch: 0 }, 0);
  assert.ok(gate.orders.size <= 256);
});
