// Runs the voice detector on the audio thread: input 0 is the microphone, input 1 the character's voice, input 2 the
// microphone without echo cancellation where the browser gives it.
// Posts {event, ...} at once when voice begins or ends, and {meter, ...} every 50 ms.

import { TwinDetector } from "./detector.js";

const METER_HOPS = 5;

class VoiceProcessor extends AudioWorkletProcessor {
  constructor({ processorOptions }) {
    super();
    this.detector = new TwinDetector({ rate: sampleRate, echoCancellation: processorOptions.echoCancellation });
    this.mic = new Float32Array(this.detector.hopSamples);
    this.remote = new Float32Array(this.detector.hopSamples);
    this.raw = new Float32Array(this.detector.hopSamples);
    this.twin = false;
    this.filled = 0;
    this.hops = 0;
    this.micDb = -100;
    this.remoteDb = -100;
    this.audible = true;
    this.alive = true;
    this.port.onmessage = ({ data }) => this.order(data);
  }

  order(data) {
    if (data.audible !== undefined) this.audible = data.audible;
    if (data.echoCancellation !== undefined) this.detector.setEchoCancellation(data.echoCancellation);
    if (data.falseAlarm) this.detector.falseAlarm();
    if (data.close) this.alive = false;
  }

  process(inputs) {
    const mic = inputs[0]?.[0];
    const remote = inputs[1]?.[0];
    const raw = inputs[2]?.[0];
    this.twin = raw !== undefined;
    const length = mic?.length ?? remote?.length ?? 128;
    for (let i = 0; i < length; i++) {
      this.mic[this.filled] = mic ? mic[i] : 0; // an unplugged microphone is silence, not a detector that stands still
      this.remote[this.filled] = remote ? remote[i] : 0;
      this.raw[this.filled] = raw ? raw[i] : 0;
      if (++this.filled === this.mic.length) this.finishHop();
    }
    return this.alive;
  }

  finishHop() {
    this.filled = 0;
    const found = this.detector.hop(this.mic, this.twin ? this.raw : null, this.remote, this.audible);
    if (found.event) this.port.postMessage({ ...found, coupling: this.detector.coupling, time: currentTime });
    this.micDb = Math.max(this.micDb, found.micDb);
    this.remoteDb = Math.max(this.remoteDb, found.remoteDb);
    if (++this.hops % METER_HOPS) return;
    this.port.postMessage({ meter: true, micDb: this.micDb, remoteDb: this.remoteDb });
    this.micDb = -100;
    this.remoteDb = -100;
  }
}

registerProcessor("voice", VoiceProcessor);
