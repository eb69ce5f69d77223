// What the parts of the view of usage have in common.

import { el, setText } from "../dom.js";
import { shown } from "../text.js";

export function gauge() {
  return el("div", { class: "panel gauge" }, el("dt"), el("dd", {}, el("b")));
}

/** A column of names, which clients may have chosen. */
export function tenantName(id, title, marks) {
  const fill = (cell, row) => setText(cell, row[id] === null ? "" : shown(row[id]));
  return { id, title, value: (row) => row[id] ?? "", make: () => el("bdi"), fill, ...marks };
}
