// What the person sees of the character, in figures; when it is shown; and what the character may see of the person.

import { Trouble } from "./help.js";
import { RTP_PER_MS, rtpDistance } from "./position.js";

const VIDEO_PER_MS = 90;

/** Figures of the character's picture, from readings of getStats(). */
export class SightMeter {
  constructor() {
    this.last = null;
    this.figures = null; // null until two readings with a picture in them
  }

  /** @param {Iterable<object>} reports the values of one RTCStatsReport */
  take(reports) {
    for (const report of reports) {
      if (report.type === "inbound-rtp" && report.kind === "video" && report.framesReceived > 0) this.takeVideo(report);
    }
  }

  takeVideo(report) {
    const last = this.last;
    if (last && report.timestamp - last.timestamp < 900) return; // differences over less than a second are noise
    this.last = report;
    if (!last) return;
    const seconds = (report.timestamp - last.timestamp) / 1000;
    this.figures = {
      received: report.framesReceived,
      decoded: report.framesDecoded ?? 0,
      dropped: report.framesDropped ?? 0,
      freezes: report.freezeCount ?? 0,
      fps: (report.framesReceived - last.framesReceived) / seconds,
      kbit: ((report.bytesReceived - last.bytesReceived) * 8) / 1000 / seconds,
    };
  }
}

// -- lips and voice ---------------------------------------------------------------------------------------------------

export const WAIT_FIRST_MS = 20; // how long a picture waits before anything was measured; it left 40 ms after its voice
const WAIT_MAX_MS = 600;
const AIM_MS = -15; // a picture that is early by that is noticed less than one that is late, as in life
const STILL_MS = 12; // nobody sees less, and each change costs the browser a stutter
const SAMPLES = 25; // a second of pictures
const SKEW_MAX_MS = 2000; // beyond that one of the two stands still, and the difference means nothing

/** A u32 timestamp as milliseconds since a first one, right beyond the wrap (25 hours of voice, 13 of pictures). */
class Unwrapped {
  constructor(first, perMs) {
    this.last = first;
    this.ticks = 0;
    this.perMs = perMs;
  }

  ms(rtp) {
    this.ticks += rtpDistance(rtp, this.last);
    this.last = rtp;
    return this.ticks / this.perMs;
  }
}

/**
 * Brings the picture to the voice, never the voice to the picture: voice and picture come as two streams, so that the
 * browser holds neither back for the other, and each picture waits as long as the voice's buffer and device take.
 * The server says which two timestamps are one moment; then the difference of both at the eye and the ear is the skew.
 */
export class LipSync {
  /** @param {(ms: number) => void} setWait how long pictures are held back from their arrival on */
  constructor(setWait) {
    this.setWait = setWait;
    this.voice = null;
    this.face = null;
    this.wait = WAIT_FIRST_MS;
    this.samples = [];
    this.skewMs = null; // how far the voice is ahead of the picture
    setWait(this.wait);
  }

  /** The server says which two RTP timestamps are one moment. */
  begin({ voice, face }) {
    this.voice = new Unwrapped(voice, RTP_PER_MS);
    this.face = new Unwrapped(face, VIDEO_PER_MS);
  }

  /**
   * A picture is shown.
   * @param {number} faceRtp its timestamp  @param {{rtp: number, ms: number}|null} heard what is heard when it is shown
   */
  show(faceRtp, heard) {
    if (!this.face || !heard) return;
    const skew = this.voice.ms(heard.rtp) + heard.ms - this.face.ms(faceRtp);
    if (Math.abs(skew) > SKEW_MAX_MS) return;
    this.samples.push(skew);
    if (this.samples.length >= SAMPLES) this.judge();
  }

  judge() {
    const sorted = this.samples.sort((a, b) => a - b);
    this.samples = [];
    this.skewMs = sorted[sorted.length >> 1];
    const late = this.skewMs - AIM_MS;
    if (Math.abs(late) < STILL_MS) return;
    const wait = Math.min(WAIT_MAX_MS, Math.max(0, this.wait - late));
    if (wait === this.wait) return;
    this.wait = wait;
    this.setWait(wait);
  }
}

// -- the camera -------------------------------------------------------------------------------------------------------

const CAMERA = Object.freeze({ width: 320, height: 240, fps: 5, bitrate: 150_000 }); // the server takes no more

/** Opens the camera, small and slow. Raises the browser's own error. */
export async function openCamera() {
  const { width, height, fps } = CAMERA;
  const video = { width: { ideal: width }, height: { ideal: height }, frameRate: { ideal: fps }, facingMode: "user" };
  if (!navigator.mediaDevices?.getUserMedia) throw new Trouble("camera-insecure");
  return navigator.mediaDevices.getUserMedia({ video });
}

/** What a camera that gives more than it was asked for is held down to. */
export async function slowDown(sender, track) {
  const parameters = sender.getParameters();
  if (!parameters.encodings?.length) return; // Firefox has none before the first packet; the server drops the rest.
  const { height = CAMERA.height } = track.getSettings();
  Object.assign(parameters.encodings[0], {
    maxFramerate: CAMERA.fps, maxBitrate: CAMERA.bitrate, scaleResolutionDownBy: Math.max(1, height / CAMERA.height),
  });
  await sender.setParameters(parameters);
}
