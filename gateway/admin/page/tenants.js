// The table of tenants: who gets how much of the engine, who waits, who holds memory, who is refused.

import { el, setText } from "./dom.js";
import { fillSwatch, swatch } from "./slots.js";
import { Table, quantity } from "./table.js";
import { shown } from "./text.js";
import { bytes, compact, duration, percent } from "./units.js";

const MINOR = { minor: true };
const MAJOR = { major: true };

/** `open(name)` shows one of them. */
export function tenantsTable(root, slots, open) {
  return new Table(root, {
    title: "Tenants",
    columns: [
      nameColumn(slots, open),
      { ...quantity("share", "Engine", percent, { note: "share of engine time" }), make: shareCell, fill: fillShare },
      quantity("running", "Running", compact),
      quantity("waiting", "Waiting", compact),
      quantity("kv_bytes", "KV", bytes, MAJOR),
      quantity("credit_seconds", "Credit", duration, { note: "engine time it is owed; below zero: debt", ...MINOR }),
      quantity("requests", "Requests", compact, MAJOR),
      quantity("refused", "Refused", compact),
      quantity("prompt_tokens", "Prompt", compact, { note: "tokens", ...MINOR }),
      quantity("output_tokens", "Output", compact, { note: "tokens", ...MAJOR }),
    ],
    key: ({ name }) => name,
    matches: ({ name }, words) => name.toLowerCase().includes(words),
    sort: { id: "share", descending: true },
    empty: "No tenant has sent a request yet.",
  });
}

function nameColumn(slots, open) {
  const make = (current) => {
    const button = el("button", { type: "button", class: "link", click: () => open(current().name) }, el("bdi"));
    return el("div", { class: "name" }, swatch(), button);
  };
  const fill = (cell, { name }) => {
    fillSwatch(cell.firstElementChild, slots.of(name));
    setText(cell.querySelector("bdi"), shown(name));
  };
  return { id: "name", title: "Tenant", value: ({ name }) => name, make, fill, stretches: true };
}

function shareCell() {
  return el("div", { class: "share" }, el("span", { class: "track", "aria-hidden": "true" }, el("span")), el("span"));
}

function fillShare(cell, { share }) {
  cell.querySelector(".track span").style.width = `${100 * Math.min(Math.max(share ?? 0, 0), 1)}%`;
  setText(cell.lastElementChild, percent(share));
}
