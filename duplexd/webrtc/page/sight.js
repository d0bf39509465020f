// What the person sees of the character, in figures, and what the character may see of the person.

const SKEW_MAX_MS = 5000; // beyond that one of the two stands still, and the difference means nothing

/** Figures of the character's picture, from readings of getStats(). */
export class SightMeter {
  constructor() {
    this.clear();
  }

  clear() {
    this.last = null;
    this.figures = null; // null until two readings with a picture in them
  }

  /** @param {Iterable<object>} reports the values of one RTCStatsReport */
  take(reports) {
    let video = null;
    let audio = null;
    for (const report of reports) {
      if (report.type !== "inbound-rtp") continue;
      if (report.kind === "video") video = report;
      if (report.kind === "audio") audio = report;
    }
    if (!video || !(video.framesReceived > 0)) return;
    const last = this.last;
    if (last && video.timestamp - last.timestamp < 900) return; // differences over less than a second are noise
    this.last = video;
    if (last) this.figures = figuresOf(last, video, audio);
  }
}

function figuresOf(last, video, audio) {
  const seconds = (video.timestamp - last.timestamp) / 1000;
  return {
    received: video.framesReceived,
    decoded: video.framesDecoded ?? 0,
    dropped: video.framesDropped ?? 0,
    freezes: video.freezeCount ?? 0,
    fps: (video.framesReceived - last.framesReceived) / seconds,
    kbit: ((video.bytesReceived - last.bytesReceived) * 8) / 1000 / seconds,
    skewMs: skewOf(audio, video),
  };
}

/** How far the voice is ahead of the picture, by the browser's own account; null until both have been told the time. */
function skewOf(audio, video) {
  const skew = (audio?.estimatedPlayoutTimestamp ?? NaN) - (video.estimatedPlayoutTimestamp ?? NaN);
  return Math.abs(skew) < SKEW_MAX_MS ? skew : null;
}

// -- the camera -------------------------------------------------------------------------------------------------------

export const CAMERA = Object.freeze({ width: 320, height: 240, fps: 5, bitrate: 150_000 }); // the server takes no more

/** Opens the camera, small and slow. Raises the browser's own error. */
export async function openCamera() {
  const { width, height, fps } = CAMERA;
  const video = { width: { ideal: width }, height: { ideal: height }, frameRate: { ideal: fps }, facingMode: "user" };
  const stream = await navigator.mediaDevices.getUserMedia({ video });
  return stream;
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
