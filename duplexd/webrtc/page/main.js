// The page: wires one session to what is seen, and offers window.duplexd to tests and to the curious.
// URL: ?auto=1 connects at load, ?mic=0 without microphone, ?aec=0, ?vad=0 (only the server listens for voice), ?token=.

import { Again, DELAYS_MS } from "./again.js";
import { ShownCursor } from "./cursor.js";
import { HELP, Trouble, closedSentence } from "./help.js";
import { LatencyView } from "./latency.js";
import { Session, fetchConfig } from "./session.js";
import { Timeline } from "./timeline.js";
import { Transcript } from "./transcript.js";
import { WordsView } from "./words.js";

const EVENTS_MAX = 2000;
const LOG_LINES_MAX = 200;
const LATENCIES_MAX = 200;
const FRAME_MS = 20; // and the rest of the screen's own frame
const QUIET_EVENTS = new Set(["meter", "sight", "pong", "cursor", "words", "user", "heard"]); // too many for a log meant to be read
const STATE_TEXT = {
  idle: "Not connected", connecting: "Connecting", ready: "Connected", listening: "Listening", thinking: "Thinking",
  speaking: "Speaking", held: "Paused, listening to you",
};

const $ = (id) => document.getElementById(id);
const query = new URLSearchParams(location.search);
const wantsMicrophone = query.get("mic") !== "0";
const options = {
  mic: wantsMicrophone, aec: query.get("aec") !== "0", vad: query.get("vad") !== "0",
  bargeIn: null, // what the daemon says, until the person has chosen
  token: query.get("token") ?? "",
};

const transcript = new Transcript();
const cursor = new ShownCursor();
const timeline = new Timeline($("timeline"));
const wordsView = new WordsView({ list: $("transcript"), empty: $("transcript-empty"), announcer: $("announcer") });
const latencyView = new LatencyView({ bars: $("latency-bars"), legend: $("latency-legend"), empty: $("latency-empty") });
const events = [];
const latencies = [];
let session = null;
let config = null;
let live = null; // the character's entry whose words are being spoken
let frame = null;
let attempt = 0; // to connect; one that is not the newest has been left
let micMuted = false; // by the person; also through a connection that broke

const again = new Again({
  connect: () => open({ goesOn: true }), tell: (step) => showAgain(step), after: (run, ms) => setTimeout(run, ms), stop: clearTimeout,
});

const clock = () => performance.timeOrigin + performance.now();

// -- what happened ----------------------------------------------------------------------------------------------------

function record(kind, detail = {}) {
  if (kind === "meter" || kind === "sight") return; // too many, and shown elsewhere
  if (kind === "camera") detail = { on: Boolean(detail.stream) };
  events.push({ ...detail, kind, clock: clock() }); // a message's own `t` is its type
  if (events.length > EVENTS_MAX) events.shift();
  if (!QUIET_EVENTS.has(kind) && $("log").open) addLine(events.at(-1));
}

function addLine({ clock: when, kind, t, ...detail }) {
  const line = document.createElement("li");
  const at = new Date(when).toISOString().slice(11, 23);
  line.textContent = `${at}  ${kind}  ${Object.keys(detail).length ? JSON.stringify(detail) : ""}`;
  $("log-lines").append(line);
  if ($("log-lines").childElementCount > LOG_LINES_MAX) $("log-lines").firstElementChild.remove();
  $("log-lines").scrollTop = $("log-lines").scrollHeight;
}

const handlers = {
  meter: ({ micDb, remoteDb }) => showLevels(micDb, remoteDb),
  ready: (message) => onReady(message),
  sight: (figures) => showSight(figures),
  camera: ({ stream }) => showSelf(stream),
  state: ({ state }) => setState(state),
  user: (message) => show(transcript.user(message)),
  reply: (message) => show(transcript.reply(message)),
  words: (message) => show((live = transcript.words(message))),
  heard: (message) => show(transcript.heard(message)),
  cursor: (message) => onCursor(message),
  latency: (message) => onLatency(message),
  flush: () => cursor.clear(),
  error: ({ code, message }) => notice({ title: "The server refused something", text: message, detail: code, offer: [] }),
  pong: () => showRtt(),
  "autoplay-blocked": () => askForTap(),
  audible: () => onAudible(),
  unplugged: () => help("unplugged"),
  replugged: () => hideNotice(),
  microphone: ({ echoCancellation }) => ($("aec").checked = echoCancellation),
  stall: ({ stalled }) => onStall(stalled),
  ended: ({ trouble }) => onEnded(trouble),
};

