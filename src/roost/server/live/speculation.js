/** Speculation: one row's last draft tree, how often drafts of each place are accepted, and what steps were found to cost. */

import { byId, count, draw, make, plural, say, sync } from "./dom.js";

const DX = 56; // between levels and between leaves of the tree
const DY = 26;
const MARGIN = 14;
const LABEL_CHARS = 10;
const extent = { width: 0, height: 0 }; // of the largest tree so far, so that the picture keeps its scale

/** The tree: the root on the left, what was accepted drawn in full. */
export function drawTree({ tree }) {
  const svg = byId("tree");
  if (tree === null) return say(byId("tree-note"), "no drafts yet");
  const accepted = new Set(tree.accepted);
  const places = layOut(tree.parents);
  const ownHeight = Math.max(...places.map(({ leaf }) => leaf)) * DY + 2 * MARGIN;
  const ownWidth = Math.max(...places.map(({ depth }) => depth)) * DX + 2 * MARGIN + (tree.texts ? DX : 0);
  const width = (extent.width = Math.max(extent.width, ownWidth));
  const height = (extent.height = Math.max(extent.height, ownHeight));
  const top = MARGIN + (height - ownHeight) / 2;
  const at = ({ depth, leaf }) => [MARGIN + depth * DX, top + leaf * DY];
  const [edges, nodes] = [[], []];
  places.forEach((place, node) => {
    const [x, y] = at(place);
    const kind = accepted.has(node) ? "accepted" : "rejected";
    const parent = tree.parents[node];
    if (parent >= 0) {
      const [px, py] = at(places[parent]);
      const middle = (px + x) / 2;
      edges.push(draw("path", { class: kind, d: `M${px} ${py}C${middle} ${py} ${middle} ${y} ${x} ${y}` }));
    }
    nodes.push(draw("circle", { class: node === 0 ? "root" : kind, cx: x, cy: y, r: 5 }));
    const text = tree.texts?.[node];
    if (text) nodes.push(draw("text", { class: kind, x: x + 8, y: y - 5 }, text.slice(0, LABEL_CHARS)));
  });
  edges.sort((a, b) => (a.getAttribute("class") < b.getAttribute("class") ? 1 : -1)); // what was accepted is on top
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.maxWidth = `${width * 1.4}px`;
  svg.replaceChildren(...edges, ...nodes);
  svg.dataset.nodes = places.length;
  const drafts = places.length - 1;
  return say(byId("tree-note"), `${tree.id}: ${count(accepted.size - 1)} of ${plural(drafts, "draft")} accepted`);
}

/** For each node its depth and its height in leaves; an inner node is between its children. */
function layOut(parents) {
  const children = parents.map(() => []);
  parents.forEach((parent, node) => parent >= 0 && children[parent].push(node));
  const places = parents.map(() => ({ depth: 0, leaf: 0 }));
  parents.forEach((parent, node) => parent >= 0 && (places[node].depth = places[parent].depth + 1));
  let leaves = 0;
  const order = [];
  for (const rest = [0]; rest.length; ) {
    const node = rest.pop();
    order.push(node);
    rest.push(...children[node].toReversed());
    if (!children[node].length) places[node].leaf = leaves++;
  }
  for (const node of order.reverse()) {
    const [first, last] = [children[node][0], children[node].at(-1)];
    if (first !== undefined) places[node].leaf = (places[first].leaf + places[last].leaf) / 2;
  }
  return places;
}

/** Acceptance by place, the length that is chosen, the learned costs. */
export function drawSpeculation({ spec }) {
  if (!spec?.rounds) say(byId("spec-note"), "no rounds yet");
  else {
    const accept = (1 + spec.accepted / spec.rounds).toFixed(2);
    const chosen = spec.chosen === null || spec.chosen === undefined ? "" : ` · chosen length ${spec.chosen}`;
    say(byId("spec-note"), `accept length ${accept} · ${plural(spec.rounds, "round")}${chosen}`);
  }
  const places = spec ? shares(spec.histogram ?? [], spec.lengths ?? []) : [];
  const build = () => make("li", {}, make("span", { class: "place" }), make("i", { class: "share" }), make("span", { class: "more" }));
  sync(byId("places"), places, ({ place }) => place, build, (item, { place, share }) => {
    say(item.querySelector(".place"), String(place));
    item.style.setProperty("--share", share);
    say(item.querySelector(".more"), `${Math.round(100 * share)}%`);
  });
  drawCosts(spec?.costs ?? [], spec?.chosen);
}

/** Of the rounds with a draft in a place, those that accepted it. */
function shares(histogram, lengths) {
  const from = (counts, place) => counts.slice(place).reduce((sum, each) => sum + each, 0);
  const places = Array.from({ length: Math.max(histogram.length - 1, 0) }, (_, index) => index + 1);
  const known = places.map((place) => ({ place, of: from(lengths, place) }));
  return known.filter(({ of }) => of > 0).map(({ place, of }) => ({ place, share: Math.min(from(histogram, place) / of, 1) }));
}

function drawCosts(costs, chosen) {
  const svg = byId("costs");
  const points = [...costs].sort((a, b) => a[0] - b[0]);
  const [width, height] = [320, 96];
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  if (!points.length) return svg.replaceChildren(draw("text", { x: 0, y: 14 }, "none learned yet"));
  const nodesMax = Math.max(points.at(-1)[0], 1);
  const msMax = Math.max(...points.map(([, ms]) => ms), 0.1);
  const at = ([nodes, ms]) => [34 + (nodes / nodesMax) * (width - 44), height - 18 - (ms / msMax) * (height - 30)];
  const drawn = [draw("path", { class: "axis", d: `M34 6V${height - 18}H${width}` })];
  drawn.push(draw("text", { x: 30, y: 16, "text-anchor": "end" }, String(+msMax.toPrecision(2))));
  drawn.push(draw("text", { x: 30, y: height - 18, "text-anchor": "end" }, "0 ms"));
  drawn.push(draw("text", { x: width - 10, y: height - 4, "text-anchor": "end" }, plural(nodesMax, "node")));
  drawn.push(draw("polyline", { points: points.map((point) => at(point).join(",")).join(" ") }));
  for (const point of points) {
    const [cx, cy] = at(point);
    const isChosen = chosen !== undefined && chosen !== null && point[0] === chosen + 1; // drafts and the last token
    drawn.push(draw("circle", { class: isChosen ? "chosen" : "cost", cx, cy, r: isChosen ? 4.5 : 2.5 }));
  }
  return svg.replaceChildren(...drawn);
}
