// A bar for each day: the tokens that went in, and on top of them those that came out.

import { roundedUp } from "../chart.js";
import { el, setAttribute, svg } from "../dom.js";
import { compact } from "../units.js";

const HEIGHT = 150;
const MARGIN = { left: 52, right: 8, top: 8, bottom: 20 };
const WIDEST = 42; // of a bar
const LABEL = 76; // pixels that the name of a day takes, and those between two

export class Days {
  #days = [];

  constructor(root, legend) {
    this.drawing = svg("svg", { class: "days", role: "img", height: HEIGHT });
    root.append(this.drawing);
    for (const what of ["input", "output"]) legend.append(el("li", {}, el("span", { class: `key-of ${what}` }), what));
    new ResizeObserver(() => this.#draw()).observe(root);
  }

  /** `days`: [{day, input_tokens, output_tokens}], oldest first. */
  update(days) {
    this.#days = days;
    this.#draw();
  }

  #draw() {
    const width = this.drawing.clientWidth;
    if (width === 0) return;
    const most = Math.max(1, ...this.#days.map((day) => day.input_tokens + day.output_tokens));
    const [top, room] = [roundedUp(Math.max(most, 10)), (width - MARGIN.left - MARGIN.right) / (this.#days.length || 1)];
    setAttribute(this.drawing, "viewBox", `0 0 ${width} ${HEIGHT}`);
    setAttribute(this.drawing, "aria-label", this.#inWords());
    const bars = this.#days.flatMap((day, index) => bar(day, MARGIN.left + room * index, room, top));
    const every = Math.ceil(LABEL / room);
    const middles = this.#days.map(({ day }, index) => ({ day, x: MARGIN.left + (index + 0.5) * room }));
    const names = middles.filter(({ x }, index) => index % every === 0 && x + LABEL / 2 <= width).map(name);
    const levels = [0, top / 2, top].flatMap((value) => level(value, top, width));
    this.drawing.replaceChildren(...levels, ...names, ...bars);
  }

  #inWords() {
    const used = this.#days.filter((day) => day.requests);
    if (used.length === 0) return "Tokens by day: nothing was used.";
    const words = used.slice(-31).map((day) => `${day.day}: ${compact(day.input_tokens)} in, ${compact(day.output_tokens)} out`);
    return `Tokens by day. ${words.join("; ")}.`;
  }
}

function y(value, top) {
  return HEIGHT - MARGIN.bottom - (value / top) * (HEIGHT - MARGIN.top - MARGIN.bottom);
}

function bar({ day, input_tokens: input, output_tokens: output }, x, room, top) {
  const width = Math.max(1, Math.min(room * 0.8, WIDEST));
  const left = x + (room - width) / 2;
  const title = `${day}: ${compact(input)} in, ${compact(output)} out`;
  const piece = (kind, from, to) =>
    svg("rect", { class: kind, x: left, width, y: y(to, top), height: y(from, top) - y(to, top) }, svg("title", {}, title));
  return [piece("input", 0, input), piece("output", input, input + output)];
}

function name({ day, x }) {
  return svg("text", { x, y: HEIGHT - 5, "text-anchor": "middle" }, day);
}

function level(value, top, width) {
  const at = y(value, top);
  const text = svg("text", { x: MARGIN.left - 6, y: at + 3.5, "text-anchor": "end" }, compact(value));
  return [svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at }), text];
}
