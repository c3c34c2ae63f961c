/** The server's API as this page uses it: the key, requests, and streams of server-sent events. */

const STORED = "roost-api-key";

/** What the server answered instead of what was asked for. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => sessionStorage.getItem(STORED) !== null;
export const useKey = (key) => sessionStorage.setItem(STORED, key);

/** A response, or an ApiError. Paths are relative to the page, which may be behind a prefix. */
export async function ask(method, path, { body, signal, keepalive = false } = {}) {
  const headers = {};
  const key = sessionStorage.getItem(STORED);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const sent = body === undefined ? undefined : JSON.stringify(body);
  const response = await fetch(path, { method, headers, body: sent, signal, keepalive, cache: "no-store" });
  if (response.ok) return response;
  throw new ApiError(response.status, await reason(response));
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/** The events of a stream: the data of each as text, or null for a comment. Leaving the loop ends the stream. */
export async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) yield block.startsWith("data: ") ? block.slice(6) : null;
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have ended by itself
  }
}
