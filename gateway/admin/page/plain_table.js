// A table that is made once and thrown away: for windows, whose content is replaced as a whole.

import { el } from "./dom.js";

/** `columns`: [title, is it numeric, a mark as in table.js]; `rows`: cells, each text or a node. */
export function plainTable(caption, columns, rows) {
  const styled = (index) => [columns[index][1] && "numeric", columns[index][2]].filter(Boolean).join(" ") || null;
  const headers = columns.map(([title], index) => el("th", { scope: "col", class: styled(index) }, title));
  const body = rows.map((row) => el("tr", {}, ...row.map((cell, index) => el("td", { class: styled(index) }, cell))));
  const parts = [el("caption", { class: "unseen" }, caption), el("thead", {}, el("tr", {}, ...headers))];
  const table = el("table", {}, ...parts, el("tbody", {}, ...body));
  return el("div", { class: "scroller", role: "region", "aria-label": caption, tabindex: 0 }, table);
}
