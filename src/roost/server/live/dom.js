/** Elements and words: what every panel builds with. Texts are set as text, never as markup. */

const SVG = "http://www.w3.org/2000/svg";

/** An element with a class, a text and children. */
export function make(tag, { text, ...attributes } = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  element.append(...children);
  return element;
}

/** An element of an SVG. */
export function draw(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Set a text, if it differs. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Make the children of a list those of some items, in order; elements of the same key are kept. */
export function sync(list, items, keyOf, build, update) {
  const before = new Map([...list.children].map((child) => [child.dataset.key, child]));
  let place = list.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let element = before.get(key);
    if (element === undefined) {
      element = build(item);
      element.dataset.key = key;
    }
    before.delete(key);
    if (element === place) place = place.nextElementSibling;
    else list.insertBefore(element, place);
    update(element, item);
  }
  for (const gone of before.values()) gone.remove();
}

/** A canvas as large as it is shown, in device pixels; gives its context and its size in CSS pixels. */
export function fit(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { context, width, height };
}

/** The value of a colour of the style sheet, in the scheme that is shown. */
export const colour = (name) => getComputedStyle(document.body).getPropertyValue(`--${name}`).trim();

const whole = new Intl.NumberFormat("en");
export const count = (value) => whole.format(Math.round(value ?? 0));
export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
export const milliseconds = (ms) => (ms < 10 ? `${ms.toFixed(1)} ms` : `${count(ms)} ms`);

/** A rate in few digits. */
export const rate = (value) => (value > 0 && value < 9.95 ? value.toFixed(1) : count(value));

/** How long ago something was. */
export function age(ms) {
  const seconds = Math.floor(ms / 1000);
  if (seconds < 60) return `${seconds} s`;
  return seconds < 3600 ? `${Math.floor(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}
