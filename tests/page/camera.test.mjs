// The camera is never open behind a button that says that it is off.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Session } from "../../duplexd/webrtc/page/session.js";

/** A session of which only the camera is used, and the tracks that were opened for it. */
function withCamera({ setParameters }) {
  const opened = [];
  const getUserMedia = async () => {
    const track = { stopped: false, stop() { this.stopped = true; }, getSettings: () => ({ height: 480 }) };
    opened.push(track);
    return { getVideoTracks: () => [track], getTracks: () => [track] };
  };
  Object.defineProperty(globalThis, "navigator", { configurable: true, value: { mediaDevices: { getUserMedia } } });
  const sender = { replaceTrack: async () => {}, getParameters: () => ({ encodings: [{}] }), setParameters };
  const told = [];
  const session = Object.assign(Object.create(Session.prototype), {
    closed: false, camera: null, face: { sender }, send: (message) => told.push(message), on: () => {},
  });
  return { session, opened, told };
}

test("a camera that cannot be slowed down is closed again", async () => {
  const { session, opened, told } = withCamera({ setParameters: async () => { throw new Error("no"); } });
  await assert.rejects(session.openCamera());
  assert.deepEqual(opened.map((track) => track.stopped), [true]);
  assert.equal(session.camera, null);
  assert.ok(!told.some((message) => message.t === "camera" && message.on));
});

test("a camera that ends while it is being opened is not told as on", async () => {
  let meanwhile = () => {};
  const { session, opened, told } = withCamera({ setParameters: async () => meanwhile() });
  meanwhile = () => session.closeCamera();
  await session.openCamera();
  assert.deepEqual(opened.map((track) => track.stopped), [true]);
  assert.deepEqual(told.map((message) => message.on), [false]);
});

test("a camera that is open is told once", async () => {
  const { session, opened, told } = withCamera({ setParameters: async () => {} });
  await session.openCamera();
  assert.deepEqual([opened[0].stopped, told], [false, [{ t: "camera", on: true }]]);
});
