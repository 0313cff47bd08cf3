// The little of a framework that this page needs. Text becomes text nodes, never markup.

/** An element with a class, properties, and children (elements or strings). */
export function element(tag, className = "", properties = {}, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** "1 picture", "8 pictures". */
export const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

const numbers = new Intl.NumberFormat("en");
export const number = (value) => numbers.format(value);

/** "0.4 ms", "49 ms", "1,943 ms", "12.4 s": never more digits than can be read at a glance. */
export function duration(ms) {
  if (ms >= 10_000) return `${(ms / 1000).toFixed(1)} s`;
  return `${ms < 1 ? ms.toFixed(1) : number(Math.round(ms))} ms`;
}
