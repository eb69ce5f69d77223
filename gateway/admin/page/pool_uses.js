// What a block of the KV pool is used for, as a shape that needs no colour: a full square, one without a corner, a small
// one, a diamond.

import { svg } from "./dom.js";

export const HELD = 0;
export const SHARED = 1;
export const IDLE = 2;
export const PINNED = 3;

/** By number, as the API gives them: a name, and words for what it means. */
export const USES = [
  { name: "held", words: "held by one sequence" },
  { name: "shared", words: "shared by several sequences" },
  { name: "idle", words: "idle, and cached for prompts with the same beginning" },
  { name: "pinned", words: "idle, and pinned by the policy" },
];

/** The path of a square of that use, whose side is `side` and whose corner is at x and y. */
export function shape(use, x, y, side) {
  switch (use) {
    case SHARED: {
      const cut = Math.ceil(side / 2);
      return `M${x} ${y}h${side - cut}l${cut} ${cut}v${side - cut}h${-side}z`;
    }
    case PINNED: {
      const half = side / 2;
      return `M${x + half} ${y}l${half} ${half}l${-half} ${half}l${-half} ${-half}z`;
    }
    case IDLE: {
      const inset = side / 4;
      return `M${x + inset} ${y + inset}h${side / 2}v${side / 2}h${-side / 2}z`;
    }
    default:
      return `M${x} ${y}h${side}v${side}h${-side}z`;
  }
}

/** A swatch of that use in no tenant's colour; null: an outline, for what is not in the pool. */
export function useSwatch({ use }) {
  return svg(
    "svg",
    { class: "swatch use", width: 12, height: 12, "aria-hidden": "true" },
    use === null ? svg("path", { d: "M1 1h10v10h-10z", class: "outline" }) : svg("path", { d: shape(use, 0, 0, 12) }),
  );
}
