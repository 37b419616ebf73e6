// Buttons that copy text. Browsers lend the clipboard to pages over TLS or from this machine; others get the older way.

import { element } from "./dom.js";

const SHOWN_MS = 2000;

// read: () => the text to copy
export function copyButton(label, read) {
  const button = element("button", { type: "button", class: "small", "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copied(read())) ? "Copied" : "Not copied";
    button.setAttribute("aria-label", button.textContent);
    setTimeout(() => {
      button.textContent = "Copy";
      button.setAttribute("aria-label", label);
    }, SHOWN_MS);
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedByCommand(text);
  }
}

function copiedByCommand(text) {
  const before = document.activeElement, field = element("textarea", { "aria-hidden": "true", class: "away" });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  before?.focus();
  return done;
}
