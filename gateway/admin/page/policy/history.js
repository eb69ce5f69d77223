// The editions of the policy: when each took effect, and what it changed.

import { byId, el } from "../dom.js";
import { plainTable } from "../plain_table.js";
import { counted, shown } from "../text.js";
import { moment } from "../units.js";
import { diff } from "./diff.js";

/**
 * `history` newest first, the oldest being what the gateway started with. What is unfolded stays so. `edits` made from
 * here can be undone, by `undo(edit)`.
 */
export function showHistory(history, edits, undo) {
  const root = byId("policy-history");
  const unfolded = new Set([...root.querySelectorAll("[open]")].map(({ dataset }) => dataset.edition));
  const list = el("div", { class: "editions" }, ...history.map((edition, index) => entry(edition, index, history)));
  for (const details of list.children) details.open = unfolded.has(details.dataset.edition);
  root.replaceChildren(list, ...(edits.length ? [undoable(edits, undo)] : []));
}

function undoable(edits, undo) {
  const rows = edits.map(({ edit, at, actor, file, tenant }) => {
    const button = el("button", { type: "button", class: "for-admins", click: () => undo(edit) }, `Undo edit ${edit}`);
    return [moment(at), shown(tenant ?? file, 120), shown(actor, 80), button];
  });
  const heading = el("h3", {}, "Edits made here");
  return el("div", {}, heading, plainTable("Edits made here", [["At"], ["Of"], ["By"], [""]], rows));
}

function entry({ version, at, changes }, index, history) {
  const isFirst = index === history.length - 1 && changes.length === 0;
  const what = isFirst ? "what the gateway started with" : counted(changes.filter((line) => line.startsWith(" ")).length, "change");
  const now = index === 0 ? [el("b", {}, "in force")] : [];
  const parts = [el("span", {}, moment(at)), el("code", {}, shown(version, 24)), el("span", {}, what), ...now];
  const body = changes.length ? diff(changes) : el("p", { class: "muted" }, "Nothing to compare it with.");
  return el("details", { "data-edition": `${version} ${at}` }, el("summary", {}, ...parts), body);
}
