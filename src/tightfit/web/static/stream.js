// The connection that says what is new of a run, or of several: kept while somebody looks, and taken up again by itself.

import { isRefused } from "/static/parts.js";

const SILENT_MS = 45_000; // the server says at least every 15 s that it is there
const LOOK_MS = 5000;

export class Stream {
  /** `take(number, sections)`: a message, of which run; `changed()`: the connection is another than before. */
  constructor(runs, take, changed) {
    Object.assign(this, { runs, take, changed, source: null, again: 0, heard: Date.now(), refused: false });
    // A connection that was cut without a word, as by a laptop that slept, looks like one on which nothing is said.
    setInterval(() => {
      if (!document.hidden && this.source !== null && Date.now() - this.heard > SILENT_MS) {
        this.listen();
        changed();
      }
    }, LOOK_MS);
    // A page that nobody looks at holds no connection: browsers allow few of them to one server.
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) {
        clearTimeout(this.again);
        this.source?.close();
        this.source = null;
        changed();
      } else this.listen();
    });
    addEventListener("pagehide", () => this.source?.close());
    addEventListener("pageshow", (event) => { if (event.persisted) this.listen(); });
    if (!document.hidden) this.listen();
  }

  get isOpen() {
    return this.source?.readyState === EventSource.OPEN;
  }

  listen() {
    clearTimeout(this.again);
    this.source?.close();
    this.heard = Date.now();
    const asked = [...this.runs.map((run) => ["run", run]), ["lang", document.documentElement.lang.slice(0, 2)]];
    const mine = new EventSource(`/runs/stream?${new URLSearchParams(asked)}`);
    this.source = mine;
    this.runs.forEach((_, number) => {
      mine.addEventListener(this.runs.length > 1 ? String(number) : "message", (event) => {
        this.heard = Date.now();
        this.take(number, JSON.parse(event.data));
      });
    });
    mine.addEventListener("beat", () => { this.heard = Date.now(); });
    mine.onopen = () => {
      this.refused = false;
      this.changed();
    };
    mine.onerror = async () => {
      this.changed();
      if (mine.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
      this.refused = await isRefused();
      if (mine !== this.source) return;
      this.again = setTimeout(() => this.listen(), LOOK_MS);
      this.changed();
    };
  }
}
