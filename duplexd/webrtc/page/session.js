// One session with the daemon: connect, two data channels, position reports, orders, voice hints, close.
// Knows nothing of the page's looks: it tells `on(kind, detail)` what happened.

import { Gate } from "./gate.js";
import { Trouble, refusalCode } from "./help.js";
import { Ears, cancelsEcho, inputMs, openMicrophone, stopAll } from "./microphone.js";
import { DelayMeter, ageMs, passed } from "./position.js";
import { LipSync, SightMeter, openCamera, slowDown } from "./sight.js";
import { StallWatch } from "./stall.js";
import { Timers } from "./timers.js";

const REPEATS_MS = [20, 60]; // after the first at once: one of three arrives even on a bad path
const MEDIA_PATH_MS = 15_000;
const SILENCE_MAX_MS = 6_000; // pings unanswered for so long: the server is gone
const GATHER_MAX_MS = 1_500;
const SIGHT_EVERY_MS = 2_000;
const DECODED_MS = 12; // decoded sound the statistics do not show, as the server has it
const FAST_BACKLOG_MAX = 16_384; // bytes; a position report that waits is worth nothing, so it is dropped

/** @param {string} token without it a daemon that asks for one names no TURN server */
export async function fetchConfig(token) {
  let response;
  try {
    response = await fetch("/api/config", { cache: "no-store", headers: bearer(token) });
  } catch (error) {
    throw new Trouble("unreachable", String(error.message));
  }
  if (!response.ok) throw new Trouble("unreachable", `GET /api/config answered ${response.status}.`);
  return response.json();
}

export class Session {
  /**
   * @param {object} setup
   * @param {HTMLAudioElement} setup.audio
   * @param {HTMLVideoElement} setup.video
   * @param {(kind: string, detail?: object) => void} setup.on
   * @param {{mic: boolean, aec: boolean, vad: boolean, bargeIn: ?boolean, token: string, iceServers: object[]}} setup.options
   */
  constructor({ audio, video, on, options }) {
    this.audio = audio;
    this.video = video;
    this.on = on;
    this.options = options;
    this.timers = new Timers();
    this.delays = new DelayMeter();
    this.sight = new SightMeter();
    this.stall = new StallWatch();
    this.stalled = "none"; // what of the server's has stopped
    this.lips = null;
    this.camera = null;
    this.gate = new Gate({
      setMuted: (muted) => this.setMuted(muted),
      position: () => this.position(),
      note: (kind, detail) => on(kind, detail),
    });
    this.ears = new Ears({ onVoice: (found) => this.onVoice(found), onMeter: (found) => on("meter", found) });
    this.closed = false;
    this.ready = null; // the server's `ready`, once it came
    this.silent = false; // autoplay is blocked
    this.voiceId = 0;
    this.stopId = 0;
    this.sayId = 0;
    this.pings = 0;
    this.heardAt = performance.now();
    this.rttMs = null;
    this.checking = null;
    this.microphone = null;
    this.micMuted = false;
    this.inputMs = 0; // from the microphone until a sample is ready for its packet
    this.speaking = false; // what the server last said of the character
    this.closeUrl = null;
    this.ownMute = false;
    this.deviceChange = () => this.onDeviceChange();
    this.visibility = () => this.tellSeen();
  }

  // -- connecting ----------------------------------------------------------------------------------------------------

  /** Resolves when the server is ready; raises Trouble, after everything has been closed. */
  async connect() {
    try {
      if (!window.RTCPeerConnection) throw new Trouble("no-webrtc");
      if (this.options.mic) await this.takeMicrophone();
      this.open();
      await this.signal();
      await this.waitForReady();
      this.begin();
    } catch (error) {
      this.close("connect failed");
      throw error;
    }
  }

  async takeMicrophone() {
    const microphone = await openMicrophone({ echoCancellation: this.options.aec });
    if (this.closed) return stopAll(microphone);
    this.holdMicrophone(microphone);
    // Opened before the call, so that the person's tap on "connect" still counts as the gesture that lets sound run.
    if (this.options.vad) await this.ears.start(microphone);
    navigator.mediaDevices.addEventListener("devicechange", this.deviceChange);
    return undefined;
  }

  holdMicrophone(microphone) {
    this.microphone = microphone;
    const [track] = microphone.getAudioTracks();
    track.enabled = !this.micMuted;
    track.onended = () => this.on("unplugged", {});
    this.on("microphone", { label: track.label, echoCancellation: cancelsEcho(track) });
  }

