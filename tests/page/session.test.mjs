// One session without a browser: what it tells the daemon of itself, and whether a voice may interrupt.

import assert from "node:assert/strict";
import { test } from "node:test";

globalThis.Worker = class {
  postMessage() {}
  terminate() {}
};
globalThis.document = { visibilityState: "visible", addEventListener() {}, removeEventListener() {} };

globalThis.navigator ??= {};

const { Session } = await import("../../duplexd/webrtc/page/session.js");

/** A session that has begun: `sent` holds what it told the daemon, `said` what it told the page. */
function begun({ bargeIn, allowed }) {
  const sent = [];
  const said = [];
  const channel = { readyState: "open", bufferedAmount: 0, send: (text) => sent.push(JSON.parse(text)) };
  const options = { mic: false, aec: true, vad: true, bargeIn, token: "", iceServers: [] };
  const on = (kind, detail) => said.push({ kind, ...detail });
  const session = new Session({ audio: { muted: false }, video: {}, on, options });
  session.reliable = session.fast = channel;
  session.receiver = { getSynchronizationSources: () => [{ timestamp: performance.now(), rtpTimestamp: 48_000 }] };
  session.on_ready({ t: "ready", session: 1, epoch: 0, barge_in: allowed, camera: false });
  session.begin();
  return { session, sent, said };
}

/** Microphones as a browser gives them; those that were opened, in order. */
function withMicrophones() {
  const opened = [];
  const getUserMedia = async () => {
    const track = { stopped: false, enabled: true, stop() { this.stopped = true; }, getSettings: () => ({ echoCancellation: true }) };
    opened.push(track);
    return { getAudioTracks: () => [track], getTracks: () => [track] };
  };
  const before = Object.getOwnPropertyDescriptor(globalThis, "navigator");
  const mediaDevices = { getUserMedia, addEventListener() {}, removeEventListener() {} };
  Object.defineProperty(globalThis, "navigator", { configurable: true, value: { mediaDevices } });
  return { opened, restore: () => before && Object.defineProperty(globalThis, "navigator", before) };
}

const settings = (sent) => sent.filter((m) => m.t === "set");
const voice = { event: "on", playing: true, onsetHops: 3, coupling: 0, ear: 0 };

test("a daemon that allows no interruption is not overruled by a page whose person chose nothing", () => {
  const { session, sent } = begun({ bargeIn: null, allowed: false });
  session.onVoice(voice);
  assert.deepEqual(settings(sent), [{ t: "set" }]);
  assert.equal(session.audio.muted, false);
});

test("where the daemon allows it, a voice over the character mutes it", () => {
  const { session, sent } = begun({ bargeIn: null, allowed: true });
  session.onVoice(voice);
  assert.equal(sent.find((m) => m.t === "voice").muted, true);
  assert.equal(session.audio.muted, true);
});

test("what the person has chosen is told at the beginning of each session and holds", () => {
  const { session, sent } = begun({ bargeIn: true, allowed: false });
  session.onVoice(voice);
  assert.deepEqual(settings(sent), [{ t: "set", barge_in: true }]);
  assert.equal(session.audio.muted, true);
  session.setBargeIn(false);
  assert.deepEqual(settings(sent).at(-1), { t: "set", barge_in: false });
  assert.equal(session.mayInterrupt, false);
});

test("after ten visits with a microphone none is left open, however far each had come", async () => {
  const { opened, restore } = withMicrophones();
  for (let visit = 0; visit < 10; visit += 1) {
    const session = new Session({ audio: {}, video: {}, on: () => {}, options: { mic: true, aec: true, vad: false } });
    const opening = session.takeMicrophone();
    if (visit % 2) session.close("left"); // while the browser still asks
    await opening;
    session.close("left");
  }
  restore();
  assert.equal(opened.length, 10);
  assert.deepEqual(opened.filter((track) => !track.stopped), []);
});

test("a session tells its page what of the server's has stopped, once, and nothing after its end", async () => {
  const { session, said } = begun({ bargeIn: null, allowed: true });
  const looks = ["none", "picture", "picture", "all", "none"];
  session.stall = { look: () => looks.shift() };
  session.pc = { getStats: async () => new Map(), close() {} };
  for (let n = 0; n < 5; n += 1) await session.readStats();
  session.close("left");
  session.noteStall([]);
  assert.deepEqual(said.filter((m) => m.kind === "stall").map((m) => m.stalled), ["picture", "all", "none"]);
});
