// The conversation as data: the person's words, and the character's words with what became of each.
// A word of the character is pending, heard or struck (never heard); inside the cursor's error bound it is ambiguous.

const ENTRIES_MAX = 400; // the oldest leave: a session may last for days

export class Transcript {
  constructor(entriesMax = ENTRIES_MAX) {
    this.entriesMax = entriesMax;
    this.clear();
  }

  clear() {
    this.entries = [];
    this.beginAnew();
  }

  /** A new session counts its turns and responses from the beginning; what was said before stays where it is. */
  beginAnew() {
    this.turns = new Map();
    this.replies = new Map();
  }

  add(entry, index, key) {
    index.set(key, entry);
    this.entries.push(entry);
    if (this.entries.length > this.entriesMax) this.drop(this.entries.shift());
    return entry;
  }

  drop(entry) {
    const index = entry.role === "user" ? this.turns : this.replies;
    if (index.get(entry.key) === entry) index.delete(entry.key); // else a later session's has that number
  }

  user({ turn, text, stable, final }) {
    const entry = this.turns.get(turn) ?? this.add({ role: "user", key: turn }, this.turns, turn);
    return Object.assign(entry, { text, stable: final ? text.length : stable, final });
  }

  replyOf(response) {
    const fresh = () => ({
      role: "character", key: response, state: "created", reason: "", words: [],
      heard: 0, ambiguous: new Set(), estimated: false, final: false, interrupted: false, partial: false,
    });
    return this.replies.get(response) ?? this.add(fresh(), this.replies, response);
  }

  /** `partial`: the voice failed, and all words had been told by then. */
  reply({ response, state, reason, outputs = {} }) {
    const partial = outputs.text === "completed" && outputs.voice === "failed";
    return Object.assign(this.replyOf(response), { state, reason, partial });
  }

  /** Words may come twice (a repeat overwrites) but never with a hole: what is missing stays an empty word. */
  words({ response, first, words }) {
    const entry = this.replyOf(response);
    while (entry.words.length < first) entry.words.push({ text: "", start: 0, end: 0 });
    entry.words.splice(first, words.length, ...words);
    return entry;
  }

  heard({ response, words, ambiguous, estimated, final }) {
    const entry = this.replyOf(response);
    entry.heard = words;
    entry.ambiguous = new Set(ambiguous);
    entry.estimated = estimated;
    entry.final = final;
    entry.interrupted = final && words < entry.words.length;
    return entry;
  }

  /** "heard", "now", "pending" or "struck"; `playback` in ticks, or null when no cursor is known. */
  static fate(entry, index, playback) {
    if (index < entry.heard) return "heard";
    if (entry.final) return "struck";
    const word = entry.words[index];
    if (playback === null || playback < word.start) return "pending";
    return playback < word.end ? "now" : "heard";
  }

  snapshot() {
    return this.entries.map((entry) => (entry.role === "user" ? userView(entry) : replyView(entry)));
  }
}

function userView({ key, text, stable, final }) {
  return { role: "user", turn: key, text, stable, final, heard: text, struck: "", ambiguous: [] };
}

function replyView(entry) {
  const heard = entry.words.slice(0, entry.heard);
  const struck = entry.final ? entry.words.slice(entry.heard) : [];
  return {
    role: "character", response: entry.key, state: entry.state, reason: entry.reason,
    text: join(entry.words), heard: join(heard), struck: join(struck),
    ambiguous: [...entry.ambiguous].filter((i) => i < entry.words.length).map((i) => entry.words[i].text.trim()),
    estimated: entry.estimated, partial: entry.partial, final: entry.final, words: entry.words.length, heardWords: entry.heard,
  };
}

function join(words) {
  return words.map((w) => w.text.trim()).filter(Boolean).join(" ");
}
