/** The stream of frames: opened, watched for silence, and opened again whenever it breaks. */

import { ApiError, ask, events } from "./api.js";

const SILENCE_MS = 1800; // frames or pings come at least once a second
const CONNECT_MS = 10_000;
const ENDED = "ended";
const RETRY_MS = [200, 400, 800, 1000];

export class Feed {
  /** What the page does about a frame (null: a sign of life), an engine that ended, silence, and an HTTP error. */
  constructor({ onFrame, onEnded, onLost, onRefused }) {
    Object.assign(this, { onFrame, onEnded, onLost, onRefused });
    this.controller = null;
  }

  /** Begin, unless it has begun. */
  start() {
    if (this.controller !== null) return;
    this.controller = new AbortController();
    this.#run(this.controller.signal);
  }

  /** End; nothing is told any more. */
  stop() {
    this.controller?.abort();
    this.controller = null;
  }

  async #run(stopped) {
    for (let failures = 0; !stopped.aborted; failures += 1) {
      const refusal = await this.#read(stopped, () => (failures = 0));
      if (stopped.aborted) return;
      if ([401, 403].includes(refusal?.status)) {
        this.stop();
        this.onRefused(refusal.status, refusal.message);
        return;
      }
      if (refusal === ENDED) this.onEnded();
      else if (refusal instanceof ApiError) this.onRefused(refusal.status, refusal.message);
      else this.onLost();
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
    }
  }

  /** Read one stream until it ends; gives what ended it. */
  async #read(stopped, onAlive) {
    const connection = new AbortController();
    const end = () => connection.abort();
    stopped.addEventListener("abort", end);
    const giveUp = setTimeout(end, CONNECT_MS);
    let silence = setTimeout(() => this.onLost(), SILENCE_MS);
    try {
      const response = await ask("GET", "live/frames", { signal: connection.signal });
      clearTimeout(giveUp);
      for await (const data of events(response)) {
        if (stopped.aborted) return null;
        clearTimeout(silence);
        silence = setTimeout(() => (this.onLost(), end()), SILENCE_MS);
        const frame = data === null ? null : ended(data) ? undefined : JSON.parse(data);
        if (frame === undefined) return ENDED;
        onAlive();
        this.onFrame(frame);
      }
      return null;
    } catch (error) {
      return error;
    } finally {
      clearTimeout(giveUp);
      clearTimeout(silence);
      stopped.removeEventListener("abort", end);
    }
  }
}

/** Whether the server says that nothing more comes, or never did. */
const ended = (data) => data === "[DONE]" || data === "null";
