// The settings form: fields of a request's body, and the API key, which is stored only if the user wants it.

import { HINTS, SCHEMA, TOOLS } from "./demos.js";
import { element } from "./dom.js";
import { loadSettings, saveSettings } from "./saved.js";
import { problem, problemOfTools } from "./schema.js";

const KEY = "quire-api-key";

export class Settings {
  // get: (id) => element
  constructor(get, client, onKey) {
    this.get = get;
    get("tools").value = JSON.stringify(TOOLS, null, 1);
    get("schema").value = JSON.stringify(SCHEMA, null, 1);
    this.fields = [...get("settings").querySelectorAll("input, select, textarea")].filter((field) => !["key", "keep-key"].includes(field.id));
    this.restore();
    for (const radio of get("demos").querySelectorAll("input")) radio.addEventListener("change", () => this.showDemo());
    this.showDemo();
    for (const field of this.fields) {
      field.addEventListener("change", () => { this.check(field); this.save(); });
      field.addEventListener("input", () => this.complain(field, ""));
    }
    this.listenToKey(get("key"), get("keep-key"), client, onKey);
    get("settings").addEventListener("submit", (event) => event.preventDefault());
  }

  listenToKey(key, keep, client, onKey) {
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
  }

  restore() {
    const saved = loadSettings();
    for (const field of this.fields) {
      const value = saved[field.id || field.value];
      if (field.type === "checkbox" || field.type === "radio") field.checked = value ?? field.checked;
      else field.value = value ?? field.value;
    }
  }

  save() {
    const value = (field) => (field.type === "checkbox" || field.type === "radio" ? field.checked : field.value);
    saveSettings(Object.fromEntries(this.fields.map((field) => [field.id || field.value, value(field)])));
  }

  get demo() {
    return this.get("demos").querySelector("input:checked").value;
  }

  showDemo() {
    this.get("tools-fields").hidden = this.demo !== "tools";
    this.get("json-fields").hidden = this.demo !== "json";
    this.get("demo-hint").textContent = HINTS[this.demo];
  }

  // Returns whether this field, or all fields can be sent. What is wrong is said beside the first that cannot; without a field
  // given it gets the focus, too.
  check(only = null) {
    for (const field of only ? [only] : this.fields) {
      const wrong = this.wrongWith(field);
      this.complain(field, wrong);
      if (!wrong) continue;
      if (!only) field.focus();
      return false;
    }
    return true;
  }

  wrongWith(field) {
    if (field.type === "number") return mayBeSent(field) ? "" : field.validationMessage;
    if (field.id === "tools" && this.demo === "tools") return wrongText(field.value, problemOfTools);
    if (field.id === "schema" && this.demo === "json" && this.get("json_kind").value === "json_schema") return wrongText(field.value, problem);
    return "";
  }

  complain(field, text) {
    const id = `${field.id}-problem`, old = document.getElementById(id);
    const label = field.labels[0]?.firstChild.textContent.trim(), whole = `${label}: ${text}`;
    if (!text) {
      old?.remove();
      field.removeAttribute("aria-invalid");
      field.removeAttribute("aria-describedby");
    } else if (old?.textContent !== whole) {
      old?.remove();
      field.setAttribute("aria-invalid", "true");
      field.setAttribute("aria-describedby", id);
      field.closest(".field").after(element("p", { id, class: "notice small", role: "alert" }, whole));
    }
  }

  // Says a refusal beside the field that the server names, and returns whether there is such a field.
  blame({ param, status, message }) {
    const name = param?.split(/[.[]/)[0] ?? "";
    const id = { response_format: "schema", stop: "stop_text" }[name] ?? name;
    const field = id && this.fields.find((one) => one.id === id); // radios have no id
    if (!(status >= 400 && status < 500) || !field || field.closest("[hidden]")) return false;
    this.complain(field, message);
    field.focus();
    return true;
  }

  // The fields of a request's body besides its messages; check() has said that they can be sent.
  body() {
    const body = { model: this.get("model").value, stream: this.get("stream").checked };
    if (body.stream) body.stream_options = { include_usage: true };
    for (const field of this.fields) if (field.type === "number" && field.value !== "") body[field.id] = field.valueAsNumber;
    if (this.get("stop_text").value) body.stop = [this.get("stop_text").value];
    if (this.demo === "tools") Object.assign(body, { tools: JSON.parse(this.get("tools").value), tool_choice: this.get("tool_choice").value });
    if (this.demo === "json") body.response_format = this.responseFormat();
    return body;
  }

  responseFormat() {
    if (this.get("json_kind").value === "json_object") return { type: "json_object" };
    return { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(this.get("schema").value), strict: true } };
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

function wrongText(text, check) {
  try {
    return check(JSON.parse(text));
  } catch (error) {
    return error.message;
  }
}
