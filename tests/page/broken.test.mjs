// T-RC-05: what of the server's has stopped is told; where everything has, the connection is made anew.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Again, DELAYS_MS } from "../../duplexd/webrtc/page/again.js";
import { Trouble } from "../../duplexd/webrtc/page/help.js";
import { StallWatch } from "../../duplexd/webrtc/page/stall.js";
import { Transcript } from "../../duplexd/webrtc/page/transcript.js";

/** Looks five times a second; `voice`, `picture`, `messages`: until when they come; the picture once a second. */
function watched({ voice = Infinity, picture = Infinity, messages = Infinity, hidden = [0, 0], blind = [0, 0], until = 10_000 }) {
  const watch = new StallWatch();
  const found = [];
  let said = null;
  for (let now = 0; now <= until; now += 200) {
    if (now > blind[0] && now < blind[1]) continue;
    const reports = [
      { type: "inbound-rtp", kind: "audio", packetsReceived: Math.min(now, voice) / 20 + 1 },
      { type: "inbound-rtp", kind: "video", framesReceived: Math.floor(Math.min(now, picture) / 1000) + 1 },
      { type: "outbound-rtp", kind: "audio" },
    ];
    const seen = !(now >= hidden[0] && now < hidden[1]);
    const stalled = watch.look(reports, now, { seen, messageAt: Math.min(now, messages) });
    if (stalled !== said) found.push([now, (said = stalled)]);
  }
  return found;
}

test("a still portrait, one frame a second, stands still for nobody", () => {
  assert.deepEqual(watched({}), [[0, "none"]]);
});

test("a picture that stands still for two seconds is told, and does not count as broken", () => {
  assert.deepEqual(watched({ picture: 3000 }), [[0, "none"], [5000, "picture"]]);
});

test("voice that stops while messages come is no broken connection, and the other way round", () => {
  assert.deepEqual(watched({ voice: 3000 }), [[0, "none"]]);
  assert.deepEqual(watched({ messages: 3000 }), [[0, "none"]]);
});

test("where all has stopped for two seconds the connection is broken", () => {
  assert.deepEqual(watched({ voice: 3000, picture: 3000, messages: 3000 }), [[0, "none"], [5000, "all"]]);
});

test("what begins again is no longer told", () => {
  const watch = new StallWatch();
  const look = (count, now) => watch.look(
    [{ type: "inbound-rtp", kind: "audio", packetsReceived: count }], now, { seen: true, messageAt: count });
  const found = [];
  for (let now = 0; now <= 6000; now += 200) found.push(look(now < 1000 || now > 4000 ? now + 1 : 1000, now));
  assert.equal(found.at(20), "all");
  assert.equal(found.at(-1), "none");
});

test("no picture is missed on a hidden page, nor in the two seconds after it is seen again", () => {
  assert.deepEqual(watched({ picture: 1000, hidden: [1000, 7000] }), [[0, "none"], [8800, "picture"]]);
});

test("a page that stood still itself blames nobody", () => {
  const all = watched({ voice: 2000, picture: 2000, messages: 2000, blind: [2000, 8000] });
  assert.deepEqual(all, [[0, "none"], [10_000, "all"]]);
});

test("what was said before stays to be read, beside a session that counts from the beginning", () => {
  const transcript = new Transcript(2);
  transcript.user({ turn: 1, text: "before", stable: 6, final: true });
  transcript.beginAnew();
  transcript.user({ turn: 1, text: "after", stable: 5, final: true });
  assert.deepEqual(transcript.snapshot().map(({ text }) => text), ["before", "after"]);
  transcript.user({ turn: 2, text: "more", stable: 4, final: true }); // the oldest leaves
  transcript.user({ turn: 1, text: "afterwards", stable: 10, final: true });
  assert.deepEqual(transcript.snapshot().map(({ text }) => text), ["afterwards", "more"]);
});

// -- again ------------------------------------------------------------------------------------------------------------

/** A page whose connection broke. `outcomes`: of each attempt: true, false, or the code of a Trouble. */
function broken(...outcomes) {
  const timers = [];
  const told = [];
  const again = new Again({
    connect: async () => {
      const outcome = outcomes.shift();
      if (typeof outcome === "string") throw new Trouble(outcome);
      return outcome;
    },
    tell: ({ error, ...step }) => told.push(error ? { error: error.code } : step),
    after: (run, ms) => timers.push({ run, ms }) && timers.at(-1),
    stop: (timer) => (timer.run = () => assert.fail("a timer that was stopped")),
  });
  again.begin();
  const pass = async () => {
    timers.at(-1).run();
    await new Promise((done) => setImmediate(done));
  };
  return { again, timers, told, pass };
}

test("it connects again after one, two and four seconds, and then the person is asked", async () => {
  const { timers, told, pass } = broken("unreachable", "busy", "media");
  for (let n = 0; n < 3; n += 1) await pass();
  assert.deepEqual(timers.map(({ ms }) => ms), [1000, 2000, 4000]);
  assert.deepEqual(told, [
    { waits: 1000, tries: 1 }, { tries: 1 }, { waits: 2000, tries: 2 }, { tries: 2 }, { waits: 4000, tries: 3 }, { tries: 3 },
    { error: "media" },
  ]);
  assert.equal(DELAYS_MS.length, 3);
});

test("the first that succeeds is the last, and the next break begins with one second", async () => {
  const { again, timers, told, pass } = broken("unreachable", true);
  await pass();
  await pass();
  assert.deepEqual(told.at(-1), { done: true });
  again.begin();
  assert.deepEqual(timers.map(({ ms }) => ms), [1000, 2000, 1000]);
});

test("a connection that comes back by itself in time is not torn down", async () => {
  const { again, timers } = broken();
  again.cancel();
  assert.throws(() => timers[0].run(), /a timer that was stopped/);
  assert.equal(again.waiting, false);
});

test("what will be no different in two seconds is not tried again", async () => {
  const { timers, told, pass } = broken("token");
  await pass();
  assert.deepEqual([timers.length, told.at(-1)], [1, { error: "token" }]);
});

test("who leaves during an attempt is left alone", async () => {
  const { again, timers, told } = broken("unreachable");
  timers[0].run();
  again.cancel();
  await new Promise((done) => setImmediate(done));
  assert.deepEqual([timers.length, told.at(-1)], [1, { tries: 1 }]);
});
