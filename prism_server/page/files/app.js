// The page: one table with pictures on it, one question at a time, and the ledger of what they cost.

import { Refused, generate, key, modelName } from "./api.js";
import { byId } from "./dom.js";
import { showGallery, suggest } from "./gallery.js";
import { askForKey } from "./keys.js";
import { Ledger } from "./ledger.js";
import { bytesOf, megabytes, messagesOf } from "./media.js";
import { Tray } from "./tray.js";

const UNAUTHORIZED = 401;
const TOO_LARGE = 413;
const AWAY = [0, 503];
const LOOK_AGAIN_MS = 2000;
const PART = /^messages\[0\]\.content\[(\d+)\]/;

const ledger = new Ledger();
const tray = new Tray((isExample) => {
  if (!isExample) suggest([]);
});
let running = null; // the AbortController of the question under way
let nextLook = 0;

async function ask(question) {
  const text = question.trim();
  if (!text || running) return byId("question").focus();
  const media = [...tray.media];
  const entry = ledger.open(text, media, () => running?.abort());
  makeWay();
  bringIntoView(entry.node);
  setRunning(new AbortController());
  say("Asked.");
  try {
    await stream(entry, await messagesOf(media, text), running.signal);
    ledger.settle(entry);
    tray.know(media);
    say(entry.spoken);
  } catch (error) {
    if (error.name === "AbortError") entry.stop();
    else entry.fail(wordsOf(error, media));
    if (AWAY.includes(error.status)) lookForModel();
  } finally {
    setRunning(null);
  }
}

/** So that the next question can be typed at once; on a phone the keyboard goes, to uncover the answer. */
function makeWay() {
  const question = byId("question");
  if (document.activeElement !== question) return;
  if (matchMedia("(hover: hover)").matches) question.select();
  else question.blur();
}

/** To the top of a phone, where answers stand below the question; beside it they are nearly always in view. */
function bringIntoView(node) {
  const isBeside = matchMedia("(min-width: 60rem)").matches;
  const isQuick = matchMedia("(prefers-reduced-motion: reduce)").matches;
  node.scrollIntoView({ block: isBeside ? "nearest" : "start", behavior: isQuick ? "auto" : "smooth" });
}

/** Puts the stream's events into the entry. Asks for a key as often as the server wants another one. */
async function stream(entry, messages, signal) {
  for (;;) {
    try {
      for await (const event of generate(messages, signal)) entry.take(event);
      return;
    } catch (error) {
      if (error.status !== UNAUTHORIZED) throw error;
      lock();
      if (!(await askForKey(key.get() ? "The key is not valid." : ""))) throw error;
      entry.restart();
      lookForModel();
    }
  }
}

/** What went wrong, with the file that it is about. */
function wordsOf(error, media) {
  const index = PART.exec(error.param ?? "")?.[1];
  const all = error.status === TOO_LARGE ? `All files together have ${megabytes(bytesOf(media))}: ` : "";
  const about = index !== undefined && media[index] ? `${media[index].name}: ` : all;
  if (!(error instanceof Refused)) console.error(error);
  const again = error.retryAfterS ? ` Try again in ${error.retryAfterS} s.` : "";
  return about + error.message + (error.message.endsWith(".") ? "" : ".") + again;
}

function setRunning(controller) {
  running = controller;
  byId("ask").textContent = running ? "Stop" : "Ask";
  byId("asking").classList.toggle("is-running", running !== null);
}

const say = (text) => {
  byId("status").textContent = text;
};

/** Shows which model answers here; looks again while none does. */
async function lookForModel() {
  clearTimeout(nextLook);
  try {
    showModel("ready", await modelName());
  } catch (error) {
    if (error.status === UNAUTHORIZED) return lock();
    showModel("away", error.status ? error.message : "No answer from the server");
    nextLook = setTimeout(lookForModel, LOOK_AGAIN_MS);
  }
}

const lock = () => showModel("locked", "This server wants a key");

function showModel(state, text) {
  byId("model").dataset.state = state;
  byId("model-text").textContent = text;
  byId("key").hidden = state !== "locked" && !key.get();
  byId("key").textContent = state === "locked" ? "Enter the key" : "Forget the key";
}

byId("key").addEventListener("click", async () => {
  if (byId("model").dataset.state === "locked") await askForKey();
  else key.forget();
  lookForModel();
});

byId("asking").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else ask(byId("question").value);
});

byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) byId("asking").requestSubmit();
});

addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !byId("key-dialog").open) running.abort();
});

showGallery(async (files, questions) => {
  await tray.add(files, { instead: true });
  suggest(questions, (question) => {
    byId("question").value = question;
    ask(question);
  });
});
lookForModel();
