// A small line chart as SVG: a history of one or two series, with its last values as text beside it.

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 300, HEIGHT = 100;

function node(parent, name, attributes = {}, text = "") {
  const made = parent.namespaceURI === NS || name === "svg" ? document.createElementNS(NS, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  parent.append(made);
  return made;
}

// A round number that is at least `most`, for the top of the chart.
export function roundUp(most) {
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((m) => m * power).find((bound) => bound >= most * (1 - 1e-9));
}

// Points of a line as SVG wants them, the newest at the right end; gaps (null) split it.
export function lines(values, top, length) {
  const found = [];
  let current = [];
  const close = () => {
    if (current.length === 1) current.push(current[0]);
    if (current.length) found.push(current.join(" "));
    current = [];
  };
  values.forEach((value, i) => {
    if (value === null) return close();
    const x = WIDTH * (1 - (values.length - 1 - i) / (length - 1));
    current.push(`${x.toFixed(1)},${(HEIGHT * (1 - Math.min(value / top, 1))).toFixed(1)}`);
  });
  close();
  return found;
}

export class Chart {
  // series: [{label, format: number => text}]; top: of the scale, null to fit the values; length: points kept.
  constructor(parent, { title, series, top = null, length = 90 }) {
    this.title = title;
    this.series = series;
    this.top = top;
    this.length = length;
    this.values = series.map(() => []);
    const figure = node(parent, "figure");
    const caption = node(figure, "figcaption");
    node(caption, "strong", {}, title);
    this.scale = node(caption, "span", { class: "scale", "aria-hidden": "true" });
    this.texts = series.map((one, i) => {
      const line = node(caption, "span", { class: "value" });
      node(line, "span", { class: `key series-${i}`, "aria-hidden": "true" });
      node(line, "span", {}, `${one.label}: `);
      return node(line, "output", { "aria-live": "off" }, "–");
    });
    this.svg = node(figure, "svg", {
      class: "chart", role: "img", viewBox: `0 -4 ${WIDTH} ${HEIGHT + 8}`, preserveAspectRatio: "none", "aria-label": title,
    });
  }

  // values: a number or null (unknown) for each series.
  add(values) {
    values.forEach((value, i) => {
      this.values[i].push(value);
      if (this.values[i].length > this.length) this.values[i].shift();
      this.texts[i].textContent = value === null ? "–" : this.series[i].format(value);
    });
    this.draw();
  }

  // Adds a point without a value to each series.
  addGap() {
    this.add(this.series.map(() => null));
  }

  draw() {
    const top = this.top ?? roundUp(Math.max(0, ...this.values.flat().filter((value) => value !== null)));
    this.svg.replaceChildren();
    for (const part of [0, 0.5, 1]) {
      node(this.svg, "line", { class: "grid-line", x1: 0, x2: WIDTH, y1: HEIGHT * part, y2: HEIGHT * part });
    }
    this.values.forEach((values, i) => {
      for (const points of lines(values, top, this.length)) node(this.svg, "polyline", { class: `series-${i}`, points });
    });
    this.scale.textContent = `to ${this.series[0].format(top)}`;
    const now = this.series.map((one, i) => `${one.label} ${this.texts[i].textContent}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}: ${now}. Top of the scale: ${this.series[0].format(top)}.`);
  }
}