  open() {
    this.pc = new RTCPeerConnection({ iceServers: this.options.iceServers });
    this.pc.onconnectionstatechange = () => this.onConnection();
    this.pc.ontrack = (event) => this.onTrack(event);
    const track = this.microphone?.getAudioTracks()[0];
    this.voice = this.pc.addTransceiver(track ?? "audio", { direction: track ? "sendrecv" : "recvonly" });
    // Both ways from the start, so that a camera needs no new offer; whether it may be sent is for the answer to say.
    this.face = this.pc.addTransceiver("video", { direction: "sendrecv" });
    this.reliable = this.channel("duplexd", { ordered: true });
    this.fast = this.channel("duplexd-fast", { ordered: false, maxRetransmits: 0 });
  }

  channel(label, options) {
    const channel = this.pc.createDataChannel(label, options);
    channel.onmessage = ({ data }) => this.onMessage(data);
    channel.onclose = () => this.end("lost");
    return channel;
  }

  async signal() {
    await this.pc.setLocalDescription(await this.pc.createOffer());
    await gathered(this.pc, this.timers);
    const answer = await this.post(this.pc.localDescription);
    this.number = answer.session;
    this.closeUrl = answer.close_url;
    if (this.closed) return this.hangUp(); // left while the offer was on its way: the place must not stay taken
    await this.pc.setRemoteDescription({ type: answer.type, sdp: answer.sdp });
    this.on("answered", { session: answer.session });
    return undefined;
  }

  async post({ type, sdp }) {
    const headers = { "content-type": "application/json", ...bearer(this.options.token) };
    let response;
    try {
      response = await fetch("/api/session", { method: "POST", headers, body: JSON.stringify({ sdp, type }) });
    } catch (error) {
      throw new Trouble("unreachable", String(error.message));
    }
    const body = await response.json().catch(() => ({}));
    if (response.ok) return body;
    const retry = response.headers.get("retry-after");
    const after = retry ? ` Try again in ${retry} s.` : "";
    throw new Trouble(refusalCode(response.status, body.error?.code), (body.error?.message ?? `The server answered ${response.status}.`) + after);
  }

  waitForReady() {
    return new Promise((resolve, reject) => {
      this.settle = { resolve, reject };
      if (this.ready) resolve();
      this.timers.after(MEDIA_PATH_MS, () => this.ready || this.noMediaPath().then(reject));
    });
  }

  async noMediaPath() {
    const pairs = await candidatePairs(this.pc);
    this.on("candidate-pairs", { pairs });
    return new Trouble("media", pairs.length ? `Tried: ${pairs.join("; ")}.` : "No address pair could be tried.");
  }

  /** Connected and ready: start everything periodic. */
  begin() {
    this.heardAt = performance.now();
    this.timers.every(100, () => this.report());
    this.timers.every(200, () => this.readStats());
    this.timers.every(1000, () => this.ping());
    this.timers.every(SIGHT_EVERY_MS, () => this.reportSight());
    document.addEventListener("visibilitychange", this.visibility);
    if (document.visibilityState === "hidden") this.tellSeen();
    this.send(this.settings());
    this.ping();
    this.report();
  }

  /** What the page knows of itself. Whether voice may interrupt is the daemon's setting until the person changes it. */
  settings() {
    const found = { t: "set" };
    if (this.options.bargeIn !== null) found.barge_in = this.options.bargeIn;
    if (this.microphone) found.echo_cancellation = cancelsEcho(this.microphone.getAudioTracks()[0]);
    return found;
  }

  /** Whether a voice may interrupt: the person's choice, else what the daemon said. */
  get mayInterrupt() {
    return this.options.bargeIn ?? this.ready.barge_in;
  }

  // -- media ---------------------------------------------------------------------------------------------------------

  onTrack({ track, receiver }) {
    const stream = new MediaStream([track]);
    if (track.kind === "video") {
      this.lips = new LipSync((ms) => (receiver.jitterBufferTarget = ms));
      this.video.srcObject = stream;
      this.watchPictures();
      this.video.play().catch(() => this.on("video-waits", {}));
      return;
    }
    this.receiver = receiver;
    this.audio.srcObject = stream;
    this.play();
    this.ears.tap(stream);
  }

