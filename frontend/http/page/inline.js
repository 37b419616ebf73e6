// Markdown within a line of text: code, emphasis, links. Pure: no DOM. The time is linear in the text's length.
//
// Returns a list of strings and of nodes {kind: "code" | "em" | "strong" | "del" | "link" | "break", ...}. Only whole
// addresses of http and https become links; a picture is a link to it, so nothing is loaded.

const MAX_DEPTH = 16; // of nodes in nodes; deeper marks are text
const MAX_PARTS = 3000; // of one text; what follows is shown as it is, because browsers lay very many elements out slowly
const MAX_ADDRESS = 2000;
const MAX_OPEN = 64; // brackets or marks that may be open at once; older ones are text
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const NEXT = /[\\`*_~[\]!<&\n]|https?:\/\//g; // where something other than text may begin

export function inline(text) {
  return new Inline(text).read();
}

// The address if it is one that a click may open, else null.
export function safeAddress(address) {
  if (!/^https?:\/\//i.test(address)) return null;
  try {
    return new URL(address).href;
  } catch {
    return null;
  }
}

class Inline {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.parts = []; // strings, nodes, and marks {mark, count, opens, closes} or {bracket}, which are text unless they match
    this.unclosed = new Set(); // lengths of runs of backticks that no run closes
  }

  read() {
    while (this.at < this.text.length && this.parts.length < MAX_PARTS) {
      NEXT.lastIndex = this.at;
      const begin = NEXT.exec(this.text)?.index ?? this.text.length;
      this.add(this.text.slice(this.at, begin));
      this.at = begin;
      if (begin < this.text.length) this.special(this.text[begin]);
    }
    this.add(this.text.slice(this.at));
    return emphasized(this.parts);
  }

  add(part) {
    if (part !== "") this.parts.push(part);
  }

  special(letter) {
    if (letter === "`") return this.code();
    if ("*_~".includes(letter)) return this.mark(letter);
    if (letter === "]") return this.close();
    if (letter === "[" || this.text.startsWith("![", this.at)) return this.open();
    if (letter === "\n") return this.newline();
    const match = this.matched(letter);
    this.add(match ? match.part : letter);
    this.at += match ? match.length : 1;
  }

  matched(letter) {
    const rest = this.text.slice(this.at, this.at + MAX_ADDRESS);
    if (letter === "\\") return /^\\[!-/:-@[-`{-~]/.test(rest) ? { part: rest[1], length: 2 } : null;
    if (letter === "&") {
      const match = /^&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|([a-z]{2,4}));/.exec(rest);
      const part = match && (match[3] ? ENTITIES[match[3]] : character(match[1] ? Number(match[1]) : parseInt(match[2], 16)));
      return part ? { part, length: match[0].length } : null;
    }
    const bracketed = letter === "<" ? /^<(https?:\/\/[^\s<>]*)>/i.exec(rest) : null;
    const words = bracketed ? bracketed[1] : letter === "h" ? bare(rest) : "";
    const address = safeAddress(words);
    return address && { part: { kind: "link", address, parts: [words] }, length: bracketed ? bracketed[0].length : words.length };
  }

  newline() {
    const last = this.parts.at(-1);
    if (typeof last === "string") this.parts[this.parts.length - 1] = last.replace(/\\$/, "").trimEnd();
    this.parts.push({ kind: "break" });
    this.at++;
  }

  code() {
    const length = runLength(this.text, this.at), begin = this.at + length;
    for (let end = begin; !this.unclosed.has(length); ) {
      end = this.text.indexOf("`", end);
      if (end < 0) { this.unclosed.add(length); break; }
      const closing = runLength(this.text, end);
      if (closing === length) {
        const inside = this.text.slice(begin, end).replaceAll("\n", " ");
        const padded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim() !== "";
        this.parts.push({ kind: "code", text: padded ? inside.slice(1, -1) : inside });
        this.at = end + length;
        return;
      }
      end += closing;
    }
    this.add(this.text.slice(this.at, begin));
    this.at = begin;
  }

  mark(letter) {
    const count = runLength(this.text, this.at), end = this.at + count;
    const before = this.text.slice(this.at - 1, this.at) || " ", after = this.text[end] ?? " ";
    const isSpace = (c) => /\s/.test(c), isPunctuation = (c) => /[\p{P}\p{S}]/u.test(c);
    const left = !isSpace(after) && (!isPunctuation(after) || isSpace(before) || isPunctuation(before));
    const right = !isSpace(before) && (!isPunctuation(before) || isSpace(after) || isPunctuation(after));
    const word = letter === "_"; // does not begin or end within a word
    this.parts.push({
      mark: letter, count,
      opens: left && (!word || !right || isPunctuation(before)) && (letter !== "~" || count === 2),
      closes: right && (!word || !left || isPunctuation(after)) && (letter !== "~" || count === 2),
    });
    this.at = end;
  }

  open() {
    const bracket = this.text[this.at] === "!" ? "![" : "[";
    this.parts.push({ bracket });
    this.at += bracket.length;
    this.brackets = [...(this.brackets ?? []), this.parts.length - 1].slice(-MAX_OPEN);
  }

  close() {
    const from = this.brackets?.pop();
    const target = from === undefined ? null : destination(this.text, this.at + 1);
    const address = target && safeAddress(target.address);
    if (!target) {
      this.parts.push("]");
      this.at++;
    } else if (!address) { // an address that must not be opened is shown
      this.parts.push(this.text.slice(this.at, target.end));
      this.at = target.end;
    } else {
      const parts = withoutLinks(emphasized(this.parts.splice(from).slice(1)));
      this.parts.push({ kind: "link", address, depth: depthOf(parts), parts: parts.length ? parts : [address] });
      this.at = target.end;
    }
  }
}

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end++;
  return end - at;
}

