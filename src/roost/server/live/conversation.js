/** A conversation: a session of the server's and the turns that it shows. The session is opened with its first message. */

import { ApiError, ask, events } from "./api.js";
import { count, make, milliseconds, say } from "./dom.js";

const MAX_TOKENS = 256;
const TTL_S = 3600; // so that one whose page is gone does not stay for ever
const COMMITTED = ["stop", "length"];

let made = 0;

export class Conversation {
  /** `hooks`, of the chat: changed(), acceptOf(id), denied(message), said(text), fork(conversation, numTurns), rewind(conversation, turn). */
  constructor(hooks, name, { id = null, turns = [] } = {}) {
    this.hooks = hooks;
    this.name = name;
    this.id = id;
    this.key = `conversation-${(made += 1)}`;
    this.turns = turns; // committed: {user, answer, figures}
    this.running = null;
    this.isGone = false;
    this.log = make("div", { class: "log", id: this.key, role: "tabpanel", tabindex: "0", "aria-label": name });
    this.draw();
  }

  /** Ask, and show the answer as it comes; false if nothing was committed. */
  async send(user, temperature) {
    this.#forgetLoose();
    this.log.querySelector(".welcome")?.remove();
    const controller = new AbortController();
    const shown = this.#show({ user, answer: "", figures: "" });
    this.running = controller;
    this.hooks.changed();
    const live = new LiveAnswer(shown, () => this.hooks.acceptOf(this.id));
    try {
      await this.#open();
      const last = await this.#stream(user, temperature, controller.signal, live);
      if (!COMMITTED.includes(last.finish_reason)) throw new Error(`ended: ${last.finish_reason}`);
      const turn = { user, answer: live.text, figures: live.figures(last) };
      this.turns.push(turn);
      this.#settle(shown, turn);
      return true;
    } catch (error) {
      live.end();
      this.#fail(shown, error, controller.signal.aborted);
      return false;
    } finally {
      this.running = null;
      this.hooks.changed();
    }
  }

  /** Stop the answer: the session goes back to where it was. */
  stop() {
    this.running?.abort();
  }

  /** Take turns back, all from one on; gives what the user had said there. */
  async rewind(turn) {
    const { user } = this.turns[turn];
    await this.#change("rewind", { turn });
    this.turns.length = turn;
    this.draw();
    return user;
  }

  /** Another session that begins as this one does. */
  async fork(numTurns, id) {
    await this.#change("fork", { turn: numTurns, id });
    return { id, turns: this.turns.slice(0, numTurns) };
  }

  /** Close the session; the page may be about to go. */
  close() {
    this.stop();
    if (this.id !== null && !this.isGone) ask("DELETE", `v1/sessions/${this.id}`, { keepalive: true }).catch(() => {});
  }

  /** Show the committed turns. */
  draw() {
    this.log.replaceChildren();
    if (!this.turns.length) this.log.append(this.#welcome());
    this.turns.forEach((turn) => this.#settle(this.#show(turn), turn));
  }

  async #open() {
    if (this.id !== null) return;
    const id = newId();
    await ask("POST", "v1/sessions", { body: { id, ttl_s: TTL_S } });
    this.id = id;
    this.hooks.changed();
  }

  async #stream(user, temperature, signal, live) {
    const messages = [{ role: "user", content: user }];
    const body = { messages, stream: true, max_tokens: MAX_TOKENS, temperature };
    live.begin();
    const response = await ask("POST", `v1/sessions/${this.id}/generate`, { body, signal });
    for await (const data of events(response)) {
      if (data === null || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.code, chunk.error.message);
      live.add(chunk);
      if (chunk.finish_reason) return live.end(chunk);
    }
    throw new Error("the answer broke off");
  }