  /** Holds each shown picture against what is heard when it is shown. */
  watchPictures() {
    this.video.requestVideoFrameCallback?.((now, { rtpTimestamp, expectedDisplayTime }) => {
      if (this.closed) return;
      if (rtpTimestamp !== undefined && !this.gate.muted) this.lips.show(rtpTimestamp, this.heardAtTime(expectedDisplayTime));
      this.watchPictures();
    });
  }

  /** What is heard at a moment of performance.now(): a timestamp and the milliseconds past it; null before any packet. */
  heardAtTime(moment) {
    const at = this.position();
    return at && { rtp: at.rtp, ms: at.age_ms - at.playout_ms - DECODED_MS + (moment - performance.now()) };
  }

  /** Starts the sound, or says that the browser waits for a gesture. */
  async play() {
    try {
      await this.audio.play();
      if (this.silent) this.on("audible", {});
      this.silent = false;
      if (!this.ears.running) await this.ears.resume();
    } catch (error) {
      if (error.name !== "NotAllowedError") return; // replaced or closed while starting
      this.silent = true;
      this.on("autoplay-blocked", {});
    }
    if (this.ready) this.report();
  }

  setMuted(muted) {
    this.audio.muted = muted;
    this.ears?.tell({ audible: !muted });
  }

  position() {
    const source = this.receiver?.getSynchronizationSources()[0];
    if (!source) return null;
    const age = ageMs(source.timestamp, performance.now(), performance.timeOrigin);
    const { passed_ms, bound_ms } = passed(age, this.delays.phaseMs);
    const playout_ms = round(this.delays.playoutMs);
    return { rtp: source.rtpTimestamp >>> 0, age_ms: round(age), playout_ms, passed_ms: round(passed_ms), bound_ms };
  }

  async readStats() {
    if (!this.receiver || this.closed) return;
    const track = this.microphone?.getAudioTracks()[0];
    if (track) this.inputMs = inputMs(track);
    const stats = await this.pc.getStats();
    this.delays.take(stats.values());
    this.sight.take(stats.values());
    this.noteStall(stats.values());
  }

  noteStall(reports) {
    if (this.closed) return;
    const page = { seen: document.visibilityState !== "hidden", messageAt: this.heardAt };
    const stalled = this.stall.look(reports, performance.now(), page);
    if (stalled === this.stalled) return;
    this.stalled = stalled;
    this.on("stall", { stalled });
  }

  // -- sending -------------------------------------------------------------------------------------------------------

  send(message) {
    if (this.reliable?.readyState !== "open") return false;
    this.reliable.send(JSON.stringify(message));
    return true;
  }

  sendFast(message) {
    if (this.fast?.readyState !== "open" || this.fast.bufferedAmount > FAST_BACKLOG_MAX) return false;
    this.fast.send(JSON.stringify(message));
    return true;
  }

  sendThrice(message) {
    this.sendFast(message);
    for (const ms of REPEATS_MS) this.timers.after(ms, () => this.sendFast(message));
  }

  report(hold = 0) {
    const at = this.gate.heard();
    // Before any packet there is no position: a hold is then left unanswered rather than answered with a made-up cut.
    if (!at && (hold || !this.silent)) return;
    const { muted, epoch } = this.gate;
    const buffer_ms = round(this.delays.bufferMs);
    const input_ms = round(this.inputMs);
    this.sendFast({ t: "pos", ...(at ?? { rtp: 0, age_ms: 0 }), buffer_ms, input_ms, muted, epoch, hold, silent: this.silent });
  }

  /** No picture is made for a page that nobody sees. */
  tellSeen() {
    this.send({ t: "seen", on: document.visibilityState !== "hidden" });
  }

  reportSight() {
    const { received, decoded, dropped, freezes } = this.sight.figures ?? {};
    if (received === undefined) return;
    const skewMs = this.lips?.skewMs ?? null;
    this.sendFast({ t: "picture", received, decoded, dropped, freezes, skew_ms: skewMs === null ? null : round(skewMs) });
    this.on("sight", { ...this.sight.figures, skewMs });
  }

  ping() {
    const now = performance.now();
    if (now - this.heardAt > SILENCE_MAX_MS) return this.end("lost");
    this.sendFast({ t: "ping", n: ++this.pings, at: now });
    return undefined;
  }

  // -- receiving -----------------------------------------------------------------------------------------------------

