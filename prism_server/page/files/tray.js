// What the next question is about: the pictures and clips on the table, put there by drop, paste, choice or example.

import { byId, element } from "./dom.js";
import { mediumOf } from "./media.js";

const stillOnly = matchMedia("(prefers-reduced-motion: reduce)");

export class Tray {
  /** `onChange(isExample)` is called when something came or went. */
  constructor(onChange) {
    this.media = [];
    this.#onChange = onChange;
    this.#takeFilesFromEverywhere();
  }

  #onChange;

  /** Puts the files behind what is there; says which of them cannot be shown to a model. */
  async add(files, { instead = false } = {}) {
    const given = [...files]; // now: the browser empties its list when the event is over
    const found = await Promise.all(given.map(mediumOf));
    const refused = given.filter((_, index) => !found[index]).map((file) => file.name);
    this.media = [...(instead ? [] : this.media), ...found.filter(Boolean)];
    const which = refused.length === 1 ? `${refused[0]} is` : `${refused.join(", ")} are`;
    this.#say(refused.length ? `${which} neither a picture nor a clip that can be shown here.` : "");
    this.#changed(instead);
  }

  /** The server has answered a question about these. */
  know(media) {
    for (const medium of media) medium.isKnown = true;
    this.#show();
  }

  #remove(medium) {
    const index = this.media.indexOf(medium);
    this.media = this.media.filter((other) => other !== medium);
    this.#changed(false);
    const next = byId("tray").querySelectorAll("button")[Math.min(index, this.media.length - 1)];
    (next ?? byId("pick")).focus(); // the focus must not fall out of the page with the button that had it
  }

  #changed(isExample) {
    this.#show();
    this.#onChange(isExample);
  }

  #show() {
    const any = this.media.length > 0;
    byId("tray").replaceChildren(...this.media.map((medium, index) => this.#tile(medium, index + 1)));
    byId("tray").hidden = byId("clear").hidden = !any;
    byId("table").classList.toggle("is-empty", !any);
    byId("drop-text").textContent = any ? "Drop or paste more, or" : "Drop or paste pictures or a clip here";
  }

  #tile(medium, place) {
    const remove = element("button", "remove", { type: "button", title: "Remove" });
    remove.setAttribute("aria-label", `Remove ${medium.name}, number ${place}`);
    remove.addEventListener("click", () => this.#remove(medium));
    const label = element("span", "place", {}, medium.kind === "video" ? `${place} · clip` : `${place}`);
    const tile = element("li", "tile", { title: medium.name }, preview(medium), label, remove);
    if (medium.isKnown) {
      const known = "the server has seen it";
      tile.classList.add("is-known");
      label.append(element("span", "unseen", {}, `, ${known}`));
      tile.title = `${medium.name}: ${known}`;
    }
    return tile;
  }

  #say(text) {
    byId("notice").textContent = text;
    byId("notice").hidden = !text;
  }

  #takeFilesFromEverywhere() {
    byId("pick").addEventListener("click", () => byId("files").click());
    byId("files").addEventListener("change", ({ target }) => {
      this.add(target.files);
      target.value = ""; // the same file may be chosen again
    });
    byId("clear").addEventListener("click", () => {
      this.media = [];
      this.#say("");
      this.#changed(false);
      byId("pick").focus();
    });
    document.addEventListener("paste", ({ clipboardData }) => {
      if (clipboardData.files.length) this.add(clipboardData.files);
    });
    this.#takeDrops();
  }

  /** The whole window takes drops: a file that misses the table must not replace the page. */
  #takeDrops() {
    const hasFiles = (event) => event.dataTransfer.types.includes("Files");
    const show = (isOver) => byId("table").classList.toggle("is-over", isOver);
    addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      event.dataTransfer.dropEffect = "copy";
      show(true);
    });
    addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) show(false);
    });
    addEventListener("drop", (event) => {
      show(false);
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
  }
}

/** A small view of the medium. Nothing moves for those who do not want it. */
export function preview(medium) {
  if (medium.isAnimation && stillOnly.matches) return still(medium);
  const shown =
    medium.kind === "image" || medium.isAnimation
      ? element("img", "", { src: medium.preview, alt: medium.name })
      : element("video", "", { src: `${medium.preview}#t=0.001`, muted: true, playsInline: true, preload: "metadata", ariaLabel: medium.name });
  shown.addEventListener("error", () => shown.replaceWith(placard(medium)), { once: true });
  return shown;
}

/** For what a browser cannot show, though the server may read it: a TIFF, a rare codec, a broken file. */
function placard(medium) {
  const ending = /\.(\w{1,5})$/.exec(medium.name)?.[1] ?? medium.kind;
  const card = element("span", "placard", { role: "img" }, ending.toUpperCase());
  card.setAttribute("aria-label", medium.name);
  return card;
}

function still(medium) {
  const canvas = element("canvas", "", { role: "img" });
  canvas.setAttribute("aria-label", medium.name);
  const image = new Image();
  image.onload = () => {
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
    canvas.getContext("2d").drawImage(image, 0, 0);
  };
  image.src = medium.preview;
  return canvas;
}