function character(code) {
  return code > 0 && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff) ? String.fromCodePoint(code) : "\ufffd";
}

// An address without brackets ends before the punctuation of its sentence.
function bare(rest) {
  const found = /^https?:\/\/[^\s<>"`*[\]]*/i.exec(rest)[0], ends = found.includes("(") ? ".,:;!?'_~" : ".,:;!?'_~)";
  let end = found.length;
  while (ends.includes(found[end - 1])) end--;
  return found.slice(0, end);
}

// What stands in parentheses behind a link's words: {address, end}, or null.
function destination(text, at) {
  if (text[at] !== "(") return null;
  const rest = text.slice(at, at + MAX_ADDRESS);
  const match = /^\(\s{0,3}(?:<([^<>\n]*)>|((?:[^\s()<>]|\([^\s()]*\))*))(?:\s{1,3}(?:"[^"]*"|'[^']*'))?\s{0,3}\)/.exec(rest);
  return match && { address: match[1] ?? match[2], end: at + match[0].length };
}

function depthOf(parts) {
  return parts.reduce((most, part) => Math.max(most, part.depth ?? 0), 0);
}

function withoutLinks(parts) {
  return parts.flatMap((part) => (part.kind === "link" ? withoutLinks(part.parts) : part.parts ? [{ ...part, parts: withoutLinks(part.parts) }] : [part]));
}

// Matches marks of emphasis; what matches nothing is text.
function emphasized(parts) {
  const out = [], open = []; // open: indexes in out of marks that may still be closed
  for (const part of parts) {
    if (part.mark === undefined) {
      out.push(part.bracket ?? part);
      continue;
    }
    const mark = { ...part };
    while (mark.closes && mark.count) {
      const i = open.findLastIndex((index) => out[index].mark === mark.mark && fits(out[index], mark));
      if (i < 0) break;
      const index = open[i], opener = out[index], used = Math.min(2, opener.count, mark.count);
      const inside = joinedText(out.slice(index + 1)), depth = 1 + depthOf(inside);
      if (depth > MAX_DEPTH) break;
      out.length = index + 1;
      open.length = i + 1;
      opener.count -= used;
      mark.count -= used;
      if (!opener.count) { out.pop(); open.pop(); }
      out.push({ kind: mark.mark === "~" ? "del" : used === 2 ? "strong" : "em", depth, parts: inside });
    }
    if (!mark.count) continue;
    if (mark.opens) open.push(out.length);
    if (open.length > MAX_OPEN) open.shift();
    out.push(mark);
  }
  return joinedText(out);
}

// CommonMark's rule of three: of marks that both open and close, lengths that add up to a multiple of three do not match.
function fits(opener, closer) {
  return !(opener.closes || closer.opens) || (opener.count + closer.count) % 3 !== 0 || (opener.count % 3 === 0 && closer.count % 3 === 0);
}

function joinedText(parts) {
  const out = [];
  for (const part of parts) {
    const text = part.mark === undefined ? part : part.mark.repeat(part.count);
    if (typeof text === "string" && typeof out.at(-1) === "string") out[out.length - 1] += text;
    else out.push(text);
  }
  return out;
}
