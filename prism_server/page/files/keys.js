// The API key: asked for when the server wants one, kept in sessionStorage.

import { key } from "./api.js";
import { byId } from "./dom.js";

const KEPT = "It is kept in this tab only, until the tab is closed.";

/** Shows the dialog; whether a key was given. */
export function askForKey(reason = "") {
  const dialog = byId("key-dialog");
  byId("key-reason").textContent = reason || KEPT;
  byId("key-value").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const given = () => dialog.returnValue === "given";
    dialog.addEventListener("close", () => resolve(given()), { once: true });
  });
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const value = byId("key-value").value.trim();
  if (!value) return;
  key.set(value);
  byId("key-dialog").close("given");
});
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
