// Images for the next message: pasted into the page, or dropped on it. Each is a button that takes it away again.
//
// They are kept as data: URLs in this page's memory alone; a reload forgets them.

import { element } from "./dom.js";

export const TYPES = ["image/jpeg", "image/png", "image/webp", "image/gif", "image/bmp"];
export const MOST_BYTES = 20_000_000; // of all that wait

export class Images {
  // row: the element that shows them. onError: called with a text for the user.
  constructor(row, onError) {
    this.row = row;
    this.onError = onError;
    this.waiting = []; // {name, url}
    document.addEventListener("paste", (event) => this.take(event, event.clipboardData));
    document.addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
    document.addEventListener("drop", (event) => this.take(event, event.dataTransfer));
  }

  async take(event, data) {
    const files = [...(data?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    for (const file of files) {
      if (!TYPES.includes(file.type)) {
        this.onError(`${file.name || "This file"} is no image that can be sent: JPEG, PNG, WebP, GIF and BMP can.`);
        continue;
      }
      const url = await read(file);
      if (this.waiting.reduce((sum, each) => sum + each.url.length, url.length) > MOST_BYTES) {
        this.onError("These images are too large to be sent together.");
        continue;
      }
      this.waiting.push({ name: file.name || "image", url });
    }
    this.draw();
  }

  // The URLs of those that wait, which do not any more.
  pop() {
    const urls = this.waiting.map((image) => image.url);
    this.waiting = [];
    this.draw();
    return urls;
  }

  draw() {
    this.row.replaceChildren(...this.waiting.map((image) => {
      const button = element("button", { type: "button", "aria-label": `Remove ${image.name}` }, `${image.name} ×`);
      button.addEventListener("click", () => {
        this.waiting = this.waiting.filter((each) => each !== image);
        this.draw();
      });
      return button;
    }));
    this.row.hidden = !this.waiting.length;
  }
}

function hasFiles(event) {
  return [...(event.dataTransfer?.types ?? [])].includes("Files");
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

// A question's content as the API takes it. Pure.
export function contentOf(text, images) {
  if (!images?.length) return text;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return [...parts, { type: "text", text }];
}
