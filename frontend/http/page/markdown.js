// Markdown's blocks: text becomes a tree of plain objects. Pure: no DOM. The time is linear in the text's length.
//
// Blocks: {kind: "paragraph" | "heading" | "code" | "rule" | "quote" | "list" | "item" | "table" | "row", start, ...}, where start is
// the index of the block's first line. HTML is text. Differences from CommonMark: a list in a list may be indented by two
// columns under a number too, and there are no definitions of links, which would change text that stands above them.

const MAX_DEPTH = 12; // of blocks in blocks; deeper ones are paragraphs
const MAX_COLUMNS = 64; // of a table

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const QUOTE = /^ {0,3}> ?/;
const MARKER = /^( {0,3})([-*+]|(\d{1,9})[.)])(?=[ \t]|$)/;
const COLUMN = /^:?-+:?$/;

// text: lines that end with "\n".
export function parse(text) {
  return blocks(text.split("\n").map(withoutTabs), 0);
}

function withoutTabs(line) {
  return line.replace(/^[ \t]+/, (indent) => indent.replaceAll("\t", "    "));
}

function blocks(lines, depth) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (isBlank(lines[at])) { at++; continue; }
    const [block, next] = fence(lines, at) ?? heading(lines, at) ?? rule(lines, at) ?? indented(lines, at)
      ?? (depth < MAX_DEPTH ? quote(lines, at, depth) ?? list(lines, at, depth) : null) ?? table(lines, at) ?? paragraph(lines, at, depth);
    block.start = at;
    found.push(block);
    at = next;
  }
  return found;
}

function fence(lines, at) {
  const mark = FENCE.exec(lines[at])?.[1];
  if (!mark) return null;
  const indent = indentOf(lines[at]), info = lines[at].slice(indent + mark.length).trim();
  if (mark[0] === "`" && info.includes("`")) return null;
  const code = [];
  let next = at + 1;
  for (; next < lines.length; next++) {
    const line = lines[next].trim();
    if (line.length >= mark.length && indentOf(lines[next]) < 4 && line === mark[0].repeat(line.length)) {
      next++;
      break;
    }
    code.push(lines[next].slice(Math.min(indent, indentOf(lines[next]))));
  }
  return [{ kind: "code", language: info.split(/\s/, 1)[0].slice(0, 30), text: code.join("\n") }, next];
}

function heading(lines, at) {
  const match = HEADING.exec(lines[at]);
  if (!match) return null;
  const words = lines[at].slice(match[0].length).trim();
  let end = words.length;
  while (words[end - 1] === "#") end--;
  const closed = end === 0 || words[end - 1] === " ";
  return [{ kind: "heading", level: match[1].length, text: (closed ? words.slice(0, end) : words).trim() }, at + 1];
}

function rule(lines, at) {
  return isRule(lines[at]) ? [{ kind: "rule" }, at + 1] : null;
}

function isRule(line) {
  const marks = line.replace(/[ \t]/g, "");
  return indentOf(line) < 4 && marks.length > 2 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length);
}

function indented(lines, at) {
  if (indentOf(lines[at]) < 4) return null;
  let next = at, end = at;
  for (; next < lines.length && (isBlank(lines[next]) || indentOf(lines[next]) >= 4); next++) if (!isBlank(lines[next])) end = next + 1;
  return [{ kind: "code", language: "", text: lines.slice(at, end).map((line) => line.slice(4)).join("\n") }, next];
}

function quote(lines, at, depth) {
  let next = at;
  while (next < lines.length && QUOTE.test(lines[next])) next++;
  if (next === at) return null;
  return [{ kind: "quote", blocks: blocks(lines.slice(at, next).map((line) => line.replace(QUOTE, "")), depth + 1) }, next];
}

function list(lines, at, depth) {
  const first = MARKER.exec(lines[at]);
  if (!first) return null;
  const type = first[2].at(-1), items = [];
  let next = at;
  for (;;) {
    const match = next < lines.length && !isRule(lines[next]) ? MARKER.exec(lines[next]) : null;
    if (match?.[2].at(-1) !== type) break;
    const [item, after] = listItem(lines, next, match, depth);
    items.push({ ...item, start: next });
    next = after;
  }
  return [{ kind: "list", ordered: first[3] !== undefined, number: Number(first[3] ?? 1), blocks: items }, next];
}