function on(kind, detail = {}) {
  record(kind, kind === "ended" ? { code: detail.trouble.code, detail: detail.trouble.detail } : detail);
  handlers[kind]?.(detail);
}

function onReady({ model, takes, barge_in: bargeIn, faceless = "" }) {
  $("model").textContent = model;
  $("model").hidden = false;
  $("barge-in").checked = options.bargeIn ?? bargeIn;
  $("text").placeholder = takes.includes("text") ? "Type a message" : "This model reads no text";
  setState("listening");
  $("camera").hidden = !session?.takesCamera;
  if (faceless) help("faceless", faceless);
  if (session?.microphone && !takes.includes("audio")) notice({ title: "This model does not listen", text: "It reads text only.", offer: [] });
}

function onCursor(message) {
  cursor.take(message, performance.now());
  animate();
}

function onLatency(message) {
  latencies.push(message);
  if (latencies.length > LATENCIES_MAX) latencies.shift();
  latencyView.take(message);
}

/** A picture that stands still is told; only where all has stopped is the connection made anew. */
function onStall(stalled) {
  if (stalled === "all") return again.begin();
  if (again.waiting) again.cancel();
  showFrozen(stalled === "picture" ? "The picture stands still. You can go on talking." : "");
  return undefined;
}

function onEnded(trouble) {
  session = null;
  if (trouble.code === "lost") {
    setState("connecting");
    return again.begin();
  }
  again.cancel();
  setState("idle");
  help(trouble.code, trouble.code === "closed" ? closedSentence(trouble.detail) : trouble.detail);
  return undefined;
}

// -- connecting and leaving -------------------------------------------------------------------------------------------

async function connect(overrides = {}) {
  again.cancel();
  micMuted = false;
  Object.assign(options, overrides);
  try {
    await open();
  } catch (error) {
    setState("idle");
    failed(error);
    throw error;
  }
}

/**
 * A new session in place of the one there is; `goesOn`: what was said before stays to be read.
 * Raises Trouble; false: the person has left meanwhile.
 */
async function open({ goesOn = false } = {}) {
  leave();
  const mine = attempt;
  hideNotice();
  clear({ goesOn });
  setState("connecting");
  try {
    config = await fetchConfig(tokenOf());
    if (mine !== attempt) return false;
    if (config.token_required && !tokenOf()) throw new Trouble("token");
    const setup = { ...options, token: tokenOf(), iceServers: config.ice_servers };
    session = new Session({ audio: $("audio"), video: $("video"), on, options: setup });
    session.muteMicrophone(micMuted); // before the microphone opens: not a word of who has muted it leaves
    await session.connect();
    showMicrophone();
    return mine === attempt;
  } catch (error) {
    if (mine !== attempt) return false;
    session = null;
    throw error;
  }
}

/** As a person does it: the failure is on the page already. */
function connectByHand(overrides = {}) {
  connect(overrides).catch((error) => record("connect-failed", { code: error.code ?? error.name, detail: error.message }));
}

function failed(error) {
  if (!(error instanceof Trouble)) return notice({ title: "Something broke in this page", text: String(error), offer: ["retry"] });
  if (error.code === "token") $("token-form").hidden = false;
  help(error.code, error.detail);
  if (error.code === "token") $("token").focus();
  return undefined;
}

function disconnect() {
  again.cancel();
  leave();
  setState("idle");
}

function leave() {
  const leaving = session;
  session = null;
  attempt += 1;
  leaving?.close("left");
}

function tokenOf() {
  return $("token").value || options.token;
}

function clear({ goesOn }) {
  if (goesOn) {
    transcript.beginAnew();
  } else {
    transcript.clear();
    wordsView.clear();
  }
  latencyView.clear();
  latencies.length = 0;
  cursor.clear();
  live = null;
}

// -- what is seen -----------------------------------------------------------------------------------------------------

