/** The live view: reads frames while the page is seen, and has each panel show its part of them. */

import { hasKey, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, say } from "./dom.js";
import { Feed } from "./feed.js";
import { Figures } from "./figures.js";
import { drawIdleTimes, drawRequests, drawSessions } from "./lists.js";
import { PageMap } from "./page_map.js";
import { drawSpeculation, drawTree } from "./speculation.js";
import { LiveState } from "./state.js";
import { Timeline } from "./timeline.js";

const RESTING_MS = 1500; // without a frame nothing moves
const WORDS = {
  connecting: "connecting",
  ok: "live",
  stalled: "engine stalled",
  loading: "engine loading",
  gone: "engine gone · reconnecting",
  lost: "server gone · reconnecting",
  denied: "API key needed",
  refused: "refused",
};

let drawing = 0;
const state = new LiveState();
const timeline = new Timeline(state);
const figures = new Figures(state);
const chat = new Chat({
  onDenied: askForKey,
  onShown: () => (drawing ||= requestAnimationFrame(drawAll)),
  acceptOf: (id) => state.rows.find((row) => row.session === id)?.accept,
});
const pageMap = new PageMap(state, () => chat.shown.id);
const feed = new Feed({ onFrame, onEnded: () => show("gone"), onLost: () => show("lost"), onRefused });

let frames = 0;
let frameMs = 0;
let isAnew = true; // everything is to be drawn, not only what has changed

function show(status, words = WORDS[status]) {
  document.body.dataset.status = status;
  say(byId("status"), words);
  if (!["gone", "lost"].includes(status)) return;
  state.health = status === "gone" ? "gone" : "not known";
  state.rest();
  figures.draw();
}

function onFrame(frame) {
  if (frame === null) return;
  state.merge(frame);
  frames += 1;
  frameMs = performance.now();
  drawing ||= requestAnimationFrame(drawAll);
  show(state.health in WORDS ? state.health : "ok");
}

function onRefused(status, message) {
  if (status === 401 || status === 403) askForKey(hasKey() ? message : "");
  else show("refused", message);
}

function askForKey(message = "") {
  feed.stop();
  show("denied");
  byId("key-form").hidden = false;
  say(byId("key-error"), message);
  byId("key").focus();
}

function drawAll() {
  drawing = 0;
  const { changed, about } = state;
  const has = (part) => isAnew || changed.has(part);
  say(byId("model"), about.model ?? "");
  say(byId("about"), about.version ? `Roost ${about.version}` : "");
  pageMap.draw(isAnew);
  if (has("sessions")) drawSessions(state, (id) => chat.isOwn(id));
  if (has("rows")) drawRequests(state);
  if (has("steps")) timeline.draw();
  if (has("tree")) drawTree(state);
  if (has("spec")) drawSpeculation(state);
  figures.draw();
  drawIdleTimes(state, engineMs());
  if (isAnew) figures.drawPast();
  changed.clear();
  isAnew = false;
}

function drawAnew() {
  isAnew = true;
  drawing ||= requestAnimationFrame(drawAll);
}

/** The engine's clock now, as far as it can be known here. */
const engineMs = () => state.nowMs + (performance.now() - frameMs);

function tick() {
  if (document.hidden || !["ok", "stalled"].includes(document.body.dataset.status)) return;
  if (performance.now() - frameMs > RESTING_MS) {
    state.rest();
    figures.draw();
  }
  figures.tick();
  drawIdleTimes(state, engineMs());
}

byId("sessions").addEventListener("pointerover", (event) => pageMap.point(event.target.closest("li")?.dataset.session ?? ""));
byId("sessions").addEventListener("pointerleave", () => pageMap.point(""));
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  byId("key").value = "";
  byId("key-form").hidden = true;
  show("connecting");
  feed.start();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) feed.stop();
  else if (byId("key-form").hidden) feed.start();
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAnew);
let widthSeen = 0;
new ResizeObserver(([{ contentRect }]) => {
  if (contentRect.width !== widthSeen) drawAnew();
  widthSeen = contentRect.width;
}).observe(byId("panels"));
setInterval(tick, 1000);
if (!document.hidden) feed.start();

/** What the page has understood, for tests. */
window.roostLive = Object.freeze({
  state: () => ({
    status: document.body.dataset.status,
    frames,
    pools: Object.fromEntries([...state.pools].map(([book, pool]) => [book, { ...pool.sums, total: pool.total, cells: state.counts(book) }])),
    sessions: [...state.sessions.values()],
    owners: state.owners.size,
    rows: state.rows,
    queue: state.queue,
    steps: state.steps.length,
    tree: state.tree,
    spec: state.spec,
    totals: state.totals,
  }),
});
