// Server-sent events of a fetch response (WHATWG HTML, 9.2). EventSource cannot send a body or a key.

/** Yields {name, data} of each event; comments, which keep a connection open, are left out. */
export async function* events(body) {
  let name = "message";
  let data = [];
  for await (const line of lines(body)) {
    if (line === "") {
      if (data.length) yield { name, data: data.join("\n") };
      name = "message";
      data = [];
      continue;
    }
    const colon = line.indexOf(":");
    const key = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (key === "event") name = value;
    else if (key === "data") data.push(value);
  }
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const pieces = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = pieces.pop();
      yield* pieces;
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever stops reading wants no more of it
  }
}