function setState(state) {
  document.body.dataset.state = state;
  const connected = !["idle", "connecting"].includes(state);
  const deaf = connected && !session?.microphone;
  $("state").textContent = deaf && state === "listening" ? "Connected without a microphone" : (STATE_TEXT[state] ?? state);
  $("start").hidden = state !== "idle";
  $("controls").hidden = state === "idle";
  $("mic").disabled = !session?.microphone;
  $("stop").disabled = !["thinking", "speaking", "held"].includes(state);
  $("text").disabled = !connected;
  $("composer").querySelector("button").disabled = !connected;
  if (state === "idle") quiet();
  if (connected) animate();
}

function quiet() {
  $("hear").hidden = true;
  $("rtt").hidden = true;
  $("video").hidden = true;
  $("picture").hidden = true;
  showSelf(null);
  showLevels(-100, -100);
  showFrozen("");
}

/** Over the face: what of it is not as it should be. */
function showFrozen(text) {
  $("frozen").textContent = text;
  $("frozen").hidden = !text;
}

function showAgain({ waits, tries, done, error }) {
  const which = `(${tries} of ${DELAYS_MS.length})`;
  record("again", { waits, tries, done, error: error?.code });
  if (error) {
    setState("idle");
    failed(error);
  } else if (done) {
    showFrozen("");
    help("reconnected");
  } else {
    showFrozen(`The connection is interrupted. Connecting again ${waits ? `in ${waits / 1000} s ` : ""}${which}.`);
  }
}

function showSight({ fps, received, decoded, dropped, freezes, kbit, skewMs }) {
  $("picture").hidden = false;
  const texts = { fps: fps.toFixed(1), received, decoded, dropped, freezes, rate: `${Math.round(kbit)} kbit/s` };
  for (const [name, text] of Object.entries(texts)) $(`picture-${name}`).textContent = text;
  $("picture-skew").textContent = skewMs === null ? "–" : `${Math.round(skewMs)} ms`;
}

function showSelf(stream) {
  $("self").srcObject = stream;
  $("self").hidden = !stream;
  $("camera").setAttribute("aria-pressed", String(Boolean(stream)));
  if (stream) $("self").play().catch(() => {});
}

/** -60..-15 dBFS becomes 0..1. */
function unit(db) {
  return Math.min(1, Math.max(0, (db + 60) / 45));
}

/** Twenty times a second, so on the two shapes alone: a property of the body restyles every word of the transcript. */
function showLevels(micDb, remoteDb) {
  setLevel(document.querySelector("#mic .meter"), "--mic-level", unit(micDb));
  setLevel(document.querySelector(".ring-live"), "--mic-level", unit(micDb));
  setLevel(document.querySelector(".ring-live"), "--voice-level", unit(remoteDb));
}

function setLevel(element, name, level) {
  const value = (Math.round(level * 20) / 20).toFixed(2); // finer and room noise alone would paint all day
  if (element.style.getPropertyValue(name) !== value) element.style.setProperty(name, value);
}

function showRtt() {
  $("rtt").hidden = session?.rttMs == null;
  $("rtt").textContent = `${Math.max(1, Math.round(session?.rttMs ?? 0))} ms round trip`;
}

function show(entry) {
  wordsView.update(entry, transcript.entries);
  animate();
}

function notice({ title, text, detail = "", offer }) {
  $("notice-title").textContent = title;
  $("notice-text").textContent = text;
  $("notice-detail").textContent = detail;
  $("notice-detail").hidden = !detail;
  $("retry").hidden = !offer.includes("retry") && !offer.includes("token");
  $("listen").hidden = !offer.includes("listen");
  $("notice").hidden = false;
}

function help(code, detail = "") {
  const { title, text, offer } = HELP[code];
  notice(text ? { title, text, detail, offer } : { title, text: detail, offer });
}

function hideNotice() {
  $("notice").hidden = true;
}

function askForTap() {
  $("hear").hidden = false;
  help("autoplay");
}

function onAudible() {
  $("hear").hidden = true;
  hideNotice();
}

// -- movement ---------------------------------------------------------------------------------------------------------

/** The bar moves at half the rate of most screens: that looks as smooth, and the processor may be the character's too. */
function animate() {
  if (frame !== null || document.visibilityState !== "visible") return;
  frame = setTimeout(() => (frame = requestAnimationFrame(step)), FRAME_MS);
}