  async #change(verb, body) {
    try {
      await ask("POST", `v1/sessions/${this.id}/${verb}`, { body });
    } catch (error) {
      this.isGone ||= error.status === 404;
      throw error;
    }
  }

  #show({ user, answer, figures }) {
    const shown = make(
      "article",
      { class: "turn" },
      make("p", { class: "user", text: user }),
      make("p", { class: "answer", text: answer }),
      make("footer", {}, make("span", { class: "figures-line", text: figures })),
    );
    this.log.append(shown);
    this.log.scrollTop = this.log.scrollHeight;
    return shown;
  }

  #settle(shown, turn) {
    const number = [...this.log.querySelectorAll(".turn:not(.loose)")].indexOf(shown);
    shown.dataset.turn = number;
    say(shown.querySelector(".figures-line"), turn.figures);
    const back = make("button", { type: "button", class: "quiet rewind", text: "rewind", title: "Take this turn and all after it back" });
    const fork = make("button", { type: "button", class: "quiet fork", text: "fork", title: "Go on from here in another conversation" });
    back.setAttribute("aria-label", `rewind to before turn ${number}`);
    fork.setAttribute("aria-label", `fork after turn ${number}`);
    back.addEventListener("click", () => this.hooks.rewind(this, number));
    fork.addEventListener("click", () => this.hooks.fork(this, number + 1));
    shown.querySelector("footer").append(make("span", { class: "actions" }, back, fork));
  }

  #fail(shown, error, wasStopped) {
    shown.classList.add("loose");
    if (error.status === 404) this.isGone = true;
    if (error.status === 401) this.hooks.denied(error.message);
    let why = wasStopped ? "stopped; the session is where it was before" : error.message;
    if (this.isGone) why = "the server no longer has this session; begin a new conversation";
    else if (error instanceof TypeError && !wasStopped) why = "the server cannot be reached";
    say(shown.querySelector(".figures-line"), why);
    shown.classList.toggle("failed", !wasStopped);
  }

  #forgetLoose() {
    for (const shown of this.log.querySelectorAll(".loose")) shown.remove();
  }

  #welcome() {
    const welcome = make("div", { class: "welcome" }, make("p", { text: "A conversation is a session: its pages stay in the engine from turn to turn. Say something, and watch them." }));
    for (const text of ["Why is the sky blue?", "Write a haiku about owls.", "List three facts about Ada Lovelace."]) {
      const button = make("button", { type: "button", class: "idea", text });
      button.addEventListener("click", () => this.hooks.said(text));
      welcome.append(button);
    }
    return welcome;
  }
}

/** An answer on its way: text that grows, drawn once a frame, and its figures. */
class LiveAnswer {
  /** `accept()`: the accept length of the request so far, as the engine tells it. */
  constructor(shown, accept) {
    this.shown = shown;
    this.accept = accept;
    this.node = document.createTextNode("");
    shown.querySelector(".answer").append(this.node);
    shown.classList.add("live");
    this.text = "";
    this.numTokens = 0;
    this.request = 0;
  }

  begin() {
    this.beganMs = performance.now();
  }

  add({ text, output_ids: ids }) {
    const now = performance.now();
    if (ids.length && this.numTokens === 0) [this.firstMs, this.numFirst] = [now, ids.length];
    this.lastMs = now;
    this.text += text;
    this.numTokens += ids.length;
    this.request ||= requestAnimationFrame(() => this.#draw());
  }

  end(chunk) {
    cancelAnimationFrame(this.request);
    this.#draw();
    this.shown.classList.remove("live");
    return chunk;
  }

  /** What the answer took, in words. */
  figures({ usage, spec, finish_reason }) {
    const parts = [`${count(usage.completion_tokens)} tokens`];
    if (this.#rate()) parts.push(`${this.#rate()} tok/s`);
    if (spec?.rounds) parts.push(`accept ${spec.accept_length.toFixed(2)}`);
    parts.push(`first ${milliseconds((this.firstMs ?? this.lastMs) - this.beganMs)}`);
    const { prompt_tokens: prompt, prompt_tokens_details: details } = usage;
    parts.push(`${count(details.cached_tokens)}/${count(prompt)} cached`);
    if (finish_reason === "length") parts.push("cut at its maximum");
    return parts.join(" · ");
  }

  #rate() {
    const seconds = (this.lastMs - this.firstMs) / 1000;
    const tokens = this.numTokens - this.numFirst; // the first ones were not waited for
    return seconds > 0.02 && tokens > 0 ? count(tokens / seconds) : "";
  }

  #draw() {
    this.request = 0;
    const log = this.shown.parentElement;
    const follows = log !== null && log.scrollHeight - log.scrollTop - log.clientHeight < 48;
    this.node.appendData(this.text.slice(this.node.length));
    const parts = [`${count(this.numTokens)} tokens`];
    if (this.#rate()) parts.push(`${this.#rate()} tok/s`);
    if (this.accept()) parts.push(`accept ${this.accept().toFixed(2)}`);
    say(this.shown.querySelector(".figures-line"), parts.join(" · "));
    if (follows) log.scrollTop = log.scrollHeight;
  }
}

/** A name for a session, short enough to be read on the page. */
export function newId(kind = "chat") {
  const [random] = crypto.getRandomValues(new Uint32Array(1));
  return `${kind}-${random.toString(16).padStart(8, "0")}`;
}
