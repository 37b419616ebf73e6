// Draws Markdown as DOM nodes, block by block: an answer that grows draws only its last, open block anew.
//
// Nodes are made by name and text is set as text, so nothing that a model writes can become an element or be loaded.

import { copyButton } from "./copy.js";
import { element } from "./dom.js";
import { inline } from "./inline.js";
import { parse } from "./markdown.js";

export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.reset();
  }

  reset() {
    this.root.replaceChildren();
    this.text = "";
    this.begin = 0; // where the open part of the text begins: all blocks before it are as they will stay
    this.drawn = []; // of the open part
  }

  // written: all of the text; usually what was shown before, and more.
  show(written) {
    const text = written.replace(/\r\n?/g, "\n");
    if (text === this.text) return;
    if (!text.startsWith(this.text)) this.reset();
    this.text = text;
    const open = text.slice(this.begin), blocks = parse(open);
    update(this.root, this.drawn, blocks);
    this.closeFirst(open, blocks);
  }

  // A block is closed when another follows it, but the first two lines of that one must be complete: until then it may join this one.
  closeFirst(open, blocks) {
    const begins = [0]; // of lines
    for (let at = open.indexOf("\n"); at >= 0; at = open.indexOf("\n", at + 1)) begins.push(at + 1);
    const last = blocks.findLastIndex((block) => block.start < begins.length - 2);
    if (last < 1) return;
    this.drawn.splice(0, last);
    this.begin += begins[blocks[last].start];
  }
}

// Makes the drawn blocks of a parent equal to these blocks; what has not changed keeps its nodes.
function update(parent, drawn, blocks) {
  blocks.forEach((block, i) => {
    if (drawn[i] && refresh(drawn[i], block)) return;
    const made = draw(block);
    if (drawn[i]) drawn[i].node.replaceWith(made.node);
    else parent.append(made.node);
    drawn[i] = made;
  });
  for (const extra of drawn.splice(blocks.length)) extra.node.remove();
}

// Returns whether the drawn block could be changed to this one.
function refresh(drawn, block) {
  const old = drawn.block;
  if (["kind", "level", "language", "ordered", "number", "head"].some((name) => old[name] !== block[name])) return false;
  if (old.text !== block.text) {
    if (block.kind === "row" || !drawn.body) return false;
    if (block.kind === "code") growText(drawn.body, block.text);
    else fill(drawn.body, block.text);
  }
  if (block.blocks) update(drawn.body, drawn.children, block.blocks);
  drawn.block = block;
  return true;
}

// Appends where it can: a long text that grows is laid out, but not made, anew.
export function growText(body, text) {
  const node = body.firstChild ?? body.appendChild(document.createTextNode(""));
  if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
  else node.data = text;
}

function draw(block) {
  const made = { block, children: [], ...DRAW[block.kind](block) };
  if (block.blocks) update(made.body, made.children, block.blocks);
  return made;
}

const same = (node) => ({ node, body: node });
const DRAW = {
  paragraph: (block) => same(fill(element("p", { dir: "auto" }), block.text)),
  heading: (block) => same(fill(element(`h${Math.min(block.level + 2, 6)}`, { dir: "auto" }), block.text)), // below the page's own
  rule: () => ({ node: element("hr") }),
  quote: () => same(element("blockquote")),
  list: (block) => same(element(block.ordered ? "ol" : "ul", block.ordered && block.number !== 1 ? { start: block.number } : {})),
  item: () => same(element("li", { dir: "auto" })),
  code: drawCode,
  table: drawTable,
  row: (block) => ({ node: tableRow("td", block) }),
};

function drawCode(block) {
  const node = element("div", { class: "code" }), head = element("div", { class: "code-head" });
  const pre = element("pre", { tabindex: "0", "aria-label": "Code" }), body = element("code", { dir: "ltr" });
  growText(body, block.text);
  head.append(element("span", {}, block.language), copyButton("Copy the code", () => body.textContent));
  pre.append(body);
  node.append(head, pre);
  return { node, body };
}

function drawTable(block) {
  const node = element("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" });
  const table = element("table"), head = element("thead"), body = element("tbody");
  head.append(tableRow("th", block));
  table.append(head, body);
  node.append(table);
  return { node, body };
}

function tableRow(name, { cells, columns }) {
  const row = element("tr");
  row.append(...cells.map((cell, i) => fill(element(name, { dir: "auto", class: columns[i] }), cell)));
  return row;
}

function fill(node, text) {
  node.replaceChildren(...inline(text).map(drawInline));
  return node;
}

function drawInline(part) {
  if (typeof part === "string") return document.createTextNode(part);
  if (part.kind === "break") return element("br");
  if (part.kind === "code") return element("code", {}, part.text);
  const node = part.kind === "link"
    ? element("a", { href: part.address, rel: "noopener noreferrer nofollow", target: "_blank", title: part.address })
    : element(part.kind);
  node.append(...part.parts.map(drawInline));
  return node;
}
