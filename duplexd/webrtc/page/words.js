// Shows the transcript: one block an utterance, one span a word of the character.

import { Transcript } from "./transcript.js";

const FATES = ["heard", "now", "pending", "struck"];

export class WordsView {
  constructor({ list, empty, announcer }) {
    this.list = list;
    this.empty = empty;
    this.announcer = announcer;
    this.nodes = new Map();
  }

  clear() {
    this.list.replaceChildren();
    this.nodes.clear();
    this.empty.hidden = false;
  }

  /** Brings the list up to date with one entry; `entries` says which blocks still exist. */
  update(entry, entries) {
    const atEnd = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 60;
    const node = this.nodes.get(entry) ?? this.add(entry);
    if (entry.role === "user") this.user(entry, node);
    else this.reply(entry, node);
    this.drop(new Set(entries));
    if (atEnd) this.list.scrollTop = this.list.scrollHeight;
  }

  add(entry) {
    const item = element("li", `utterance ${entry.role}`);
    const who = element("span", "who", entry.role === "user" ? "You" : "Character");
    const text = element("p", "text");
    const note = element("span", "note");
    note.hidden = true;
    who.append(note);
    item.append(who, text);
    this.list.append(item);
    this.empty.hidden = true;
    const node = { item, text, note, spans: [] };
    this.nodes.set(entry, node);
    return node;
  }

  drop(alive) {
    for (const [entry, node] of this.nodes) {
      if (alive.has(entry)) continue;
      node.item.remove();
      this.nodes.delete(entry);
    }
  }

  user({ text, stable, final }, node) {
    const unstable = element("span", "unstable", text.slice(stable));
    node.text.replaceChildren(text.slice(0, stable), unstable);
    node.item.hidden = !text.trim() && !final;
    node.note.textContent = "not understood: say it again";
    node.note.hidden = !final || Boolean(text.trim());
    if (final) this.announce(node, text.trim() ? `You: ${text}` : "You were not understood.");
  }

  reply(entry, node) {
    for (let i = node.spans.length; i < entry.words.length; i++) this.addWord(node);
    entry.words.forEach((word, i) => {
      const text = word.text.trim();
      if (node.spans[i].textContent !== text) node.spans[i].textContent = text;
    });
    node.item.hidden = !isShown(entry);
    this.paint(entry, null);
    this.noteOf(entry, node);
    if (!entry.final) return;
    this.announce(node, `Character: ${entry.words.slice(0, entry.heard).map((w) => w.text.trim()).join(" ")}`);
  }

  addWord(node) {
    const span = element("span", "word pending");
    node.spans.push(span);
    node.text.append(span, " ");
  }

  noteOf(entry, node) {
    const notes = [];
    if (entry.interrupted) notes.push("interrupted");
    if (entry.state === "completed" && entry.final && entry.words.length === 0) notes.push("had nothing to say");
    if (entry.state === "failed") notes.push(failure(entry));
    if (entry.estimated) notes.push("estimated");
    node.note.textContent = notes.join(", ");
    node.note.hidden = notes.length === 0;
    node.note.title = entry.estimated ? "What was heard is estimated by a clock: this browser reported no position." : "";
  }

  /** Gives each word its look for a playback position in ticks (null: only what is known for certain). */
  paint(entry, playback) {
    const node = this.nodes.get(entry);
    node?.spans.forEach((span, i) => {
      const fate = Transcript.fate(entry, i, playback);
      const unsure = entry.ambiguous.has(i);
      const key = `${fate}${unsure}`;
      if (span.dataset.key === key) return;
      span.dataset.key = key;
      for (const name of FATES) span.classList.toggle(name, name === fate);
      span.classList.toggle("ambiguous", unsure);
      span.title = unsure ? "It cannot be told for certain whether this word was heard." : fate === "struck" ? "Never heard" : "";
    });
  }

  /** For screen readers, once an utterance: the words themselves change too often to be read aloud. */
  announce(node, text) {
    if (node.announced || !text.trim()) return;
    node.announced = true;
    this.announcer.textContent = text;
  }
}

/** Whether a reply exists for the conversation: it has words, unless none was heard; or it ended without any. */
export function isShown({ words, heard, final, state }) {
  if (words.length === 0) return state === "failed" || (final && state === "completed");
  return !(final && heard === 0 && state === "cancelled");
}

function failure({ partial, reason }) {
  const what = partial ? "the words are whole, the voice failed" : "failed";
  return reason ? `${what}: ${reason}` : what;
}

function element(tag, className, text = "") {
  const node = document.createElement(tag);
  node.className = className;
  if (text) node.textContent = text;
  return node;
}
