// The server's API, as far as this page uses it. Addresses are relative: a proxy may serve all of it under a path.

import { events } from "./sse.js";

const KEY = "prism.key";

/** What the server, or the way to it, said instead of an answer. `status` is 0 where nothing answered. */
export class Refused extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfterS = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param, retryAfterS });
  }
}

/** The API key of this tab, kept until the tab is closed; "" for none. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** The name of the model that is served. Throws Refused. */
export async function modelName() {
  const response = await call("v1/models");
  return (await response.json()).data[0].id;
}

/** Streams `POST /v1/generate`: yields {name, data} with name accepted, token or done. Throws Refused. */
export async function* generate(messages, signal) {
  const body = JSON.stringify({ messages, stream: true });
  const response = await call("v1/generate", { method: "POST", body, signal });
  let ended = false;
  for await (const event of events(response.body)) {
    const data = JSON.parse(event.data);
    if (event.name === "error") throw new Refused(data.error.message, data.error);
    ended ||= event.name === "done";
    yield { name: event.name, data };
  }
  if (!ended) throw new Refused("The connection broke off before the answer was complete.");
}

async function call(path, options = {}) {
  const headers = { accept: "application/json, text/event-stream" };
  if (options.body) headers["content-type"] = "application/json";
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server cannot be reached. It may be restarting, or the files may be larger than it takes.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const retryAfter = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
  const facts = { status: response.status, retryAfterS: Number.isNaN(retryAfter) ? null : retryAfter };
  try {
    const { error } = await response.json();
    return new Refused(error.message, { ...facts, code: error.code, param: error.param });
  } catch {
    return new Refused(`Something before the server answered with HTTP ${response.status}.`, facts);
  }
}
