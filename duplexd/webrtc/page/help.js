// What the page says when something is in the way: what happened, and what the person can do. One sentence each where possible.
// `offer` names the buttons that make sense there: "retry", "listen" (go on without a microphone), "token".

export const HELP = {
  insecure: {
    title: "The browser hides the microphone on this address",
    text: "Browsers give the microphone only to secure pages. Open this page by https (start the daemon with --tls), or by http://localhost, for example through ssh -L. You can still listen and type here.",
    offer: ["listen"],
  },
  denied: {
    title: "The microphone is not allowed",
    text: "The browser or the system refused the microphone for this page. Allow it in the site settings beside the address, then try again; or go on by listening and typing.",
    offer: ["retry", "listen"],
  },
  "no-device": {
    title: "No microphone was found",
    text: "Plug one in or switch it on, then try again; or go on by listening and typing.",
    offer: ["retry", "listen"],
  },
  "device-busy": {
    title: "The microphone cannot be opened",
    text: "Another program may be using it. Close that program and try again; or go on by listening and typing.",
    offer: ["retry", "listen"],
  },
  unplugged: {
    title: "The microphone went away",
    text: "The session goes on: you can listen and type. When a microphone is there again, it is taken by itself.",
    offer: [],
  },
  "camera-denied": {
    title: "The camera is not allowed",
    text: "The browser or the system refused the camera for this page. Allow it in the site settings beside the address, then press the camera button again. The conversation goes on without it.",
    offer: [],
  },
  "camera-insecure": {
    title: "This address may not use a camera",
    text: "Browsers give a camera only to https pages and to localhost. Open the page there, or go on without it.",
    offer: [],
  },
  "no-camera": {
    title: "No camera can be opened",
    text: "None is plugged in, or another program uses it. The conversation goes on without it.",
    offer: [],
  },
  faceless: {
    title: "The character has no face here",
    text: "This server cannot draw it; you can talk all the same.",
    offer: [],
  },
  autoplay: {
    title: "The browser waits for you before it plays sound",
    text: "Tap the button to hear. Until then nothing counts as heard.",
    offer: [],
  },
  busy: {
    title: "All places are taken",
    text: "The server serves as many sessions as it can keep in real time. Try again in a moment.",
    offer: ["retry"],
  },
  token: {
    title: "This server wants a token",
    text: "Enter the token the daemon was started with.",
    offer: ["token"],
  },
  unreachable: {
    title: "The server does not answer",
    text: "The daemon may be stopped or still loading its model. Try again in a moment.",
    offer: ["retry"],
  },
  "no-webrtc": {
    title: "This browser has no WebRTC",
    text: "Use a current Chrome, Edge, Firefox or Safari with WebRTC switched on.",
    offer: [],
  },
  media: {
    title: "Sound and picture do not get through",
    text: "The page reached the server, but no UDP path opened within 15 seconds. A firewall or a tunnel that carries only TCP is the usual reason: open UDP to the server, announce its public address, or configure a TURN server.",
    offer: ["retry"],
  },
  lost: {
    title: "The connection is lost",
    text: "The server has not been heard for several seconds. Check the network and connect again.",
    offer: ["retry"],
  },
  reconnected: {
    title: "Connected again",
    text: "The connection had broken. What was said is still here to read, but this is a new conversation: the character knows nothing of it.",
    offer: [],
  },
  refused: { title: "The server refused the session", text: "", offer: ["retry"] },
  closed: { title: "The session has ended", text: "", offer: ["retry"] },
};

const REASONS = [
  [/engine/i, "The engine restarted. What was said is gone; connect again to begin anew."],
  [/shutdown|drain|stop/i, "The server is shutting down."],
];

/** A sentence for the reason of a `closed` message; an unknown reason is shown as it came. */
export function closedSentence(reason) {
  return REASONS.find(([pattern]) => pattern.test(reason))?.[1] ?? (reason ? `Reason: ${reason}.` : "");
}

/** The help that fits an error of getUserMedia. */
export function microphoneCode(error) {
  if (error.name === "NotAllowedError" || error.name === "SecurityError") return "denied";
  if (error.name === "NotFoundError" || error.name === "OverconstrainedError") return "no-device";
  return "device-busy";
}

/** The help that fits an HTTP answer to an offer. */
export function refusalCode(status, code) {
  if (["loading", "closing", "engine_silent"].includes(code)) return "unreachable";
  if (status === 401 || status === 403) return "token";
  return status === 503 || status === 429 ? "busy" : "refused";
}

/** An error the page can show: `code` is a key of HELP, `detail` a sentence of the server or the browser. */
export class Trouble extends Error {
  constructor(code, detail = "") {
    super(detail || HELP[code].title);
    this.code = code;
    this.detail = detail;
  }
}
