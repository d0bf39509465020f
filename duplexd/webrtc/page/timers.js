// Timers that keep their pace while the page is in the background: a thin face of the worker in timer.js.

export class Timers {
  constructor() {
    this.worker = new Worker(new URL("timer.js", import.meta.url));
    this.calls = new Map();
    this.next = 1;
    this.worker.onmessage = ({ data }) => this.fire(data);
  }

  fire(id) {
    const call = this.calls.get(id);
    if (!call) return;
    if (call.once) this.calls.delete(id);
    call.run();
  }

  every(ms, run) {
    const id = this.next++;
    this.calls.set(id, { run, once: false });
    this.worker.postMessage({ id, every: ms });
    return id;
  }

  after(ms, run) {
    const id = this.next++;
    this.calls.set(id, { run, once: true });
    this.worker.postMessage({ id, after: ms });
    return id;
  }

  stop(id) {
    if (!this.calls.delete(id)) return;
    this.worker.postMessage({ id, stop: true });
  }

  close() {
    this.calls.clear();
    this.worker.terminate();
  }
}
