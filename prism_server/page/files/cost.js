// From what the server says a request cost (docs/http.md, "What a request cost") to bars and sentences. Pure.

import { counted, duration, number } from "./dom.js";

/**
 * The rows of a request's figure, in the order in which things happen. `from` and `ms` are on the time scale, `share`
 * is of the row's own width; `value` and `detail` are what is written beside the bar.
 */
export function rowsOf(usage, cost, noun) {
  const times = cost.timings;
  const prefillMs = Math.max(0, times.prefill_ms - times.encode_ms);
  const decodeFrom = times.queue_ms;
  const encodeFrom = decodeFrom + times.media_ms;
  const prefillFrom = encodeFrom + times.encode_ms;
  const stage = (name, label, from, ms, count, detail) => {
    const isNothing = !count && ms < 1; // a request may also wait for what another one decodes
    const shown = { ms: isNothing ? 0 : ms, value: isNothing ? "nothing" : duration(ms), detail: count ? detail : "" };
    return { name, label, from, isNothing, ...shown };
  };
  return [
    stage("queue", "Waiting", 0, times.queue_ms, 1, ""),
    stage("decode", "Decode", decodeFrom, times.media_ms, cost.decoded_items, counted(cost.decoded_items, noun)),
    stage("encode", "Encode", encodeFrom, times.encode_ms, cost.encoded_items, counted(cost.encoded_items, noun)),
    stage("prefill", "Prefill", prefillFrom, prefillMs, cost.prefilled_tokens, counted(cost.prefilled_tokens, "token")),
    stage("first", "First token", 0, times.first_token_ms, 1, ""),
    reusedRow(usage),
  ];
}

/** The part of the prompt whose KV was found. Known before the first token. */
export function reusedRow(usage) {
  const { cached_tokens: cached, prompt_tokens: prompt } = usage;
  return {
    name: "reused",
    label: "Reused",
    share: prompt ? cached / prompt : 0,
    value: cached ? number(cached) : "nothing",
    detail: `of ${counted(prompt, "token")}`,
    isNothing: !cached,
  };
}

/** One sentence about what the request cost; `isSpared` where its media cost nothing. */
export function verdictOf(cost, media, noun, hasAskedBefore) {
  const total = media.length;
  const text = counted(cost.prefilled_text_tokens, "token");
  if (!total) return { isSpared: false, sentence: `Text only: ${text} prefilled.` };
  const { decoded_items: decoded, encoded_items: encoded, prefilled_media_tokens: tokens } = cost;
  if (!decoded && !encoded && !tokens) {
    const when = hasAskedBefore ? "This time" : `The server knew ${total === 1 ? "it" : "them"} already:`;
    const were = cost.prefilled_text_tokens === 1 ? "was" : "were";
    const sentence = `${when} no ${noun} was decoded, encoded or prefilled. Only ${text} of text ${were}.`;
    return { isSpared: true, sentence };
  }
  if (decoded === total && encoded === total) {
    const who = total === 1 ? `The ${noun} was` : `All ${total} ${noun}s were`;
    return { isSpared: false, sentence: `${who} decoded, encoded and prefilled: ${counted(tokens, "token")}.` };
  }
  const prefilled = tokens ? `${counted(tokens, `${noun} token`)} prefilled` : "nothing of them prefilled";
  const sentence = `${decoded} of ${counted(total, noun)} decoded, ${encoded} encoded, ${prefilled}.`;
  return { isSpared: false, sentence };
}

/** What the model was shown of the clips; "" where there were none. */
export function framesOf({ clip_frames: frames, lowered_clips: lowered }) {
  if (!frames) return "";
  const fewer = lowered ? ", fewer or smaller ones than asked for: a clip has a limit of tokens" : "";
  return ` ${counted(frames, "frame")} shown${fewer}.`;
}

/** "19×": how much sooner than `before`; null where that is not worth saying. */
export function sooner(firstTokenMs, beforeMs) {
  const ratio = beforeMs / firstTokenMs;
  if (!(ratio >= 1.2)) return null;
  return `${ratio >= 10 ? Math.round(ratio) : ratio.toFixed(1)}×`;
}