function step(now) {
  frame = null;
  const state = document.body.dataset.state;
  const moving = state === "speaking" && !session?.gate.muted;
  const ahead = cursor.ahead(now, moving);
  timeline.draw(ahead, live?.words ?? []);
  figures(ahead, now);
  if (live) wordsView.paint(live, ahead?.playback ?? null);
  if (state === "speaking" || state === "held") animate();
}

let figuresAt = 0;

/** Numbers change five times a second: faster and nobody can read them. */
function figures(ahead, now) {
  if (now - figuresAt < 200 && ahead) return;
  figuresAt = now;
  const ms = (value) => (ahead ? `${Math.round(value)} ms` : "–");
  $("delivered").textContent = ms(ahead?.delivered);
  $("lookahead").textContent = ms(ahead?.lookahead);
  $("budget").textContent = ms(ahead?.budget);
  $("timeline-badge").hidden = !ahead?.assumed;
}

// -- hands ------------------------------------------------------------------------------------------------------------

function say(text) {
  const words = text.trim();
  return words && session ? session.say(words) : null;
}

function toggleMicrophone() {
  micMuted = !micMuted;
  session.muteMicrophone(micMuted);
  showMicrophone();
}

function showMicrophone() {
  $("mic").setAttribute("aria-pressed", String(micMuted));
  $("mic").querySelector(".label").textContent = micMuted ? "Unmute" : "Mute";
}

async function toggleCamera() {
  const mine = session;
  if ($("camera").getAttribute("aria-pressed") === "true") return mine.closeCamera();
  $("camera").disabled = true;
  try {
    await mine.openCamera();
  } catch (error) {
    if (session !== mine) return undefined; // The person has left while it was opening.
    const denied = error.name === "NotAllowedError" ? "camera-denied" : "no-camera";
    help(error instanceof Trouble ? error.code : denied, `${error.name}: ${error.message}`);
  } finally {
    $("camera").disabled = false;
  }
  return undefined;
}

async function changeEchoCancellation() {
  options.aec = $("aec").checked;
  try {
    await session?.setEchoCancellation(options.aec);
  } catch (error) {
    failed(error);
  }
}

function wire() {
  $("connect").onclick = () => connectByHand({ mic: wantsMicrophone });
  $("retry").onclick = () => connectByHand({ mic: wantsMicrophone });
  $("listen").onclick = () => connectByHand({ mic: false });
  $("dismiss").onclick = hideNotice;
  $("leave").onclick = disconnect;
  $("mic").onclick = toggleMicrophone;
  $("camera").onclick = toggleCamera;
  $("stop").onclick = () => session?.stop();
  $("hear").onclick = () => session?.play();
  $("barge-in").onchange = () => { options.bargeIn = $("barge-in").checked; session?.setBargeIn(options.bargeIn); };
  $("aec").onchange = changeEchoCancellation;
  $("token-form").onsubmit = (event) => { event.preventDefault(); connectByHand(); };
  $("composer").onsubmit = (event) => { event.preventDefault(); if (say($("text").value)) $("text").value = ""; };
  $("video").onloadeddata = () => ($("video").hidden = false);
  $("log").ontoggle = () => { if ($("log").open) { $("log-lines").replaceChildren(); events.filter((e) => !QUIET_EVENTS.has(e.kind)).slice(-LOG_LINES_MAX).forEach(addLine); } };
  document.addEventListener("visibilitychange", animate);
  addEventListener("resize", animate);
  addEventListener("pagehide", disconnect);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", animate);
}

window.duplexd = {
  get state() { return document.body.dataset.state; },
  get session() { return session?.number ?? null; },
  get cursor() { return cursor.last && { ...cursor.last, shown: cursor.shown }; },
  get muted() { return session?.gate.muted ?? false; },
  get position() { return session?.position() ?? null; },
  get sight() { return session?.sight.figures && { ...session.sight.figures, skewMs: session.lips?.skewMs, wait: session.lips?.wait }; },
  get camera() { return session?.takesCamera ?? false; },
  transcript: () => transcript.snapshot(),
  latencies, events, connect, disconnect, say,
  stop: () => session?.stop(),
  speculate: (on) => session?.setSpeculation(on),
  stats: async () => [...((await session?.pc.getStats())?.values() ?? [])],
};

wire();
$("aec").checked = options.aec;
setState("idle");
animate();
if (!navigator.mediaDevices) help("insecure");
if (query.get("auto") === "1") connectByHand();
