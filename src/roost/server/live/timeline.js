/** The timeline: a bar for each of the last steps, of the host's time and the device's; collect is the part of that for
 *  which the host had nothing to do but wait. */

import { byId, colour, count, fit, milliseconds, plural, say } from "./dom.js";
import { STEPS_KEPT } from "./state.js";

const [NUMBER, , HOST, DEVICE, COLLECT, ROWS, CHUNK, WIDTH, TOKENS, FAILED] = Array(10).keys();
const HEIGHT = 124;
const LANE = 20; // of prompt tokens, below
const LEFT = 54; // of the bars, for the scale
const SLOTS_MIN = 128; // few steps are not drawn as broad blocks
const PARTS = [[HOST, "host"], [DEVICE, "device"], [COLLECT, "collect"]];
const BARS = [
  ["host", (step) => step[HOST]],
  ["device", (step) => Math.max(step[DEVICE] - step[COLLECT], 0)],
  ["collect", (step) => step[COLLECT]],
];
const took = (step) => step[HOST] + Math.max(step[DEVICE], step[COLLECT]);

export class Timeline {
  constructor(state) {
    this.state = state;
    this.canvas = byId("steps");
    this.chosen = null; // the number of a step
    this.canvas.addEventListener("pointermove", (event) => this.#choose(this.#at(event.offsetX)));
    this.canvas.addEventListener("pointerdown", (event) => this.#choose(this.#at(event.offsetX)));
    this.canvas.addEventListener("pointerleave", () => this.#choose(null));
    this.canvas.addEventListener("blur", () => this.#choose(null));
    this.canvas.addEventListener("keydown", (event) => this.#step(event));
  }

  /** Draw all bars. */
  draw() {
    const { steps } = this.state;
    const { context, width } = fit(this.canvas, HEIGHT);
    context.clearRect(0, 0, width, HEIGHT);
    this.slots = Math.min(Math.max(steps.length, SLOTS_MIN), STEPS_KEPT);
    this.slot = (width - LEFT) / this.slots;
    const scale = niceAbove(percentile(steps.map(took), 0.98));
    const tall = HEIGHT - LANE - 16;
    const chunkMax = Math.max(1, ...steps.map((step) => step[CHUNK]));
    this.#drawGrid(context, width, tall, scale);
    const bars = BARS.map(([name, of]) => [colour(name), of]);
    const [chunk, failed, ink] = [colour("chunk"), colour("wrong"), colour("ink")];
    const gap = this.slot > 3 ? 1 : 0;
    steps.forEach((step, index) => {
      const place = this.slots - steps.length + index;
      const x = LEFT + Math.round(place * this.slot);
      const bar = Math.max(LEFT + Math.round((place + 1) * this.slot) - x - gap, 1);
      let y = tall;
      for (const [fill, of] of bars) {
        const high = Math.min((of(step) / scale) * tall, y);
        context.fillStyle = step[FAILED] ? failed : fill;
        context.fillRect(x, y - high, bar, high);
        y -= high;
      }
      const low = (step[CHUNK] / chunkMax) * (LANE - 4);
      context.fillStyle = chunk;
      context.fillRect(x, HEIGHT - low, bar, low);
      if (step[NUMBER] !== this.chosen) return;
      context.strokeStyle = ink;
      context.strokeRect(x - 0.5, 0.5, bar + 1, HEIGHT - 1);
    });
    this.#drawTip();
  }

  #drawGrid(context, width, tall, scale) {
    context.strokeStyle = colour("line");
    context.fillStyle = colour("soft");
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    context.textAlign = "right";
    context.lineWidth = 1;
    for (const part of [0, 0.5, 1]) {
      const y = Math.round(tall * (1 - part)) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, y);
      context.lineTo(width, y);
      context.stroke();
      context.fillText(`${+(scale * part).toPrecision(2)} ms`, LEFT - 8, Math.max(y + 4, 10));
    }
  }

  #drawTip() {
    const { steps } = this.state;
    const step = steps.find((each) => each[NUMBER] === this.chosen) ?? steps.at(-1);
    if (step === undefined) return say(byId("steps-tip"), "No step yet");
    const times = PARTS.map(([part, name]) => `${name} ${milliseconds(step[part])}`).join(", ");
    const parts = [`step ${step[NUMBER]}`, times, plural(step[ROWS], "row")];
    if (step[CHUNK]) parts.push(plural(step[CHUNK], "prompt token"));
    parts.push(`width ${step[WIDTH]}`, plural(step[TOKENS], "new token"));
    if (step[FAILED]) parts.push("failed");
    return say(byId("steps-tip"), parts.join(" · "));
  }

  #at(x) {
    const { steps } = this.state;
    const index = Math.floor((x - LEFT) / this.slot) - (this.slots - steps.length);
    return steps[index]?.[NUMBER] ?? null;
  }

  #step(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const { steps } = this.state;
    if (move === undefined || !steps.length) return;
    event.preventDefault();
    const index = steps.findIndex((step) => step[NUMBER] === this.chosen);
    const next = index < 0 ? steps.length - 1 : Math.min(Math.max(index + move, 0), steps.length - 1);
    this.#choose(steps[next][NUMBER]);
  }

  #choose(number) {
    if (number === this.chosen) return;
    this.chosen = number;
    this.draw();
  }
}

function percentile(values, part) {
  return values.sort((a, b) => a - b)[Math.floor((values.length - 1) * part)] ?? 1;
}

/** The next round number. */
function niceAbove(value) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(value, 0.1)));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * unit).find((step) => step >= value) ?? 10 * unit;
}
