// What an edit changes: lines as `sluice policy diff` prints them, in which the old and the new are told apart.

import { el } from "../dom.js";
import { shown } from "../text.js";

const MOST = 200; // characters of a line

/** `lines`: a heading for everyone whom it concerns, and an indented line for each change. */
export function diff(lines, truncated = 0) {
  const items = lines.map(item);
  if (truncated > 0) items.push(el("li", {}, `and ${truncated.toLocaleString("en")} more`));
  return el("ul", { class: "diff" }, ...items);
}

function item(line) {
  if (!line.startsWith("  ")) return el("li", { class: "whom" }, shown(line, MOST));
  const [, field, before, after] = /^ {2}(.*?): (.*) -> (.*)$/s.exec(line) ?? [];
  if (field === undefined) return el("li", {}, shown(line.trim(), MOST));
  const values = [el("del", {}, shown(before, MOST)), " → ", el("ins", {}, shown(after, MOST))];
  return el("li", {}, `${shown(field, MOST)}: `, ...values);
}