function listItem(lines, at, match, depth) {
  const rest = lines[at].slice(match[0].length), spaces = indentOf(rest);
  const width = match[0].length + (spaces > 4 || isBlank(rest) ? 1 : spaces); // of the marker, to where the text begins
  const needed = Math.min(width, match[1].length + 2);
  const own = [lines[at].slice(width)];
  let next = at + 1, fenced = FENCE.test(own[0]), indent = 0; // of the lines below the first, as its second line has it
  for (; next < lines.length; next++) {
    const line = lines[next], blank = isBlank(line), inside = indentOf(line) >= needed;
    if (blank && (next + 1 >= lines.length || !(isBlank(lines[next + 1]) || indentOf(lines[next + 1]) >= needed))) {
      const marker = MARKER.exec(lines[next + 1] ?? "");
      if (!marker || marker[2].at(-1) !== match[2].at(-1)) break;
    }
    if (!blank && !inside && (fenced || isBlank(lines[next - 1]) || MARKER.test(line) || interrupts(lines, next))) break;
    if (inside && !blank) indent ||= Math.min(width, indentOf(line));
    const text = line.slice(Math.min(indent || width, indentOf(line)));
    if (FENCE.test(text)) fenced = !fenced;
    own.push(text);
  }
  return [{ kind: "item", blocks: blocks(own.map(withTask), depth + 1) }, next];
}

function withTask(line, i) {
  return i ? line : line.replace(/^\[( |x|X)\](?= )/, (_, mark) => (mark === " " ? "☐" : "☑"));
}

function table(lines, at) {
  const columns = columnsOf(lines, at);
  if (!columns) return null;
  let next = at + 2;
  const rows = [];
  for (; next < lines.length && !isBlank(lines[next]) && !interrupts(lines, next); next++) {
    rows.push({ kind: "row", start: next, text: lines[next], columns, cells: cells(lines[next], columns.length) });
  }
  return [{ kind: "table", head: lines[at] + lines[at + 1], cells: cells(lines[at], columns.length), columns, blocks: rows }, next];
}

// The alignments of a table that begins here, or null.
function columnsOf(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return null;
  const marks = cells(lines[at + 1]);
  if (!marks.every((mark) => COLUMN.test(mark)) || marks.length !== cells(lines[at]).length || !/[|:]/.test(lines[at + 1])) return null;
  return marks.slice(0, MAX_COLUMNS).map((mark) => (mark.endsWith(":") ? (mark[0] === ":" ? "center" : "right") : "left"));
}

function cells(line, most = Infinity) {
  let text = line.trim();
  if (text[0] === "|") text = text.slice(1);
  if (text.endsWith("|") && !text.endsWith("\\|")) text = text.slice(0, -1);
  return text.split(/(?<!\\)\|/).slice(0, most).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function paragraph(lines, at, depth) {
  let next = at + 1;
  for (; next < lines.length && !isBlank(lines[next]); next++) {
    const level = /^ {0,3}(?:={3,}|-{3,})[ \t]*$/.test(lines[next]) ? (lines[next].trim()[0] === "=" ? 1 : 2) : 0;
    if (level) return [{ kind: "heading", level, text: joined(lines, at, next) }, next + 1];
    if (interrupts(lines, next, depth)) break;
  }
  return [{ kind: "paragraph", text: joined(lines, at, next) }, next];
}

function joined(lines, at, next) {
  return lines.slice(at, next).map((line) => line.trimStart()).join("\n").trimEnd();
}

// Whether this line ends a paragraph above it.
function interrupts(lines, at, depth = 0) {
  const line = lines[at];
  if (FENCE.test(line) || HEADING.test(line) || isRule(line) || columnsOf(lines, at)) return true;
  if (depth >= MAX_DEPTH) return false;
  const marker = MARKER.exec(line);
  return QUOTE.test(line) || (marker !== null && marker[0].length < line.trimEnd().length && (marker[3] ?? "1") === "1");
}

function isBlank(line) {
  return line.trim() === "";
}

function indentOf(line) {
  let indent = 0;
  while (line[indent] === " ") indent++;
  return indent;
}
