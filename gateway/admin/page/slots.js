// Which tenants have a colour and a pattern of their own; the rest share the neutral one.

import { setAttribute, svg } from "./dom.js";

const NUM_SLOTS = 8;
export const OTHERS = "others";
export const FREE = "free";
const LOYALTY = 12; // a tenant keeps its slot while it is among this many of the largest

/** The strokes over each slot's colour in a tile of 6 by 6: told apart without seeing colour. */
const PATTERNS = [
  "",
  "M0 6L6 0M-1 1L1 -1M5 7L7 5",
  "M0 3H6",
  "M3 0V6",
  "M0 0L6 6M-1 5L1 7M5 -1L7 1",
  "M0 3H6M3 0V6",
  "M1.5 1.5h.1M4.5 4.5h.1",
  "M0 0L6 6M0 6L6 0",
];

export class Slots {
  #holders = new Array(NUM_SLOTS).fill(null);

  /** `tenants` by rank: the first ones get the vacant slots. */
  assign(tenants) {
    const loyal = new Set(tenants.slice(0, LOYALTY));
    this.#holders = this.#holders.map((holder) => (loyal.has(holder) ? holder : null));
    for (const tenant of tenants.slice(0, NUM_SLOTS)) {
      const vacant = this.#holders.indexOf(null);
      if (vacant >= 0 && !this.#holders.includes(tenant)) this.#holders[vacant] = tenant;
    }
  }

  /** 1 to NUM_SLOTS, or OTHERS. */
  of(tenant) {
    const slot = this.#holders.indexOf(tenant);
    return slot < 0 ? OTHERS : slot + 1;
  }
}

/** A small square in the slot's colour and pattern. */
export function swatch() {
  return svg(
    "svg",
    { class: "swatch", width: 12, height: 12, "aria-hidden": "true" },
    svg("rect", { width: 12, height: 12 }),
  );
}

export function fillSwatch(square, slot) {
  setAttribute(square.firstElementChild, "fill", paint(slot));
}

export function paint(slot) {
  return slot === FREE ? "var(--slot-free)" : `url(#slot-${slot})`;
}

/** What `paint` refers to; colours come from colours.css. */
export function patterns() {
  const named = [...PATTERNS.map((strokes, index) => [index + 1, strokes]), [OTHERS, ""]];
  const tiles = named.map(([name, strokes]) =>
    svg(
      "pattern",
      { id: `slot-${name}`, width: 6, height: 6, patternUnits: "userSpaceOnUse" },
      svg("rect", { width: 6, height: 6, class: `slot-${name}` }),
      svg("path", { d: strokes, class: "strokes" }),
    ),
  );
  return svg("svg", { class: "patterns", width: 0, height: 0, "aria-hidden": "true" }, svg("defs", {}, ...tiles));
}
