/** The chat: conversations in tabs, the message that is written, and what can be done with turns. */

import { hasKey } from "./api.js";
import { Conversation, newId } from "./conversation.js";
import { byId, make, say } from "./dom.js";

export class Chat {
  /** `onDenied(message)`: the server wants a key; `onShown()`: another session is shown; `acceptOf(id)`: of a running turn. */
  constructor({ onDenied, onShown, acceptOf }) {
    this.onDenied = onDenied;
    this.onShown = onShown;
    this.conversations = [];
    this.names = 0;
    this.hooks = {
      acceptOf,
      changed: () => this.draw(),
      denied: (message) => this.onDenied(hasKey() ? message : ""),
      said: (text) => this.#send(text),
      fork: (conversation, numTurns) => this.#try(() => this.#fork(conversation, numTurns)),
      rewind: (conversation, turn) => this.#try(() => this.#rewind(conversation, turn)),
    };
    this.open(new Conversation(this.hooks, this.#name()));
    byId("ask").addEventListener("submit", (event) => (event.preventDefault(), this.#send(byId("message").value)));
    byId("message").addEventListener("keydown", (event) => this.#key(event));
    byId("stop").addEventListener("click", () => this.shown.stop());
    byId("new-chat").addEventListener("click", () => this.open(new Conversation(this.hooks, this.#name())));
    byId("tabs").addEventListener("keydown", (event) => this.#move(event));
    window.addEventListener("pagehide", (event) => event.persisted || this.conversations.forEach((each) => each.close()));
  }

  /** Whether a session is one of these conversations. */
  isOwn(id) {
    return this.conversations.some((each) => each.id === id);
  }

  /** Show a conversation; a new one gets a tab. */
  open(conversation) {
    if (!this.conversations.includes(conversation)) {
      this.conversations.push(conversation);
      byId("logs").append(conversation.log);
      byId("tabs").append(this.#tab(conversation));
    }
    this.shown = conversation;
    this.draw();
    conversation.log.scrollTop = conversation.log.scrollHeight;
  }

  /** What a conversation allows now. */
  draw() {
    const { shown } = this;
    for (const each of this.conversations) {
      const [tab, close] = byId(`tab-${each.key}`).children;
      tab.setAttribute("aria-selected", each === shown);
      tab.tabIndex = each === shown ? 0 : -1;
      tab.classList.toggle("busy", each.running !== null);
      tab.title = each.id === null ? "no session yet" : `session ${each.id}`;
      close.hidden = this.conversations.length === 1;
      each.log.hidden = each !== shown;
      for (const button of each.log.querySelectorAll("footer button")) button.disabled = each.running !== null;
    }
    byId("stop").hidden = shown.running === null;
    byId("send").disabled = shown.running !== null;
    byId("chat").dataset.session = shown.id ?? "";
    this.onShown();
  }

  async #send(text) {
    const conversation = this.shown;
    if (conversation.running !== null || !text.trim()) return;
    const field = byId("message");
    const temperature = byId("temperature");
    if (!temperature.reportValidity()) return;
    field.value = "";
    say(byId("chat-note"), "");
    const isSaid = await conversation.send(text.trim(), Number(temperature.value || 0));
    if (isSaid) say(byId("chat-note"), "");
    else if (conversation === this.shown && !field.value) field.value = text; // to be sent again, or changed
  }

  async #rewind(conversation, turn) {
    byId("message").value = await conversation.rewind(turn);
    byId("message").focus();
  }

  async #fork(conversation, numTurns) {
    const fork = await conversation.fork(numTurns, newId("fork"));
    this.open(new Conversation(this.hooks, this.#name("fork"), fork));
    byId("message").focus();
  }

  async #try(action) {
    say(byId("chat-note"), "");
    try {
      await action();
    } catch (error) {
      if (error.status === 401) this.hooks.denied(error.message);
      say(byId("chat-note"), error.message);
    }
    this.draw();
  }

  #name(kind = "chat") {
    this.names += 1;
    return `${kind} ${this.names}`;
  }

  #tab(conversation) {
    const { key, name } = conversation;
    const tab = make("button", { type: "button", role: "tab", "aria-controls": key, text: name });
    const close = make("button", { type: "button", class: "quiet close", text: "×", "aria-label": `close ${name}` });
    tab.addEventListener("click", () => this.open(conversation));
    close.addEventListener("click", () => this.#close(conversation));
    return make("span", { class: "tab", id: `tab-${key}`, role: "presentation" }, tab, close);
  }

  #close(conversation) {
    const place = this.conversations.indexOf(conversation);
    this.conversations.splice(place, 1);
    conversation.close();
    conversation.log.remove();
    byId(`tab-${conversation.key}`).remove();
    this.open(this.shown === conversation ? this.conversations[Math.max(place - 1, 0)] : this.shown);
  }

  #key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask").requestSubmit();
  }

  #move(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move === undefined) return;
    const { length } = this.conversations;
    this.open(this.conversations[(this.conversations.indexOf(this.shown) + move + length) % length]);
    byId(`tab-${this.shown.key}`).firstElementChild.focus();
  }
}
