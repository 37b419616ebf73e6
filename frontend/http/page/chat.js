// The conversation: its messages, on the screen and as they are sent, one answer at a time, and tool calls.

import { Answer } from "./client.js";
import { answer as answerCall } from "./demos.js";

const MAX_ROUNDS = 5; // rounds of tool calls that the page answers by itself
const WHO = { user: "You", assistant: "Model", tool: "Result" };

export class Chat {
  constructor(get, client, settings) {
    this.get = get;
    this.client = client;
    this.settings = settings;
    this.messages = [];
    this.running = null; // an AbortController
    this.log = get("messages");
    get("composer").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    get("stop").addEventListener("click", () => this.stop());
    get("retry").addEventListener("click", () => this.retry());
    get("clear").addEventListener("click", () => this.clear());
    get("prompt").addEventListener("keydown", (event) => {
      const composing = event.isComposing || event.keyCode === 229; // Safari ends a composition before its Enter
      if (event.key === "Enter" && !event.shiftKey && !composing) {
        event.preventDefault();
        this.send();
      }
    });
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.stop(); });
  }

  send() {
    const prompt = this.get("prompt"), text = prompt.value.trim();
    if (!text || this.running) return;
    prompt.value = "";
    this.log.querySelector("form")?.parentElement.remove(); // a form for tool results, which the user has skipped
    this.say({ role: "user", content: text });
    this.log.scrollTop = this.log.scrollHeight;
    this.answer();
  }

  // Drops everything after the user's last message, and asks again.
  retry() {
    const last = this.messages.findLastIndex((message) => message.role === "user");
    if (last < 0 || this.running) return;
    this.messages.length = last + 1;
    while (this.log.lastElementChild && !this.log.lastElementChild.classList.contains("user")) this.log.lastElementChild.remove();
    this.answer();
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.log.replaceChildren();
    this.showError("");
    this.get("retry").disabled = true;
    this.get("prompt").focus();
  }

  say(message) {
    this.messages.push(message);
    const view = new MessageView(this.log, message.role);
    view.show(message.content);
    return view;
  }

  async answer() {
    const controller = (this.running = new AbortController());
    this.setBusy(true);
    this.showError("");
    try {
      for (let round = 0; round < MAX_ROUNDS; round++) {
        const calls = await this.oneAnswer(controller.signal);
        if (!calls.length || !this.answerCalls(calls)) break;
      }
    } catch (error) {
      if (error.name !== "AbortError") this.showError(error.message);
    } finally {
      if (this.running === controller) this.running = null;
      this.setBusy(this.running !== null);
    }
  }

  // Returns the answer's tool calls.
  async oneAnswer(signal) {
    const messages = this.messages, answer = new Answer();
    const body = { ...this.settings.body(), messages: [...this.settings.system(), ...messages] };
    if (body.tool_choice === "required" && messages.at(-1).role === "tool") body.tool_choice = "auto"; // else endless calls
    const view = new MessageView(this.log, "assistant"), figures = new Figures();
    try {
      await this.client.chat(body, signal, (chunk) => {
        answer.add(chunk);
        figures.add(chunk);
        view.showSoon(answer);
      });
    } finally {
      view.showNow(answer);
      view.end(figures.text(signal.aborted ? "stopped" : answer.finishReason));
      if (answer.isEmpty && answer.finishReason === null) view.remove();
      if (signal.aborted || answer.finishReason === null) answer.calls = []; // they may be incomplete
      if (answer.content || answer.calls.length) messages.push(answer.message());
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
    calls.forEach((call, i) => this.say({ role: "tool", tool_call_id: call.id, content: results[i] }));
    return true;
  }

  // Shows a form for the results that the page cannot compute.
  askUser(calls, known) {
    const form = element("form", { class: "message call" });
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
      if (this.running) return;
      form.parentElement.remove();
      calls.forEach((call, i) => this.say({ role: "tool", tool_call_id: call.id, content: fields[i].value }));
      this.answer();
    });
    const item = element("div", {});
    item.append(form);
    this.log.append(item);
    fields[0].focus();
  }

  setBusy(busy) {
    this.log.setAttribute("aria-busy", String(busy));
    this.get("send").disabled = busy;
    this.get("stop").disabled = !busy;
    this.get("retry").disabled = busy || !this.messages.length;
  }

  showError(text) {
    const error = this.get("error");
    error.textContent = text;
    error.hidden = !text;
  }
}

class MessageView {
  constructor(log, role) {
    this.log = log;
    this.item = element("div", { class: `message ${role}` });
    this.item.append(element("p", { class: "who" }, WHO[role]));
    this.text = element("p", { class: "text" });
    this.item.append(this.text);
    this.follow(() => log.append(this.item));
  }

  // Changes the log, and scrolls to its end if that was visible.
  follow(change) {
    const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
    change();
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  show(content, reasoning = "", calls = []) {
    this.follow(() => {
      this.text.textContent = content ?? "";
      if (reasoning) this.showReasoning(reasoning);
      if (calls.length) this.showCalls(calls);
    });
  }

  // Shows the answer once per drawn frame: each change lays all of its text out anew.
  showSoon(answer) {
    this.frame ??= requestAnimationFrame(() => this.showNow(answer));
  }

  showNow(answer) {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    this.show(answer.content, answer.reasoning, answer.calls);
  }

  showReasoning(reasoning) {
    if (!this.reasoning) {
      const details = element("details", {});
      this.reasoning = element("p", { class: "text" });
      details.append(element("summary", {}, "Reasoning"), this.reasoning);
      this.text.before(details);
    }
    this.reasoning.textContent = reasoning;
  }

  showCalls(calls) {
    this.calls ??= this.item.appendChild(element("div", {}));
    this.calls.replaceChildren(...calls.map((call) => {
      const box = element("div", { class: "call" }, "Calls ");
      box.append(element("code", {}, `${call.name}(${call.arguments})`));
      return box;
    }));
  }

  end(figures) {
    if (figures) this.follow(() => this.item.append(element("p", { class: "figures" }, figures)));
  }

  remove() {
    this.item.remove();
  }
}

// Tokens and times of one answer, as this page has measured them.
class Figures {
  began = performance.now();
  first = 0;
  usage = null;

  add(chunk) {
    const delta = chunk.choices?.[0]?.delta;
    if (!this.first && (delta?.content || delta?.reasoning || delta?.tool_calls)) this.first = performance.now();
    this.usage = chunk.usage ?? this.usage;
  }

  text(reason) {
    const words = [];
    if (this.usage) words.push(`${this.usage.prompt_tokens} + ${this.usage.completion_tokens} tokens`);
    if (this.first) words.push(`first after ${Math.round(this.first - this.began)} ms`);
    const seconds = (performance.now() - this.first) / 1000;
    if (this.usage && this.first && seconds > 0.05) words.push(`${Math.round(this.usage.completion_tokens / seconds)} tok/s`);
    if (reason) words.push(reason);
    return words.join(" · ");
  }
}

function element(name, attributes, text = "") {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.append(text);
  return made;
}
