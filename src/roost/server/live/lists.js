/** Who is there: sessions as a tree of forks, running rows, and the queue with what each waits for. */

import { age, byId, count, draw, make, plural, say, sync } from "./dom.js";

const DEPTH_MAX = 6; // of the indent

/** Sessions: their length, what of it is resident, where turns ended. */
export function drawSessions(state, isOwn) {
  const ordered = family(state.sessions, isOwn);
  const longest = Math.max(64, ...ordered.map(({ session }) => session.length));
  sync(byId("sessions"), ordered, ({ session }) => session.id, buildSession, (item, entry) => {
    updateSession(item, entry, longest);
    item.classList.toggle("own", isOwn(entry.session.id));
  });
  say(byId("sessions-count"), ordered.length ? count(ordered.length) : "none");
}

/** How long idle sessions have been idle; called once a second. */
export function drawIdleTimes(state, nowMs) {
  for (const item of byId("sessions").children) {
    const session = state.sessions.get(item.dataset.key);
    if (session === undefined) continue;
    const idle = session.state === "idle" ? ` ${age(session.idle_ms + Math.max(nowMs - session.seenMs, 0))}` : "";
    say(item.querySelector(".state"), session.state + idle);
  }
}

/** Sessions in the order of their tree, each with its depth; one whose parent is gone is a root. One's own come first. */
function family(sessions, isOwn) {
  const children = new Map();
  const roots = [];
  for (const session of sessions.values()) {
    const parent = session.parent;
    if (parent === null || parent === session.id || !sessions.has(parent)) roots.push(session);
    else if (children.has(parent)) children.get(parent).push(session);
    else children.set(parent, [session]);
  }
  roots.sort((a, b) => isOwn(b.id) - isOwn(a.id));
  const ordered = [];
  const rest = roots.reverse().map((session) => ({ session, depth: 0 }));
  while (rest.length) {
    const entry = rest.pop();
    ordered.push(entry);
    const forks = children.get(entry.session.id) ?? [];
    for (const session of forks.reverse()) rest.push({ session, depth: entry.depth + 1 });
  }
  return ordered;
}

function buildSession({ session }) {
  const bar = draw("svg", { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" });
  bar.append(draw("rect", { class: "length", height: 8 }));
  bar.append(draw("rect", { class: "resident", height: 8 }), draw("path", { class: "ticks" }));
  const name = make("span", { class: "name", text: session.id, title: session.id });
  return make("li", { "data-session": session.id }, name, make("span", { class: "state" }), bar, make("span", { class: "more" }));
}

function updateSession(item, { session, depth }, longest) {
  item.dataset.state = session.state;
  item.dataset.depth = depth;
  item.style.setProperty("--depth", Math.min(depth, DEPTH_MAX));
  const scale = 100 / longest;
  item.querySelector(".length").setAttribute("width", session.length * scale);
  item.querySelector(".resident").setAttribute("width", session.resident * scale);
  const ticks = session.turns.map((end) => `M${(end * scale).toFixed(2)} 0V8`); // of the last turns
  item.querySelector(".ticks").setAttribute("d", ticks.join(""));
  const fork = session.parent === null ? "" : `fork of ${session.parent} · `;
  const size = `${plural(session.length, "token")}, ${count(session.resident)} resident`;
  say(item.querySelector(".more"), `${fork}${plural(session.num_turns, "turn")} · ${size}`);
}

/** Running rows and the queue. */
export function drawRequests(state) {
  const { rows, queue } = state;
  sync(byId("rows"), rows, (row) => row.id, buildRow, updateRow);
  say(byId("rows-count"), rows.length ? count(rows.length) : "nothing runs");
  sync(byId("queue"), queue, (request) => request.id, buildWaiting, (item, request) => {
    say(item.querySelector(".more"), request.waits || "waits for its turn");
  });
  const queued = Math.max(state.totals.queued ?? 0, queue.length);
  say(byId("queue-count"), queued ? count(queued) : "nobody waits");
}

function named(request) {
  const name = make("span", { class: "name", text: request.session ?? request.id, title: request.id });
  return make("li", { "data-request": request.id }, name);
}

function buildWaiting(request) {
  const item = named(request);
  item.append(make("span", { class: "more" }));
  return item;
}

function buildRow(row) {
  const item = named(row);
  const bar = draw("svg", { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" });
  bar.append(draw("rect", { class: "length", height: 8, width: 100 }), draw("rect", { class: "resident", height: 8 }));
  item.append(make("span", { class: "state" }), bar, make("span", { class: "more" }));
  return item;
}

function updateRow(item, row) {
  item.dataset.phase = row.phase;
  say(item.querySelector(".state"), row.phase);
  const done = row.phase === "prefill" ? row.done / Math.max(row.prompt, 1) : row.output / Math.max(row.max, 1);
  item.querySelector(".resident").setAttribute("width", 100 * Math.min(done, 1));
  const parts = [`prompt ${count(row.prompt)}`];
  if (row.cached) parts.push(`${count(row.cached)} cached`);
  if (row.phase === "prefill") parts.push(`${count(row.done)} done`);
  else parts.push(`output ${count(row.output)} of ${count(row.max)}`);
  if (row.accept) parts.push(`accept ${row.accept.toFixed(2)}`);
  say(item.querySelector(".more"), parts.join(" · "));
}
