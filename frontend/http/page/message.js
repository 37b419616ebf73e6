// One message on the screen: its text, reasoning, calls, figures and buttons, and the form that edits a question.

import { copyButton } from "./copy.js";
import { element } from "./dom.js";
import { growText, MarkdownView } from "./markdown_view.js";

const WHO = { user: "You", assistant: "Model", tool: "Result" };
const REST = 3; // a drawing is followed by a pause this many times as long as it took

export class MessageView {
  // edit: (text) => whether the question was taken; for questions
  constructor(log, role, edit = null) {
    this.log = log;
    this.edit = edit;
    this.item = element("div", { class: `message ${role}` });
    this.head = element("div", { class: "row head" });
    this.head.append(element("p", { class: "who" }, WHO[role]));
    this.text = element("div", { class: "text", dir: "auto" });
    this.item.append(this.head, this.text);
    this.markdown = role === "assistant" ? new MarkdownView(this.text) : null;
    this.resumes = 0;
    if (role === "user") this.addEdit();
    this.follow(() => log.append(this.item));
  }

  // Changes the log, and scrolls to its end if that was visible.
  follow(change) {
    const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
    change();
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  show({ content, images = [], reasoning = "", calls = [] }) {
    this.follow(() => {
      if (this.markdown) this.markdown.show(content ?? "");
      else this.text.textContent = content;
      if (reasoning) this.showReasoning(reasoning);
      if (images.length) this.text.append(element("p", { class: "hint" }, images.length === 1 ? "1 image" : `${images.length} images`));
      if (calls.length) this.showCalls(calls);
    });
  }

  // Shows the answer once per drawn frame, and less often if drawing takes long: the page must stay free for its reader.
  showSoon(answer) {
    this.answer = answer;
    this.frame ??= requestAnimationFrame((now) => {
      this.frame = null;
      if (now < this.resumes) return this.showSoon(answer);
      const began = performance.now();
      this.show(answer);
      const ended = performance.now();
      this.resumes = ended + REST * (ended - began);
    });
  }

  showNow(answer) {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    this.show(answer);
  }

  showReasoning(reasoning) {
    if (!this.reasoning) {
      const details = element("details");
      this.reasoning = element("p", { class: "plain", dir: "auto" });
      details.append(element("summary", {}, "Reasoning"), this.reasoning);
      this.text.before(details);
    }
    growText(this.reasoning, reasoning);
  }

  showCalls(calls) {
    this.calls ??= this.item.appendChild(element("div"));
    this.calls.replaceChildren(...calls.map((call) => {
      const box = element("div", { class: "call" }, "Calls ");
      box.append(element("code", {}, `${call.name}(${call.arguments})`));
      return box;
    }));
  }

  // Ends an answer: with its figures, and a button that copies what the model wrote.
  end(figures, content) {
    const foot = element("div", { class: "row foot" });
    if (figures) foot.append(element("p", { class: "figures" }, figures));
    if (content) foot.append(copyButton("Copy the answer", () => content));
    if (foot.childElementCount) this.follow(() => this.item.append(foot));
  }

  addEdit() {
    const button = element("button", { type: "button", class: "small edit", "aria-label": "Edit the question" }, "Edit");
    button.addEventListener("click", () => this.openForm(this.text.textContent));
    this.head.append(button);
  }

  // Shows the form that edits the question; it stays open if the question cannot be taken.
  openForm(text) {
    if (this.form) return;
    const form = (this.form = element("form", { class: "editing" }));
    const field = element("textarea", { rows: "3", "aria-label": "Edit the question", dir: "auto" }), row = element("div", { class: "row" });
    const cancel = element("button", { type: "button" }, "Cancel");
    field.value = text;
    row.append(element("button", { type: "submit" }, "Ask"), cancel, element("p", { class: "hint" }, "What follows is replaced."));
    form.append(field, row);
    const close = () => {
      this.closeForm();
      this.head.querySelector(".edit").focus();
    };
    cancel.addEventListener("click", close);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) this.edit(field.value.trim());
    });
    field.addEventListener("keydown", (event) => {
      if (isSendKey(event)) {
        event.preventDefault();
        form.requestSubmit();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
    });
    this.item.classList.add("edited");
    this.item.append(form);
    field.focus({ preventScroll: true });
    form.scrollIntoView({ block: "nearest" }); // with its buttons, which may be below the log's edge
  }

  closeForm() {
    this.form?.remove();
    this.form = null;
    this.item.classList.remove("edited");
  }

  remove() {
    cancelAnimationFrame(this.frame);
    this.item.remove();
  }
}

// Enter, but not with Shift, and not the Enter that ends an input method's composition (Safari ends the composition before it).
export function isSendKey(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;
}
