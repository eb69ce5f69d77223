// A bar for each day, of parts on top of each other: the tokens that went in and those that came out, or the cost.

import { levelsOf, MARGIN, roundedUp, yOf } from "../chart.js";
import { el, setAttribute, svg } from "../dom.js";

const HEIGHT = 150;
const WIDEST = 42; // of a bar
const LABEL = 76; // pixels that the name of a day takes, and those between two

export class Days {
  #days = [];

  /** `parts`: their names, which are their colours'; `format` writes an amount. */
  constructor(root, legend, title, parts, format) {
    Object.assign(this, { title, parts, format });
    this.drawing = svg("svg", { class: "days grid", role: "img", height: HEIGHT });
    root.append(this.drawing);
    for (const what of parts) legend.append(el("li", {}, el("span", { class: `key-of ${what}` }), what));
    new ResizeObserver(() => this.#draw()).observe(root);
  }

  /** `days`: [{day, and each part's amount}], oldest first. */
  update(days) {
    this.#days = days;
    this.#draw();
  }

  #draw() {
    const width = this.drawing.clientWidth;
    if (width === 0) return;
    const most = Math.max(0, ...this.#days.map((day) => this.#sum(day)));
    const [top, room] = [roundedUp(most || 10), (width - MARGIN.left - MARGIN.right) / (this.#days.length || 1)];
    setAttribute(this.drawing, "viewBox", `0 0 ${width} ${HEIGHT}`);
    setAttribute(this.drawing, "aria-label", this.#inWords());
    const bars = this.#days.flatMap((day, index) => this.#bar(day, MARGIN.left + room * index, room, top));
    const every = Math.ceil(LABEL / room);
    const middles = this.#days.map(({ day }, index) => ({ day, x: MARGIN.left + (index + 0.5) * room }));
    const names = middles.filter(({ x }, index) => index % every === 0 && x + LABEL / 2 <= width).map(name);
    this.drawing.replaceChildren(...levelsOf(top, width, HEIGHT, this.format), ...names, ...bars);
  }

  #inWords() {
    const used = this.#days.filter((day) => this.#sum(day) > 0);
    if (used.length === 0) return `${this.title}: none.`;
    return `${this.title}. ${used.slice(-31).map((day) => this.#told(day)).join("; ")}.`;
  }

  #sum(day) {
    return this.parts.reduce((sum, part) => sum + day[part], 0);
  }

  #told(day) {
    return `${day.day}: ${this.parts.map((part) => `${this.format(day[part])} ${part}`).join(", ")}`;
  }

  #bar(day, x, room, top) {
    const width = Math.max(1, Math.min(room * 0.8, WIDEST));
    const left = x + (room - width) / 2;
    let from = 0;
    return this.parts.map((part) => {
      const [y, bottom] = [yOf(from + day[part], top, HEIGHT), yOf(from, top, HEIGHT)];
      from += day[part];
      return svg("rect", { class: part, x: left, width, y, height: bottom - y }, svg("title", {}, this.#told(day)));
    });
  }
}

function name({ day, x }) {
  return svg("text", { x, y: HEIGHT - 5, "text-anchor": "middle" }, day);
}
