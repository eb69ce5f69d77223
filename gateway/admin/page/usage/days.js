// A bar for each day: the tokens that went in, and on top of them those that came out.

import { levelsOf, MARGIN, roundedUp, yOf } from "../chart.js";
import { el, setAttribute, svg } from "../dom.js";
import { compact } from "../units.js";

const HEIGHT = 150;
const WIDEST = 42; // of a bar
const LABEL = 76; // pixels that the name of a day takes, and those between two

export class Days {
  #days = [];

  constructor(root, legend) {
    this.drawing = svg("svg", { class: "days grid", role: "img", height: HEIGHT });
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
    this.drawing.replaceChildren(...levelsOf(top, width, HEIGHT, compact), ...names, ...bars);
  }

  #inWords() {
    const used = this.#days.filter((day) => day.requests);
    if (used.length === 0) return "Tokens by day: none.";
    const words = used.slice(-31).map((day) => `${day.day}: ${compact(day.input_tokens)} in, ${compact(day.output_tokens)} out`);
    return `Tokens by day. ${words.join("; ")}.`;
  }
}

function bar({ day, input_tokens: input, output_tokens: output }, x, room, top) {
  const width = Math.max(1, Math.min(room * 0.8, WIDEST));
  const left = x + (room - width) / 2;
  const title = `${day}: ${compact(input)} in, ${compact(output)} out`;
  const piece = (kind, from, to) => {
    const [y, bottom] = [yOf(to, top, HEIGHT), yOf(from, top, HEIGHT)];
    return svg("rect", { class: kind, x: left, width, y, height: bottom - y }, svg("title", {}, title));
  };
  return [piece("input", 0, input), piece("output", input, input + output)];
}

function name({ day, x }) {
  return svg("text", { x, y: HEIGHT - 5, "text-anchor": "middle" }, day);
}
