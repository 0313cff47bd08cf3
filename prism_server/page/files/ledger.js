// The questions of this tab, newest first, each with its answer and what it cost. All bars share one time scale.

import { framesOf, reusedRow, rowsOf, sooner, verdictOf } from "./cost.js";
import { byId, duration, element } from "./dom.js";
import { nounOf } from "./media.js";
import { preview } from "./tray.js";

const MOST_THUMBNAILS = 10;
const LONG_CHARACTERS = 240; // of an answer that is set as a text, not as a headline
const STAGES = [
  ["queue", "Waiting"],
  ["decode", "Decode"],
  ["encode", "Encode"],
  ["prefill", "Prefill"],
  ["first", "First token"],
  ["reused", "Reused"],
];

export class Ledger {
  #entries = [];

  /** A new entry on top. `stop()` ends its answer early. */
  open(question, media, stop) {
    const entry = new Entry(this.#entries.length + 1, question, media, stop);
    this.#entries.push(entry);
    byId("empty").hidden = true;
    byId("entries").prepend(entry.node);
    return entry;
  }

  /** After an entry is done: what it says beside the others, and the scale of all bars. */
  settle(entry) {
    const same = this.#entries.filter((other) => other.isDone && other !== entry && other.shows(entry.media));
    entry.compare(same[0]);
    const scaleMs = Math.max(...this.#entries.map((other) => other.firstTokenMs));
    for (const other of this.#entries) other.scale(scaleMs);
    byId("scale").textContent = `Bars: 0 to ${duration(scaleMs)}`;
    byId("scale").hidden = this.#entries.length < 2;
  }
}

class Entry {
  /** Of the server's own clock; 0 until the answer is done. */
  firstTokenMs = 0;
  isDone = false;

  constructor(number, question, media, stop) {
    this.number = number;
    this.media = media;
    this.noun = nounOf(media);
    this.text = "";
    this.answer = element("p", "answer", { ariaLive: "polite", ariaBusy: "true" }, this.#shown);
    this.verdict = element("p", "verdict", { hidden: true });
    this.figure = element("p", "figure", {}, element("span", "big", {}, "…"), element("span", "caption", {}, "to the first token"));
    this.stopper = element("button", "plain stop", { type: "button" }, "Stop");
    this.stopper.addEventListener("click", stop);
    this.rows = new Map(STAGES.map(([name, label]) => [name, row(name, label)]));
    this.bars = element("ul", "bars", {}, ...this.rows.values());
    this.bars.setAttribute("aria-label", `Where the time of question ${number} went`);
    const heading = element("h3", "", { id: `question-${number}`, title: question }, element("span", "number", {}, `${number}`), question);
    const asked = element("div", "asked", {}, thumbnails(media), heading);
    const head = element("div", "head", {}, asked, this.answer, this.figure);
    this.node = element("li", "entry is-open", {}, head, this.stopper, this.verdict, this.bars);
    this.node.setAttribute("aria-labelledby", heading.id);
    this.restart();
  }

  #shown = document.createTextNode("");
  #startedMs = 0;
  #clock = 0;

  /** The request is sent (again): from now on the clock runs. */
  restart() {
    this.#stopClock();
    this.#startedMs = performance.now();
    this.#tick();
  }

  /** An event of the stream. */
  take({ name, data }) {
    if (name === "accepted") this.#write(reusedRow(data.usage));
    if (name === "token") this.#token(data.text);
    if (name === "done") this.#done(data);
  }

  /** Whether the entry is about exactly these media, in this order. */
  shows(media) {
    return media.length === this.media.length && media.every((medium, index) => medium.isSameAs(this.media[index]));
  }

  /** There will be no (more of an) answer. */
  fail(message) {
    this.#cut("has-failed", message);
    this.verdict.setAttribute("role", "alert");
  }

  /** The user has stopped it. */
  stop() {
    this.#cut("is-stopped", this.text ? "Stopped here." : "Stopped before an answer came.");
  }

  #cut(className, message) {
    this.#end(className);
    this.figure.remove();
    this.bars.remove();
    this.verdict.hidden = false;
    this.verdict.textContent = message;
  }

  compare(before) {
    const { isSpared, sentence } = verdictOf(this.cost, this.media, this.noun, before !== undefined);
    this.verdict.textContent = sentence + (isSpared ? "" : framesOf(this.cost));
    this.verdict.hidden = false;
    this.node.classList.toggle("is-spared", isSpared);
    const ratio = before && sooner(this.firstTokenMs, before.firstTokenMs);
    if (!ratio) return;
    this.figure.append(element("span", "sooner", { title: `than question ${before.number}` }, `${ratio} sooner`));
    const first = this.rows.get("first");
    first.style.setProperty("--before", `${before.firstTokenMs}`);
    first.classList.add("has-before");
    first.querySelector(".detail").textContent = `${duration(before.firstTokenMs)} before`;
  }

  scale(scaleMs) {
    this.bars.style.setProperty("--scale", `${scaleMs}`);
  }

  /** What a screen reader says when the answer is complete. */
  get spoken() {
    return `Answer ${this.number}: ${this.text} First token after ${duration(this.firstTokenMs)}. ${this.verdict.textContent}`;
  }

  #token(text) {
    this.#stopClock();
    this.text += text;
    if (this.text.length > LONG_CHARACTERS) this.node.classList.add("is-long");
    this.#grow(() => this.#shown.appendData(text));
  }

  /** Follows the end of a long answer; whoever reads further up stays there. */
  #grow(change) {
    const { scrollTop, clientHeight, scrollHeight } = this.answer;
    change();
    if (scrollTop + clientHeight > scrollHeight - 8) this.answer.scrollTop = this.answer.scrollHeight;
  }

  #done({ usage, prism, samples }) {
    this.#end("is-done");
    this.isDone = true;
    this.cost = prism;
    this.firstTokenMs = prism.timings.first_token_ms;
    for (const values of rowsOf(usage, prism, this.noun)) this.#write(values);
    this.figure.firstChild.textContent = duration(this.firstTokenMs);
    const isCut = samples[0].finish_reason === "length";
    const remark = isCut ? " (cut off: the context is full)" : this.text ? "" : "(an empty answer)";
    this.#grow(() => remark && this.answer.append(element("span", "cut", {}, remark)));
  }