  onMessage(data) {
    this.heardAt = performance.now();
    let message;
    try {
      message = JSON.parse(data);
    } catch (error) {
      return this.on("bad-message", { detail: error.message });
    }
    const own = { hold: 1, resume: 1, flush: 1 }[message.t] ? this.onOrder : this[`on_${message.t}`];
    return own?.call(this, message) === false ? undefined : this.on(message.t, message);
  }

  onOrder(message) {
    const now = performance.now();
    const first = this.gate.order(message, now);
    if (message.t === "hold") {
      if (first) {
        this.report(message.hold);
        this.watchGate();
      }
    } else if (first) {
      // `ownMute`: the page had stopped the character by itself and was wrong; the detector may learn from that.
      if (message.t === "resume" && this.ownMute) this.ears.tell({ falseAlarm: true });
      this.ownMute = false;
      this.report();
      this.watchGate();
    }
    this.sendFast({ t: "played", id: message.id });
    return first;
  }

  on_ready(message) {
    this.ready = message;
    this.gate.epoch = Math.max(this.gate.epoch, message.epoch);
    this.settle?.resolve();
  }

  on_state({ state }) {
    this.speaking = state === "speaking";
  }

  on_clocks(message) {
    this.lips?.begin(message);
  }

  on_pong({ at }) {
    this.rttMs = performance.now() - at;
  }

  on_closed({ reason }) {
    this.end("closed", reason);
    return false;
  }

  /** Looks at the gate every 5 ms while it is shut: for its timestamp, and for the deadline that every reason has. */
  watchGate() {
    if (this.checking !== null || !this.gate.muted) return;
    this.checking = this.timers.every(5, () => {
      if (this.gate.check(performance.now())) this.report();
      if (this.gate.muted) return;
      this.timers.stop(this.checking);
      this.checking = null;
    });
  }

  // -- voice ---------------------------------------------------------------------------------------------------------

  onVoice({ event, playing, onsetHops, coupling, ear }) {
    if (!this.ready) return;
    this.voiceId += 1;
    if (event === "off") {
      this.sendThrice({ t: "voice", on: false, id: this.voiceId });
      return this.on("voice", { on: false });
    }
    // In a pause of the character nothing plays, yet its next word must not come: the server's word counts as well.
    const interrupts = (playing || this.speaking) && this.mayInterrupt && !this.silent;
    const heard = interrupts ? this.gate.onset(performance.now()) : null; // mute first, then everything else
    this.sendThrice({ t: "voice", on: true, id: this.voiceId, ...ending(heard) });
    this.on("voice", { on: true, muted: heard !== null, onset_ms_ago: onsetHops * 10, coupling, ear });
    if (heard === null) return undefined;
    this.ownMute = true;
    this.watchGate();
    this.report();
    return undefined;
  }

  // -- what the person does ------------------------------------------------------------------------------------------

  say(text) {
    const id = `${this.number}-${++this.sayId}`;
    return this.send({ t: "say", text, id }) ? id : null;
  }

  /** Stop: quiet at once, then tell the server where the sound ended. */
  stop() {
    const wasMuted = this.gate.muted;
    if (this.position()) this.gate.onset(performance.now()); // before any packet there is nothing to mute and no cut
    this.sendThrice({ t: "stop", id: ++this.stopId, ...ending(this.gate.muted ? this.gate.heard() : null) });
    if (!wasMuted) this.watchGate();
    this.report();
  }

  setBargeIn(on) {
    this.options.bargeIn = on;
    this.send({ t: "set", barge_in: on });
  }

  /** Whether a turn that is probably over is answered ahead; for measurements, so it has no switch on the page. */
  setSpeculation(on) {
    this.send({ t: "set", speculation: on });
  }

  /** Whether the server takes a camera. */
  get takesCamera() {
    return Boolean(this.ready?.camera) && (this.face?.currentDirection ?? "").startsWith("send");
  }

  /** Lets the character see the person; raises the browser's own error when there is no camera. */
  async openCamera() {
    const stream = await openCamera();
    if (this.closed) return stopAll(stream);
    const [track] = stream.getVideoTracks();
    track.onended = () => this.closeCamera();
    this.camera = stream;
    try {
      await this.face.sender.replaceTrack(track);
      await slowDown(this.face.sender, track);
    } catch (error) {
      this.closeCamera(); // An eye that is open behind a button that says "off" is the last thing to leave behind.
      throw error;
    }
    if (this.camera !== stream) return undefined; // It ended, or the person left, meanwhile.
    this.send({ t: "camera", on: true });
    this.on("camera", { stream });
    return undefined;
  }

