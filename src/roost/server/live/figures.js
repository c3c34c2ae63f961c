/** Figures: rates with their last minute, and what was counted since the start. */

import { byId, colour, count, fit, make, milliseconds, rate, say, sync } from "./dom.js";

const SECONDS = 60;
const HEIGHT = 26;
const NAMES = ["output", "prompt", "accept", "load", "steps"];

export class Figures {
  constructor(state) {
    this.state = state;
    this.past = Object.fromEntries(NAMES.map((name) => [name, new Float32Array(SECONDS)]));
  }

  /** The numbers as they are. */
  draw() {
    const { totals } = this.state;
    const rates = this.state.rates();
    say(byId("rate-output"), rate(rates.output));
    say(byId("rate-prompt"), rate(rates.prompt));
    say(byId("rate-steps"), rate(rates.steps));
    say(byId("accept"), rates.accept === null ? "–" : rates.accept.toFixed(2));
    say(byId("load"), `${count(totals.running)}, ${count(totals.queued)}`);
    this.#drawCounters();
  }

  /** Another second has passed. */
  tick() {
    const rates = this.state.rates();
    const now = { ...rates, accept: rates.accept ?? 0, load: this.state.totals.running ?? 0 };
    for (const name of NAMES) {
      this.past[name].copyWithin(0, 1);
      this.past[name][SECONDS - 1] = now[name];
    }
    this.drawPast();
  }

  /** The small curves. */
  drawPast() {
    const [line, area] = [colour("leased"), colour("wash")];
    for (const name of NAMES) {
      const { context, width } = fit(byId(`spark-${name}`), HEIGHT);
      const values = this.past[name];
      const most = Math.max(...values, 1);
      const at = (index) => [(index / (SECONDS - 1)) * width, HEIGHT - 1.5 - (values[index] / most) * (HEIGHT - 4)];
      context.clearRect(0, 0, width, HEIGHT);
      context.beginPath();
      for (let index = 0; index < SECONDS; index += 1) context.lineTo(...at(index));
      context.strokeStyle = line;
      context.lineWidth = 1.25;
      context.stroke();
      context.lineTo(width, HEIGHT);
      context.lineTo(0, HEIGHT);
      context.fillStyle = area;
      context.fill();
    }
  }

  #drawCounters() {
    const { totals, health } = this.state;
    const prompt = totals.prompt_tokens ?? 0;
    const cached = prompt ? ` (${Math.round((100 * (totals.cached_tokens ?? 0)) / prompt)}% cached)` : "";
    const entries = [
      ["health", health, health !== "ok"],
      ["steps", count(totals.steps)],
      ["failed steps", count(totals.failed_steps), totals.failed_steps > 0],
      ["step in work for", totals.step_age_ms ? milliseconds(totals.step_age_ms) : "–"],
      ["prompt tokens", count(prompt) + cached],
      ["output tokens", count(totals.completion_tokens)],
      ["retractions", count(totals.retractions)],
      ["sessions reclaimed", count(totals.sessions_reclaimed)],
      ["ended", pairs(totals.endings)],
      ["refused", pairs(totals.refusals)],
      ["queue waits for", totals.waiting_for || "–"],
    ];
    const build = ([name]) => make("div", { "data-name": name }, make("dt", { text: name }), make("dd"));
    sync(byId("counters"), entries, ([name]) => name, build, (item, [, value, isWrong = false]) => {
      say(item.lastElementChild, value);
      item.classList.toggle("wrong", isWrong);
    });
  }
}

function pairs(counts = {}) {
  const said = Object.entries(counts).map(([name, value]) => `${name} ${count(value)}`);
  return said.join(", ") || "none";
}
