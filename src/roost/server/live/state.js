/** What the page knows of the engine: frames merged into it, and nothing else. Everything in it is bounded. */

export const STEPS_KEPT = 512;
const RATE_MS = 3000;
const OWNERS_KEPT = 4096;
const PADDING = "padding";

export class LiveState {
  constructor() {
    this.clear();
  }

  /** Know nothing, as before the first frame. */
  clear() {
    this.about = { version: "", model: "", kinds: [], page_size: 0, shows_text: false };
    this.nowMs = 0;
    this.health = "loading";
    this.totals = {};
    this.pools = new Map(); // by book: total, kinds and owners by page, counts by kind, what changed
    this.owners = new Map();
    this.sessions = new Map();
    this.rows = [];
    this.queue = [];
    this.steps = [];
    this.tree = null;
    this.spec = null;
    this.samples = []; // of the sums, for rates
    this.changed = new Set();
  }

  /** Take a frame over; `changed` then names the parts that differ, until they are drawn. */
  merge(frame) {
    if (frame.whole) {
      const { version, model, kinds, page_size, shows_text } = frame;
      this.clear();
      this.about = { version, model, kinds: kinds ?? [], page_size, shows_text };
      for (const part of ["pools", "sessions", "rows", "steps", "tree", "spec"]) this.changed.add(part);
    }
    this.nowMs = frame.now_ms ?? this.nowMs;
    this.health = frame.health ?? this.health;
    this.totals = frame.totals ?? this.totals;
    for (const [key, label] of Object.entries(frame.owners ?? {})) this.owners.set(key, label);
    for (const pool of frame.pools ?? []) this.#mergePool(pool);
    this.#mergeSessions(frame);
    this.#mergeRequests(frame);
    this.#sample();
    this.#forgetOwners();
  }

  /** How many cells of a book are of each kind. */
  counts(book) {
    const pool = this.pools.get(book);
    return Object.fromEntries(this.about.kinds.map((kind, index) => [kind, pool.counts[index]]));
  }

  /** What a page's owner is called. */
  ownerOf(book, page) {
    const key = this.pools.get(book)?.owners[page] ?? "";
    return this.owners.get(key) ?? key;
  }

  /** Differences a second over the last few seconds, and the accept length of the rounds in it. */
  rates() {
    const first = this.samples[0];
    const last = this.samples.at(-1);
    const seconds = first && last.ms > first.ms ? (last.ms - first.ms) / 1000 : Infinity;
    const rate = (name) => (first ? (last[name] - first[name]) / seconds : 0);
    const rounds = first ? last.rounds - first.rounds : 0;
    const accept = rounds > 0 ? 1 + (last.accepted - first.accepted) / rounds : null;
    return { output: rate("output"), prompt: rate("prompt"), steps: rate("steps"), accept };
  }

  /** Nothing has come for a while, so nothing has moved. */
  rest() {
    if (this.samples.length > 1) this.samples = [this.samples.at(-1)];
  }

  #mergePool({ book, total, runs, ...sums }) {
    let pool = this.pools.get(book);
    if (pool === undefined) {
      const padding = Math.max(this.about.kinds.indexOf(PADDING), 0);
      const counts = new Array(Math.max(this.about.kinds.length, 1)).fill(0);
      counts[padding] = total + 1;
      const pages = new Uint8Array(total + 1).fill(padding);
      pool = { total, pages, owners: new Array(total + 1).fill(""), counts, dirty: [] };
      this.pools.set(book, pool);
    }
    pool.sums = sums;
    for (const [first, count, kind, owner] of runs ?? []) {
      const end = Math.min(first + count, pool.pages.length);
      for (let page = first; page < end; page += 1) {
        pool.counts[pool.pages[page]] -= 1;
        pool.counts[kind] += 1;
        pool.pages[page] = kind;
        pool.owners[page] = owner ?? "";
      }
      pool.dirty.push([first, end]);
      this.changed.add("pools");
    }
    if (pool.dirty.length > pool.pages.length) pool.dirty = [[0, pool.pages.length]];
  }

  #mergeSessions(frame) {
    for (const session of frame.sessions ?? []) this.sessions.set(session.id, { ...session, seenMs: this.nowMs });
    for (const id of frame.sessions_gone ?? []) this.sessions.delete(id);
    if (frame.sessions?.length || frame.sessions_gone?.length) this.changed.add("sessions");
  }

  #mergeRequests(frame) {
    for (const [part, panel] of [["rows", "rows"], ["queue", "rows"], ["tree", "tree"], ["spec", "spec"]]) {
      if (!frame[part] || JSON.stringify(frame[part]) === JSON.stringify(this[part])) continue;
      this[part] = frame[part];
      this.changed.add(panel);
    }
    if (frame.steps?.length) {
      this.steps.push(...frame.steps);
      this.steps.splice(0, this.steps.length - STEPS_KEPT);
      this.changed.add("steps");
    }
  }

  #sample() {
    const { completion_tokens: output = 0, prompt_tokens: prompt = 0, steps = 0 } = this.totals;
    const { rounds = 0, accepted = 0 } = this.spec ?? {};
    if (output < (this.samples.at(-1)?.output ?? 0)) this.samples = [];
    this.samples.push({ ms: this.nowMs, output, prompt, steps, rounds, accepted });
    while (this.samples.length > 2 && this.samples[1].ms < this.nowMs - RATE_MS) this.samples.shift();
    if (this.samples.length > 64) this.samples.shift();
  }

  #forgetOwners() {
    let pages = 0;
    for (const pool of this.pools.values()) pages += pool.pages.length;
    if (this.owners.size <= OWNERS_KEPT + 2 * pages) return;
    const used = new Set();
    for (const pool of this.pools.values()) for (const key of pool.owners) used.add(key);
    for (const key of this.owners.keys()) if (!used.has(key)) this.owners.delete(key);
  }
}
