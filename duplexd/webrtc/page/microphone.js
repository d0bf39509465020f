// The microphone and the detector that listens to it.

import { Trouble, microphoneCode } from "./help.js";

/** Opens the microphone. Raises Trouble with a key of HELP. */
export async function openMicrophone({ echoCancellation }) {
  if (!navigator.mediaDevices?.getUserMedia) throw new Trouble("insecure");
  const audio = { echoCancellation, noiseSuppression: true, autoGainControl: true };
  try {
    return await navigator.mediaDevices.getUserMedia({ audio });
  } catch (error) {
    throw new Trouble(microphoneCode(error), `${error.name}: ${error.message}`);
  }
}

/**
 * The same microphone once more, without any processing, for the detector alone; null where a browser cannot do that.
 * Only Chromium processes each stream by itself: elsewhere a second request changes or silences the first.
 */
async function openRaw(microphone) {
  const [track] = microphone.getAudioTracks();
  if (!("userAgentData" in navigator) || !cancelsEcho(track)) return null;
  const { deviceId } = track.getSettings();
  const audio = { deviceId: { exact: deviceId }, echoCancellation: false, noiseSuppression: false, autoGainControl: false };
  try {
    const raw = await navigator.mediaDevices.getUserMedia({ audio });
    if (!cancelsEcho(raw.getAudioTracks()[0]) && cancelsEcho(track)) return raw;
    stopAll(raw);
  } catch {
    // One ear is enough: interruptions are then noticed some 100 ms later.
  }
  return null;
}

export function stopAll(stream) {
  for (const track of stream?.getTracks() ?? []) {
    track.onended = null;
    track.stop();
  }
}

/** What the browser really does, whatever was asked: newer ones name the kind of cancellation instead of true. */
export function cancelsEcho(track) {
  return Boolean(track.getSettings().echoCancellation);
}

const PROCESSED_MS = 16.5; // echo cancellation takes 10 ms at a time, Opus looks 6.5 ms ahead; no statistics show it

/** Milliseconds from the microphone until a sample is ready for its packet, as far as the browser says. */
export function inputMs(track) {
  const measured = track.stats?.averageLatency; // of the device, with what it still held
  const told = 1000 * (track.getSettings().latency ?? 0);
  return (Number.isFinite(measured) ? measured : told) + PROCESSED_MS;
}

/** The worklet with its two inputs. It never feeds the loudspeaker: sound through WebAudio escapes echo cancellation. */
export class Ears {
  /**
   * @param {{onVoice: (found: object) => void, onMeter: (found: object) => void}} handlers
   */
  constructor({ onVoice, onMeter }) {
    this.onVoice = onVoice;
    this.onMeter = onMeter;
    this.context = null;
    this.node = null;
    this.micSource = null;
    this.raw = null;
    this.rawSource = null;
    this.muted = false;
    this.remoteSource = null;
  }

  async start(microphone) {
    this.context = new AudioContext({ latencyHint: "interactive" });
    await this.context.audioWorklet.addModule(new URL("worklet.js", import.meta.url));
    if (!this.context || this.context.state === "closed") return; // left while the module was loading
    this.node = new AudioWorkletNode(this.context, "voice", {
      numberOfInputs: 3,
      numberOfOutputs: 1,
      processorOptions: { echoCancellation: cancelsEcho(microphone.getAudioTracks()[0]) },
    });
    this.node.port.onmessage = ({ data }) => (data.meter ? this.onMeter(data) : this.onVoice(data));
    const silent = new GainNode(this.context, { gain: 0 });
    this.node.connect(silent).connect(this.context.destination); // without a destination the graph is not pulled
    await this.listenTo(microphone);
  }

  async listenTo(microphone) {
    if (!this.node) return;
    this.micSource?.disconnect();
    this.micSource = new MediaStreamAudioSourceNode(this.context, { mediaStream: microphone });
    this.micSource.connect(this.node, 0, 0);
    this.tell({ echoCancellation: cancelsEcho(microphone.getAudioTracks()[0]) });
    this.dropRaw();
    const raw = await openRaw(microphone);
    if (!this.node) return stopAll(raw); // closed in the meantime
    this.raw = raw;
    if (!raw) return undefined;
    this.mute(this.muted);
    this.rawSource = new MediaStreamAudioSourceNode(this.context, { mediaStream: raw });
    this.rawSource.connect(this.node, 0, 2);
    return undefined;
  }

  dropRaw() {
    this.rawSource?.disconnect();
    this.rawSource = null;
    stopAll(this.raw);
    this.raw = null;
  }

  /** The person muted the microphone: this ear is deaf as well. */
  mute(muted) {
    this.muted = muted;
    for (const track of this.raw?.getTracks() ?? []) track.enabled = !muted;
  }

  /** Taps the character's voice, so that its echo is not taken for a person. */
  tap(remote) {
    if (!this.node || this.remoteSource) return;
    this.remoteSource = new MediaStreamAudioSourceNode(this.context, { mediaStream: remote });
    this.remoteSource.connect(this.node, 0, 1);
  }

  tell(message) {
    this.node?.port.postMessage(message);
  }

  get running() {
    return this.context?.state === "running";
  }

  async resume() {
    await this.context?.resume();
  }

  close() {
    this.tell({ close: true });
    this.dropRaw();
    if (this.context && this.context.state !== "closed") this.context.close();
    this.context = null;
    this.node = null;
  }
}
