// Files of the user, and of the gallery, as the parts of a message.

import { number } from "./dom.js";

const CLIP_NAMES = /\.(mp4|m4v|mov|webm|mkv)$/i; // for systems that do not know the type of a Matroska file
const GIF = [0x47, 0x49, 0x46, 0x38];
const MOST_BYTES = 250e6; // of all files: as base64 in one body, what every browser can still hold as one text
const FRAME = [0x21, 0xf9, 0x04]; // a graphic control extension: one before each frame of an animation

/** One picture or clip on the table. */
export class Medium {
  constructor(file, kind) {
    this.name = file.name;
    this.sizeBytes = file.size;
    this.kind = kind;
    this.isAnimation = kind === "video" && file.type === "image/gif";
    this.preview = URL.createObjectURL(file);
    /** Whether the server has answered a question about it. */
    this.isKnown = false;
    this.#file = file;
  }

  #file;
  #url = null;

  /** The part of a message that shows it. The data URL is made once. */
  async part() {
    this.#url ??= await dataUrl(this.#file);
    const type = this.kind === "video" ? "video_url" : "image_url";
    return { type, [type]: { url: this.#url } };
  }

  /** Whether both are the same bytes, once both have been asked about. */
  isSameAs(other) {
    return this === other || (this.#url !== null && this.#url === other.#url);
  }
}

/** The file as a Medium, or null where it is neither picture nor clip. A GIF that moves is a clip. */
export async function mediumOf(file) {
  if (file.type.startsWith("video/") || (!file.type && CLIP_NAMES.test(file.name))) return new Medium(file, "video");
  if (!file.type.startsWith("image/") || file.type === "image/svg+xml") return null;
  const moves = file.type === "image/gif" && isAnimated(new Uint8Array(await file.arrayBuffer()));
  return new Medium(file, moves ? "video" : "image");
}

/** Pictures first and in order, then the question: so that the next question finds their prefix. */
export async function messagesOf(media, question) {
  const bytes = bytesOf(media);
  if (bytes > MOST_BYTES) throw new Error(`All files together have ${megabytes(bytes)}, more than a browser can send at once.`);
  const parts = await Promise.all(media.map((medium) => medium.part()));
  return [{ role: "user", content: [...parts, { type: "text", text: question }] }];
}

export const bytesOf = (media) => media.reduce((sum, medium) => sum + medium.sizeBytes, 0);

/** "0.1 MB", "34 MB". */
export const megabytes = (bytes) => `${bytes < 1e6 ? Math.max(0.1, bytes / 1e6).toFixed(1) : number(Math.round(bytes / 1e6))} MB`;

/** "picture", "clip", or "item" for both. */
export function nounOf(media) {
  const kinds = new Set(media.map((medium) => medium.kind));
  if (kinds.size > 1) return "item";
  return kinds.has("video") ? "clip" : "picture";
}

function isAnimated(bytes) {
  if (!GIF.every((byte, index) => bytes[index] === byte)) return false;
  let frames = 0;
  for (let at = bytes.indexOf(FRAME[0]); at >= 0 && frames < 2; at = bytes.indexOf(FRAME[0], at + 1)) {
    frames += bytes[at + 1] === FRAME[1] && bytes[at + 2] === FRAME[2];
  }
  return frames > 1;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    const typed = (url) => (file.type ? url : url.replace(/^data:[^,]*,/, "data:video/x-matroska;base64,"));
    reader.onload = () => resolve(typed(reader.result));
    reader.onerror = () => reject(new Error(`${file.name} cannot be read any more.`));
    reader.readAsDataURL(file);
  });
}
