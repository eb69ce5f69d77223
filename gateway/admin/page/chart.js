// A line chart of the last minutes, drawn as SVG: axes with units, a legend with figures, a description in words.

import { announce, el, fillChildren, setAttribute, setText, svg } from "./dom.js";
import { shown } from "./text.js";
import { duration } from "./units.js";

const HEIGHT = 124;
export const MARGIN = { left: 52, right: 8, top: 8, bottom: 20 };
export const SPAN = 300; // seconds across
const RECENT = 10; // seconds the figures of the legend are of
const NUM_STYLES = 6; // of lines, in style.css

/**
 * `figure`: the "mean" of the last seconds, or the "last" of them; the axis ends at `top`, or not below `least`; with
 * `band` what is between the first two lines is filled.
 */
export class Chart {
  #lines = [];
  #width = 0;

  constructor(title, format, cursor, { figure = "mean", least = 1, top = null, band = false } = {}) {
    Object.assign(this, { title, format, cursor, figure, least, top });
    this.band = band ? svg("path", { class: "band" }) : null;
    this.grid = svg("g", { class: "grid" });
    this.paths = svg("g");
    this.pointer = svg("line", { class: "pointer", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
    this.drawing = svg(
      "svg",
      { role: "img", tabindex: 0, height: HEIGHT, ...this.#listeners() },
      this.grid,
      ...(this.band ? [this.band] : []),
      this.paths,
      this.pointer,
    );
    this.legend = el("ul", { class: "legend" });
    this.element = el(
      "figure",
      { class: "panel chart", "aria-label": title },
      el("figcaption", {}, el("h3", {}, title), this.legend),
      this.drawing,
    );
    cursor.onMove(() => this.#read());
    new ResizeObserver(() => this.#draw()).observe(this.element);
  }

  /**
   * `lines`: [{label, points, style, offScale}], one point a second, oldest first, null where there was nothing; what is
   * off the scale of the others runs along its top.
   */
  update(lines) {
    this.#lines = lines;
    this.#draw();
  }

  #draw() {
    this.#width = this.drawing.clientWidth;
    if (this.#width === 0) return;
    const top = this.top ?? this.#roundTop();
    setAttribute(this.drawing, "viewBox", `0 0 ${this.#width} ${HEIGHT}`);
    this.#drawGrid(top);
    this.#drawLines(top);
    setAttribute(this.drawing, "aria-label", this.#inWords());
    this.#read();
  }

  #roundTop() {
    const most = (lines) => Math.max(0, ...lines.flatMap(({ points }) => points));
    const scale = most(this.#lines.filter(({ offScale }) => !offScale));
    return roundedUp(Math.max(this.least, scale || most(this.#lines)));
  }

  #drawGrid(top) {
    const minutes = this.#width < 300 ? [4, 2, 0] : [5, 4, 3, 2, 1, 0];
    const levels = levelsOf(top, this.#width, HEIGHT, this.format);
    this.grid.replaceChildren(...levels, ...minutes.map((ago) => this.#minute(ago)));
  }

  #minute(ago) {
    const place = { x: this.#x(60 * ago), y: HEIGHT - 5, "text-anchor": ago ? "middle" : "end" };
    return svg("text", place, ago ? `−${ago} min` : "now");
  }

  #drawLines(top) {
    const make = () => svg("path");
    fillChildren(this.paths, this.#lines, make, (path, line) => {
      setAttribute(path, "class", `line line-${this.#style(line)}`);
      setAttribute(path, "d", this.#path(line.points, top));
    });
    if (this.band) setAttribute(this.band, "d", this.#area(top));
  }

  /** Between the first two lines: a box for each second in which both are known. */
  #area(top) {
    const [low = [], high = []] = this.#lines.map(({ points }) => points);
    const width = this.#x(0) - this.#x(1);
    let area = "";
    low.forEach((value, index) => {
      if (value === null || high[index] === null) return;
      const [x, y] = [this.#x(low.length - 0.5 - index), this.#y(high[index], top)];
      area += `M${x.toFixed(1)} ${y.toFixed(1)}h${width.toFixed(2)}V${this.#y(value, top).toFixed(1)}h${-width.toFixed(2)}z`;
    });
    return area;
  }

  #path(points, top) {
    let path = "";
    let drawing = false;
    points.forEach((point, index) => {
      const x = this.#x(points.length - 1 - index);
      if (point !== null) path += `${drawing ? "L" : "M"}${x.toFixed(1)} ${this.#y(point, top).toFixed(1)}h0`;
      drawing = point !== null;
    });
    return path;
  }

  #x(ago) {
    return this.#width - MARGIN.right - (ago / SPAN) * (this.#width - MARGIN.left - MARGIN.right);
  }

  #y(value, top) {
    return yOf(value, top, HEIGHT);
  }

  #style(line) {
    return line.style ?? 1 + (this.#lines.indexOf(line) % NUM_STYLES);
  }

  /** The legend's figures: of the second pointed at, else of the last ones. */
  #read() {
    const { ago } = this.cursor;
    setAttribute(this.pointer, "class", ago === null ? "pointer away" : "pointer");
    if (ago !== null && this.#width)
      for (const end of ["x1", "x2"]) setAttribute(this.pointer, end, this.#x(ago).toFixed(1));
    fillChildren(this.legend, this.#lines, legendEntry, (entry, line) => {
      setAttribute(entry.querySelector("path"), "class", `line line-${this.#style(line)}`);
      setText(entry.querySelector("bdi"), shown(line.label, 24));
      setText(entry.querySelector("b"), this.format(this.#figure(line.points)));
    });
  }

  #figure(points) {
    if (this.cursor.ago !== null) return points[points.length - 1 - this.cursor.ago] ?? null;
    const recent = points.slice(-RECENT).filter((point) => point !== null);
    if (recent.length === 0) return null;
    return this.figure === "last" ? recent.at(-1) : recent.reduce((sum, point) => sum + point, 0) / recent.length;
  }

  #inWords() {
    const sentences = this.#lines.map(({ label, points }) => {
      const values = points.filter((point) => point !== null);
      if (values.length === 0) return `${shown(label, 24)}: nothing.`;
      const [least, most] = [Math.min(...values), Math.max(...values)].map((value) => this.format(value));
      return `${shown(label, 24)}: ${this.format(values.at(-1))} last, from ${least} to ${most}.`;
    });
    return `${this.title}, last five minutes. ${sentences.join(" ")}`;
  }

  #listeners() {
    return {
      pointermove: (event) => this.cursor.moveTo(this.#agoAt(event.offsetX)),
      pointerleave: () => this.cursor.moveTo(null),
      blur: () => this.cursor.moveTo(null),
      keydown: (event) => this.#keyed(event),
    };
  }

  #agoAt(x) {
    const inside = this.#width - MARGIN.left - MARGIN.right;
    return Math.round(((this.#width - MARGIN.right - x) / inside) * SPAN);
  }

  #keyed(event) {
    const step = { ArrowLeft: 1, ArrowRight: -1, PageUp: 30, PageDown: -30 }[event.key];
    if (event.key === "Escape") this.cursor.moveTo(null);
    if (step === undefined) return;
    event.preventDefault();
    this.cursor.moveTo((this.cursor.ago ?? 0) + step);
    const values = this.#lines.map(({ label, points }) => `${shown(label, 24)} ${this.format(this.#figure(points))}`);
    announce(`${duration(this.cursor.ago)} ago: ${values.join(", ")}`);
  }
}

/** Where a value is in a drawing of that height; what is above the top runs along it. */
export function yOf(value, top, height) {
  return height - MARGIN.bottom - (Math.min(value, top) / top) * (height - MARGIN.top - MARGIN.bottom);
}

/** The lines at 0, half of `top` and `top`, each with its value. */
export function levelsOf(top, width, height, format) {
  return [0, top / 2, top].flatMap((value) => {
    const y = yOf(value, top, height);
    return [
      svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }),
      svg("text", { x: MARGIN.left - 6, y: y + 3.5, "text-anchor": "end" }, format(value, top)),
    ];
  });
}

function legendEntry() {
  const sample = svg(
    "svg",
    { class: "sample", width: 20, height: 8, "aria-hidden": "true" },
    svg("path", { d: "M1 4H19" }),
  );
  return el("li", {}, sample, el("bdi"), " ", el("b"));
}

/** The least 1, 2, 4, 6, 8 times a power of ten that is not below it: its half is as round. */
export function roundedUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((times) => times * power).find((top) => top >= value * (1 - 1e-9));
}
