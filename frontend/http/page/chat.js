// The conversation: its entries, on the screen and as they are sent, one answer at a time, and tool calls.
//
// An entry is {role, content, images, reasoning, calls, tool_call_id, figures}, of which the last five are there where they
// apply.

import { Answer } from "./client.js";
import { answer as answerCall, PROMPTS } from "./demos.js";
import { element } from "./dom.js";
import { Figures } from "./figures.js";
import { contentOf, Images } from "./images.js";
import { isSendKey, MessageView } from "./message.js";
import { load, save } from "./saved.js";

const MAX_ROUNDS = 5; // rounds of tool calls that the page answers by itself
const SAVE_EVERY_MS = 1000; // while an answer comes

export class Chat {
  constructor(get, client, settings) {
    this.get = get;
    this.client = client;
    this.settings = settings;
    this.entries = [];
    this.views = []; // of the entries
    this.running = null; // an AbortController
    this.coming = null; // the entry that an answer has so far
    this.cut = false; // whether older entries were too long to be kept over a reload
    this.log = get("messages");
    this.images = new Images(get("images"), (text) => this.showError(text));
    get("composer").addEventListener("submit", (event) => { event.preventDefault(); this.send(this.get("prompt").value); });
    get("stop").addEventListener("click", () => this.stop());
    get("retry").addEventListener("click", () => this.retry());
    get("clear").addEventListener("click", () => this.clear());
    get("demos").addEventListener("change", () => this.showPrompts());
    get("prompt").addEventListener("keydown", (event) => {
      if (!isSendKey(event)) return;
      event.preventDefault();
      this.send(this.get("prompt").value);
    });
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.stop(); });
    window.addEventListener("pagehide", () => this.save());
    this.restore();
    get("prompt").focus({ preventScroll: true });
  }

  restore() {
    const { entries, draft, cut } = load();
    this.cut = cut;
    this.get("prompt").value = draft;
    if (cut) this.log.append(element("p", { class: "hint" }, "What came before was too long to be kept over a reload."));
    for (const entry of entries) {
      const view = this.add(entry);
      if (entry.role === "assistant") view.end(entry.figures, entry.content);
    }
    this.log.scrollTop = this.log.scrollHeight;
    this.setBusy(false);
  }

  save() {
    const known = this.coming ? [...this.entries, { ...this.coming, figures: "cut off" }] : this.entries;
    const entries = known.map(({ images, ...entry }) => entry); // images would fill the storage
    this.savedAt = performance.now();
    save({ entries, draft: this.get("prompt").value, cut: this.cut });
  }

  // A question is taken only if the settings can be sent with it; otherwise it stays where it was written.
  send(text) {
    if (!text.trim() || this.running || !this.settings.check()) return;
    const prompt = this.get("prompt");
    if (text === prompt.value) prompt.value = "";
    this.ask(this.entries.length, text.trim(), this.images.pop());
  }

  // Puts the question in the place of the entries from this one on, and asks it.
  ask(at, text, images = this.entries[at]?.images ?? []) {
    const replaced = { entries: this.entries.splice(at), views: this.views.splice(at) };
    for (const view of replaced.views) view.remove();
    this.log.querySelector(".results")?.remove(); // a form for tool results, which the user has skipped
    this.add({ role: "user", content: text, ...(images.length ? { images } : {}) });
    this.log.scrollTop = this.log.scrollHeight;
    this.answer(() => this.giveBack(at, text, replaced));
  }

  // Undoes ask(): what was asked is a draft again.
  giveBack(at, text, { entries, views }) {
    this.entries.length = at;
    for (const view of this.views.splice(at)) view.remove();
    this.entries.push(...entries);
    this.views.push(...views);
    this.log.append(...views.map((view) => view.item));
    if (views.length) views[0].openForm(text);
    else this.get("prompt").value ||= text;
  }

  edit(view, text) {
    if (this.running || !this.settings.check()) return;
    view.closeForm();
    this.ask(this.views.indexOf(view), text);
  }

  // Drops everything after the user's last message, and asks again.
  retry() {
    const last = this.entries.findLastIndex((entry) => entry.role === "user");
    if (last < 0 || this.running || !this.settings.check()) return;
    this.log.querySelector(".results")?.remove();
    this.entries.length = last + 1;
    for (const view of this.views.splice(last + 1)) view.remove();
    this.answer();
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.entries = [];
    this.views = [];
    this.coming = null;
    this.cut = false;
    this.log.replaceChildren();
    this.showError("");
    this.setBusy(false);
    this.save();
    this.get("prompt").focus();
  }

  add(entry) {
    const view = new MessageView(this.log, entry.role, (text) => this.edit(view, text));
    this.entries.push(entry);
    this.views.push(view);
    view.show(entry);
    return view;
  }

  // giveBack: undoes the question if the server refuses a setting before anything was said
  async answer(giveBack = null) {
    const controller = (this.running = new AbortController());
    this.setBusy(true);
    this.showError("");
    this.save();
    try {
      for (let round = 0; round < MAX_ROUNDS; round++) {
        const calls = await this.oneAnswer(controller.signal);
        giveBack = null;
        if (!calls.length || !this.answerCalls(calls)) break;
      }
    } catch (error) {
      if (this.running === controller && error.name !== "AbortError") this.fail(error, giveBack);
    } finally {
      if (this.running === controller) this.finish();
    }
  }

  fail(error, giveBack) {
    if (this.settings.blame(error)) giveBack?.();
    else this.showError(error.message);
  }

  finish() {
    this.running = null;
    this.setBusy(false);
    this.save();
    const at = document.activeElement;
    if (at === document.body || this.get("composer").contains(at)) this.get("prompt").focus({ preventScroll: true });
  }

  // Returns the answer's tool calls.
  async oneAnswer(signal) {
    const { entries, views } = this, answer = new Answer();
    const body = { ...this.settings.body(), messages: [...this.settings.system(), ...entries.map(sent).filter(Boolean)] };
    if (body.tool_choice === "required" && entries.at(-1).role === "tool") body.tool_choice = "auto"; // else endless calls
    const view = new MessageView(this.log, "assistant"), figures = new Figures();
    const isCurrent = () => this.entries === entries; // "New chat" begins another list
    view.follow(() => view.item.classList.add("coming"));
    try {
      await this.client.chat(body, signal, (chunk) => {
        answer.add(chunk);
        figures.add(chunk);
        view.showSoon(answer);
        if (!isCurrent()) return;
        this.coming = entryOf(answer);
        if (performance.now() - this.savedAt > SAVE_EVERY_MS) this.save();
      });
    } finally {
      view.item.classList.remove("coming");
      view.showNow(answer);
      const isNothing = answer.isEmpty && answer.finishReason === null;
      if (signal.aborted || answer.finishReason === null) answer.calls = []; // they may be incomplete
      const entry = { ...entryOf(answer), figures: figures.text(signal.aborted ? "stopped" : (answer.finishReason ?? "cut off")) };
      view.end(entry.figures, answer.content);
      if (isNothing) {
        view.remove();
      } else {
        entries.push(entry);
        views.push(view);
      }
      if (isCurrent()) this.coming = null;
    }
    return answer.calls;
  }

  // Returns whether all calls were answered, so that the model can go on.
  answerCalls(calls) {
    const results = calls.map((call) => answerCall(call.name, call.arguments));
    if (results.includes(null)) {
      this.askUser(calls, results);
      return false;
    }
    calls.forEach((call, i) => this.add({ role: "tool", tool_call_id: call.id, content: results[i] }));
    return true;
  }

  // Shows a form for the results that the page cannot compute.
  askUser(calls, known) {
    const form = element("form", { class: "message call results" });
    const fields = calls.map((call, i) => {
      const label = element("label", { class: "field" }, `Result of ${call.name}(${call.arguments})`);
      const field = element("input", { type: "text", required: "" });
      field.value = known[i] ?? "";
      label.append(field);
      form.append(label);
      return field;
    });
    form.append(element("button", { type: "submit" }, "Send the result"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running || !this.settings.check()) return;
      form.remove();
      calls.forEach((call, i) => this.add({ role: "tool", tool_call_id: call.id, content: fields[i].value }));
      this.answer();
    });
    this.log.append(form);
    fields[0].focus();
  }

  // Questions to click, while nothing has been said.
  showPrompts() {
    this.log.querySelector(".prompts")?.remove();
    if (this.entries.length || this.running) return;
    const box = element("div", { class: "prompts" });
    box.append(element("p", { class: "hint" }, "Write a message below, or try one of these:"));
    for (const text of PROMPTS[this.settings.demo]) {
      const button = element("button", { type: "button" }, text);
      button.addEventListener("click", () => {
        this.send(text);
        this.get("prompt").focus({ preventScroll: true });
      });
      box.append(button);
    }
    this.log.append(box);
  }

  setBusy(busy) {
    this.log.setAttribute("aria-busy", String(busy));
    this.log.classList.toggle("busy", busy);
    this.get("send").disabled = busy;
    this.get("stop").disabled = !busy;
    this.get("retry").disabled = busy || !this.entries.length;
    this.showPrompts();
  }

  showError(text) {
    const error = this.get("error");
    error.textContent = text;
    error.hidden = !text;
    if (text) this.log.scrollTop = this.log.scrollHeight; // which has become smaller
  }
}

function entryOf({ content, reasoning, calls }) {
  return { role: "assistant", content, ...(reasoning ? { reasoning } : {}), ...(calls.length ? { calls: calls.filter(Boolean) } : {}) };
}

// An entry as the API takes it; null for an answer that says nothing.
function sent({ role, content, images, calls, tool_call_id }) {
  if (role !== "assistant") return { role, ...(role === "tool" ? { tool_call_id } : {}), content: contentOf(content, images) };
  if (!content && !calls) return null;
  const tool_calls = calls?.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return { role, content: content || null, ...(tool_calls ? { tool_calls } : {}) };
}
