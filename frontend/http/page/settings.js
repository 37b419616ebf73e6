// The settings form: fields of a request's body, and the API key. Only the key is stored, if the user wants it.

import { HINTS, SCHEMA, TOOLS } from "./demos.js";

const KEY = "quire-api-key";

export class Settings {
  // get: (id) => element
  constructor(get, client, onKey) {
    this.get = get;
    get("tools").value = JSON.stringify(TOOLS, null, 1);
    get("schema").value = JSON.stringify(SCHEMA, null, 1);
    for (const radio of get("demos").querySelectorAll("input")) radio.addEventListener("change", () => this.showDemo());
    this.showDemo();
    const key = get("key"), keep = get("keep-key");
    key.value = client.key = sessionStorage.getItem(KEY) ?? "";
    keep.checked = key.value !== "";
    const changed = () => {
      client.key = key.value.trim();
      if (keep.checked && client.key) sessionStorage.setItem(KEY, client.key);
      else sessionStorage.removeItem(KEY);
    };
    key.addEventListener("input", changed);
    keep.addEventListener("change", changed);
    key.addEventListener("change", onKey);
    get("settings").addEventListener("submit", (event) => event.preventDefault());
  }

  get demo() {
    return this.get("demos").querySelector("input:checked").value;
  }

  showDemo() {
    this.get("tools-fields").hidden = this.demo !== "tools";
    this.get("json-fields").hidden = this.demo !== "json";
    this.get("demo-hint").textContent = HINTS[this.demo];
  }

  // The fields of a request's body besides its messages. Throws an Error for values that cannot be sent.
  body() {
    const body = { model: this.get("model").value, stream: this.get("stream").checked };
    if (body.stream) body.stream_options = { include_usage: true };
    for (const field of this.get("settings").querySelectorAll("input[type=number]")) {
      if (!mayBeSent(field)) throw new Error(`${field.labels[0].textContent.trim()}: ${field.validationMessage}`);
      if (field.value !== "") body[field.id] = field.valueAsNumber;
    }
    if (this.get("stop_text").value) body.stop = [this.get("stop_text").value];
    if (this.demo === "tools") Object.assign(body, { tools: parsed(this.get("tools")), tool_choice: this.get("tool_choice").value });
    if (this.demo === "json") body.response_format = this.responseFormat();
    return body;
  }

  responseFormat() {
    if (this.get("json_kind").value === "json_object") return { type: "json_object" };
    return { type: "json_schema", json_schema: { name: "answer", schema: parsed(this.get("schema")), strict: true } };
  }

  system() {
    const text = this.get("system").value.trim();
    return text ? [{ role: "system", content: text }] : [];
  }
}

// A fraction's step is only for the arrow keys: 0.75 is a valid temperature.
function mayBeSent(field) {
  return field.validity.valid || (field.validity.stepMismatch && field.step < 1 && !field.validity.rangeUnderflow && !field.validity.rangeOverflow);
}

function parsed(field) {
  try {
    return JSON.parse(field.value);
  } catch (error) {
    field.focus();
    throw new Error(`${field.labels[0].firstChild.textContent.trim()}: ${error.message}`);
  }
}
