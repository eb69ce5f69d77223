// The audit log: who changed what, as it was written before it was done.

import { Table, quantity } from "../table.js";
import { shown } from "../text.js";
import { moment } from "../units.js";

export function auditTable(root) {
  return new Table(root, {
    title: "Audit log",
    columns: [
      quantity("at", "At", moment, { numeric: false }),
      text("action", "What", {}),
      text("target", "To what", { lines: true }),
      text("result", "Result", { wide: true, major: true }),
      text("actor", "Who", { minor: true, lines: true }),
    ],
    key: ({ at, action, target, result }) => `${at} ${action} ${target} ${result}`,
    matches: (entry, words) => Object.values(entry).join(" ").toLowerCase().includes(words),
    sort: { id: "at", descending: true },
    empty: "No change yet.",
  });
}

function text(id, title, marks) {
  return { id, title, value: (row) => row[id] ?? "", text: (row) => shown(row[id] ?? "", 200), ...marks };
}
