/** The pool map: a canvas for each book with a cell for each page; a cell names its owner and shows what else it has. */

import { byId, colour, count, fit, make, plural, say, sync } from "./dom.js";

const CELLS = [18, 15, 13, 11, 9, 8, 7, 6, 5, 4, 3]; // sizes in px, the gap included
const HEIGHT = 190; // what the map takes if the pages allow

export class PageMap {
  /** `shownId()`: the session whose pages are marked. */
  constructor(state, shownId) {
    this.state = state;
    this.shownId = shownId;
    this.maps = new Map(); // by book
    this.pointedId = ""; // the session that is pointed at elsewhere
  }

  /** Show which pages a session has; "" for none. */
  point(id) {
    if (id === this.pointedId) return;
    this.pointedId = id;
    this.draw();
  }

  /** Show what has changed; everything, if the colours or the size have. */
  draw(all = false) {
    const books = [...this.state.pools.keys()];
    this.marked = this.#keysOf(this.shownId());
    this.pointed = this.#keysOf(this.pointedId);
    sync(byId("books"), books, (book) => book, (book) => this.#build(book), () => {});
    for (const book of this.maps.keys()) if (!this.state.pools.has(book)) this.maps.delete(book);
    for (const book of books) this.#drawBook(this.maps.get(book), this.state.pools.get(book), all);
    const size = this.state.about.page_size;
    say(byId("pages-note"), size ? `${plural(size, "token")} each` : "");
  }

  /** The owners that are a session's. */
  #keysOf(id) {
    const keys = new Set();
    if (id) for (const [key, label] of this.state.owners) if (label.startsWith(`session ${id},`)) keys.add(key);
    return keys;
  }

  #build(book) {
    const canvas = make("canvas", { tabindex: "0", role: "img", "data-book": book });
    const tip = make("p", { class: "tip", role: "status" });
    const legend = make("ul", { class: "legend", "data-book": book });
    const map = { book, canvas, tip, legend, chosen: -1, seen: "", cell: 0, width: 0 };
    const say_at = (event) => this.#choose(map, this.#pageAt(map, event));
    canvas.addEventListener("pointermove", say_at);
    canvas.addEventListener("pointerdown", say_at);
    canvas.addEventListener("pointerleave", () => this.#choose(map, -1));
    canvas.addEventListener("blur", () => this.#choose(map, -1));
    canvas.addEventListener("keydown", (event) => this.#step(map, event));
    this.maps.set(book, map);
    const frame = make("div", { class: "map" }, canvas);
    return make("div", { class: "book" }, legend, frame, tip);
  }

  #drawBook(map, pool, all) {
    this.#drawLegend(map, pool);
    const width = map.canvas.clientWidth;
    const cell = CELLS.find((size) => Math.ceil(pool.pages.length / Math.floor(width / size)) * size <= HEIGHT) ?? 3;
    const owner = map.chosen < 0 ? "" : pool.owners[map.chosen];
    const lit = owner ? new Set([owner]) : this.pointed;
    const seen = JSON.stringify([cell, width, [...lit], [...this.marked]]);
    const anew = all || map.pool !== pool || seen !== map.seen;
    Object.assign(map, { cell, width, lit, seen, pool, columns: Math.max(Math.floor(width / cell), 1) });
    const height = Math.ceil(pool.pages.length / map.columns) * cell;
    const { context } = fit(map.canvas, height);
    if (anew) context.clearRect(0, 0, width, height);
    const colours = [...this.state.about.kinds, "panel"].map((kind) => colour(kind));
    for (const [first, end] of anew ? [[0, pool.pages.length]] : pool.dirty) {
      for (let page = first; page < end; page += 1) this.#drawPage(context, map, pool, page, colours);
    }
    pool.dirty = [];
    this.#drawTip(map, pool);
  }

  #drawPage(context, map, pool, page, colours) {
    const x = (page % map.columns) * map.cell;
    const y = Math.floor(page / map.columns) * map.cell;
    const size = map.cell - (map.cell > 4 ? 2 : 1);
    context.clearRect(x, y, map.cell, map.cell);
    const owner = pool.owners[page];
    context.globalAlpha = map.lit.size === 0 || map.lit.has(owner) ? 1 : 0.28;
    context.fillStyle = colours[pool.pages[page]];
    context.fillRect(x, y, size, size);
    context.globalAlpha = 1;
    if (this.marked.has(owner) && size > 4) {
      const dot = Math.max(Math.floor(size / 3), 2);
      context.fillStyle = colours.at(-1);
      context.fillRect(x + (size - dot) / 2, y + (size - dot) / 2, dot, dot);
    }
    if (page !== map.chosen) return;
    context.strokeStyle = colour("ink");
    context.lineWidth = 1.5;
    context.strokeRect(x + 0.75, y + 0.75, size - 1.5, size - 1.5);
  }

  #drawLegend(map, pool) {
    const counts = this.state.counts(map.book);
    const kinds = Object.keys(counts).filter((kind) => counts[kind] > 0 || ["free", "leased", "cached"].includes(kind));
    const build = (kind) => make("li", { "data-kind": kind });
    sync(map.legend, kinds, (kind) => kind, build, (item, kind) => say(item, `${kind} ${count(counts[kind])}`));
    map.legend.classList.toggle("marked", this.marked.size > 0);
    if (this.state.pools.size > 1) map.legend.dataset.title = map.book;
    const said = `${count(pool.total)} pages: ${kinds.map((kind) => `${count(counts[kind])} ${kind}`).join(", ")}`;
    if (map.canvas.getAttribute("aria-label") !== said) map.canvas.setAttribute("aria-label", said);
  }

  #drawTip(map, pool) {
    if (map.chosen < 0 || map.chosen >= pool.pages.length) return say(map.tip, "");
    const kind = this.state.about.kinds[pool.pages[map.chosen]];
    const owner = this.state.ownerOf(map.book, map.chosen);
    return say(map.tip, `page ${map.chosen} · ${kind}${owner && owner !== kind ? ` · ${owner}` : ""}`);
  }

  #pageAt(map, event) {
    const column = Math.floor(event.offsetX / map.cell);
    const page = Math.floor(event.offsetY / map.cell) * map.columns + column;
    const isPage = column >= 0 && column < map.columns && page >= 0 && page < (map.pool?.pages.length ?? 0);
    return isPage ? page : -1;
  }

  #step(map, event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -map.columns, ArrowDown: map.columns };
    const move = moves[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const last = map.pool.pages.length - 1;
    this.#choose(map, map.chosen < 0 ? 0 : Math.min(Math.max(map.chosen + move, 0), last));
  }

  #choose(map, page) {
    const pool = this.state.pools.get(map.book);
    if (page === map.chosen || pool === undefined) return;
    map.chosen = page;
    this.#drawBook(map, pool, true);
  }
}
