// The bundled examples, and the questions that go with them.

import { byId, element } from "./dom.js";

const EXAMPLES = "page/examples/";

/** Shows the gallery; `onChosen(files, questions)` gets an example's files when it is clicked. */
export async function showGallery(onChosen) {
  const response = await fetch(`${EXAMPLES}examples.json`);
  const { examples } = await response.json();
  byId("gallery").replaceChildren(...examples.map((example) => element("li", "", {}, card(example, onChosen))));
}

function card(example, onChosen) {
  const shown = example.files.slice(0, 3).reverse(); // the first lies on top
  const pictures = shown.map((file) => element("img", "", { src: EXAMPLES + file.name, alt: "", decoding: "async" }));
  const stack = element("span", `stack of-${shown.length}`, {}, ...pictures);
  const button = element("button", "example", { type: "button" }, stack, element("span", "", {}, example.title));
  button.addEventListener("click", async () => onChosen(await Promise.all(example.files.map(fetched)), example.questions));
  return button;
}

async function fetched({ name, type }) {
  const response = await fetch(EXAMPLES + name);
  return new File([await response.blob()], name, { type });
}

/** Shows questions as buttons; `onAsked(question)` when one is clicked. */
export function suggest(questions, onAsked) {
  const rows = questions.map((question) => {
    const button = element("button", "suggestion", { type: "button" }, question);
    button.addEventListener("click", () => onAsked(question));
    return element("li", "", {}, button);
  });
  byId("suggestions").replaceChildren(...rows);
  byId("suggestions").hidden = !rows.length;
}