  #end(className) {
    this.#stopClock();
    if (document.activeElement === this.stopper) byId("ask").focus({ preventScroll: true });
    this.stopper.remove();
    this.node.classList.replace("is-open", className);
    this.answer.ariaBusy = "false";
    if (this.answer.scrollHeight > this.answer.clientHeight) this.answer.tabIndex = 0; // to scroll it by keyboard
  }

  #write({ name, from = 0, ms = 0, share, value, detail, isNothing }) {
    const shown = this.rows.get(name);
    shown.classList.toggle("is-nothing", isNothing);
    if (share === undefined) {
      shown.style.setProperty("--from", `${from}`);
      shown.style.setProperty("--ms", `${ms}`);
    } else {
      shown.style.setProperty("--share", `${share}`);
    }
    shown.querySelector(".value").textContent = value;
    shown.querySelector(".detail").textContent = detail;
  }

  /** Until the first token the figure counts what this tab sees; then the server says what it was. */
  #tick() {
    this.figure.firstChild.textContent = duration(performance.now() - this.#startedMs);
    this.#clock = setTimeout(() => this.#tick(), 100);
  }

  #stopClock() {
    clearTimeout(this.#clock);
  }
}

function row(name, label) {
  const bar = element("span", "track", {}, element("span", "bar"));
  bar.setAttribute("aria-hidden", "true");
  const made = element("li", "row", {}, element("span", "name", {}, label), bar, element("span", "value"), element("span", "detail"));
  made.dataset.stage = name;
  return made;
}

function thumbnails(media) {
  const shown = media.slice(0, MOST_THUMBNAILS).map((medium) => preview(medium));
  for (const thumbnail of shown) thumbnail.alt = "";
  const more = media.length > shown.length ? [element("span", "more", {}, `+ ${media.length - shown.length}`)] : [];
  const strip = element("div", "strip", { hidden: !media.length }, ...shown, ...more);
  strip.setAttribute("aria-hidden", "true");
  return strip;
}
