// The table of refusals: who was turned away, and why.

import { idColumn, tenantColumn } from "./requests.js";
import { Table, quantity } from "./table.js";
import { shown } from "./text.js";
import { moment } from "./units.js";

/** `open(row)` shows the request's timeline. */
export function refusalsTable(root, open) {
  return new Table(root, {
    title: "Refusals",
    columns: [
      quantity("at", "At", moment, { numeric: false }),
      tenantColumn(),
      quantity("status", "Status", String, { major: true }),
      { id: "reason", title: "Reason", value: cause, text: (row) => shown(cause(row), 48), lines: true },
      { id: "message", title: "Message", text: ({ message }) => shown(message, 240), major: true, wide: true },
      idColumn(open, { minor: true }),
    ],
    key: ({ id, at }) => `${id} ${at}`,
    matches,
    sort: { id: "at", descending: true },
    limit: 8,
    empty: "Nothing was refused.",
  });
}

function cause({ reason, code }) {
  return reason ?? code ?? "";
}

function matches({ id, tenant, code, reason, message }, words) {
  return [id, tenant, code, reason, message].some((text) => text?.toLowerCase().includes(words));
}