  closeCamera() {
    if (!this.camera) return;
    stopAll(this.camera);
    this.camera = null;
    this.face.sender.replaceTrack(null).catch(() => {}); // closed meanwhile
    this.send({ t: "camera", on: false });
    this.on("camera", { stream: null });
  }

  muteMicrophone(muted) {
    this.micMuted = muted;
    this.ears.mute(muted);
    for (const track of this.microphone?.getAudioTracks() ?? []) track.enabled = !muted;
  }

  /** Opens the microphone anew: browsers do not change the processing of an open one. */
  async setEchoCancellation(on) {
    this.options.aec = on;
    if (this.microphone) await this.replaceMicrophone();
  }

  async replaceMicrophone() {
    const microphone = await openMicrophone({ echoCancellation: this.options.aec });
    if (this.closed) return stopAll(microphone);
    const old = this.microphone;
    this.holdMicrophone(microphone);
    const [track] = microphone.getAudioTracks();
    await this.voice.sender.replaceTrack(track);
    await this.ears.listenTo(microphone);
    stopAll(old);
    this.send({ t: "set", echo_cancellation: cancelsEcho(track) });
    return undefined;
  }

  async onDeviceChange() {
    const track = this.microphone?.getAudioTracks()[0];
    if (!track || track.readyState === "live" || this.closed) return;
    try {
      await this.replaceMicrophone();
      this.on("replugged", {});
    } catch (error) {
      this.on("unplugged", { detail: error.message });
    }
  }

  // -- the end -------------------------------------------------------------------------------------------------------

  onConnection() {
    this.on("connection", { state: this.pc.connectionState });
    if (this.pc.connectionState !== "failed") return;
    if (this.ready) this.end("lost");
    else this.noMediaPath().then((trouble) => this.settle?.reject(trouble));
  }

  /** The session ends by itself: `code` is a key of HELP. */
  end(code, detail = "") {
    if (this.closed) return;
    const trouble = new Trouble(code, detail);
    const connecting = this.settle && !this.ready;
    if (connecting) return this.settle.reject(trouble);
    this.close(code);
    this.on("ended", { trouble });
  }

  hangUp() {
    if (this.closeUrl) navigator.sendBeacon(this.closeUrl); // arrives even while the page goes away
    this.closeUrl = null;
  }

  close(reason) {
    if (this.closed) return;
    this.closed = true;
    this.settle?.reject(new Trouble("closed", reason)); // nothing happens where it has been settled before
    this.hangUp();
    navigator.mediaDevices?.removeEventListener("devicechange", this.deviceChange);
    document.removeEventListener("visibilitychange", this.visibility);
    this.ears.close();
    this.timers.close();
    if (this.microphone) stopAll(this.microphone);
    if (this.camera) stopAll(this.camera);
    this.camera = null;
    this.pc?.close();
    this.audio.srcObject = null;
    this.video.srcObject = null;
    this.audio.muted = false;
    this.on("close", { reason });
  }
}

/** Where the sound ended, as `voice` and `stop` say it. */
function ending(heard) {
  if (!heard) return { muted: false };
  return { muted: true, rtp: heard.rtp, passed_ms: heard.passed_ms, bound_ms: heard.bound_ms };
}

function bearer(token) {
  return token ? { authorization: `Bearer ${token}` } : {};
}

function round(ms) {
  return Math.round(ms * 10) / 10;
}

/** The server takes no trickled candidates: wait for all of ours, but never for a slow STUN server. */
function gathered(pc, timers) {
  return new Promise((resolve) => {
    const done = () => pc.iceGatheringState === "complete" && resolve();
    pc.addEventListener("icegatheringstatechange", done);
    timers.after(GATHER_MAX_MS, resolve);
    done();
  });
}

/** "local -> remote: state" of every pair that was tried, for a person who must find the firewall. */
async function candidatePairs(pc) {
  const stats = await pc.getStats();
  const address = (id) => {
    const c = stats.get(id);
    return c ? `${c.candidateType} ${c.address ?? "hidden"}:${c.port}/${c.protocol}` : "unknown";
  };
  const pairs = [...stats.values()].filter((s) => s.type === "candidate-pair");
  return pairs.slice(0, 12).map((p) => `${address(p.localCandidateId)} to ${address(p.remoteCandidateId)}: ${p.state}`);
}
