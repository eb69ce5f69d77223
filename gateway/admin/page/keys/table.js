// The table of API keys, with a way to edit, to rotate and to revoke each that is stored.

import { el, setText } from "../dom.js";
import { Table, quantity } from "../table.js";
import { shown } from "../text.js";
import { moment } from "../units.js";
import { settingsInWords } from "./settings.js";

const ORIGINS = { policy: "in a policy file", demo: "demo key", stored: "" };

/** `dialog` asks before anything is done. */
export function keysTable(root, dialog) {
  return new Table(root, {
    title: "API keys",
    columns: [
      text("id", "Key", { code: true }),
      text("tenant", "Tenant", { names: true }),
      text("name", "Name", { major: true }),
      { id: "state", title: "State", value: state, text: state, lines: true },
      { id: "settings", title: "Its own", text: ({ settings }) => settingsInWords(settings), minor: true, wide: true },
      quantity("created", "Made", moment, { numeric: false, least: true }),
      quantity("expires", "Expires", (at) => (at === null ? "never" : moment(at)), { numeric: false, minor: true }),
      { id: "scopes", title: "For", text: ({ scopes }) => shown(scopes.join(", ") || "nothing", 60), least: true },
      { id: "actions", title: "", make: (current) => buttons(current, dialog), fill: fillButtons },
    ],
    key: ({ id }) => id,
    matches: ({ id, tenant, name }, words) => `${id} ${tenant} ${name}`.toLowerCase().includes(words),
    sort: { id: "created", descending: true },
    limit: 25,
    empty: "There is no API key.",
  });
}

/** What is out of the ordinary about it. */
function state({ expired, old_until: until, origin, named, problem }) {
  const parts = [
    problem ? `refused, since ${shown(problem, 120)}` : expired ? "expired" : "valid",
    until && `its old secret is valid until ${moment(until)}`,
    ORIGINS[origin] ?? shown(origin, 24),
    !named && "the policy does not name its tenant",
  ];
  return parts.filter(Boolean).join("; ");
}

function buttons(current, dialog) {
  const button = (title, act, danger) => {
    const attributes = { type: "button", class: danger ? "danger" : null, click: () => act(current()) };
    return el("button", attributes, title);
  };
  const edit = button("Edit…", (row) => dialog.edit(row), false);
  const rotate = button("Rotate…", (row) => dialog.rotate(row), false);
  return el("div", { class: "buttons for-admins" }, edit, rotate, button("Revoke…", (row) => dialog.revoke(row), true));
}

function fillButtons(cell, { id, origin }) {
  cell.hidden = origin !== "stored";
  const [edit, rotate, revoke] = cell.children;
  edit.ariaLabel = `Edit key ${shown(id, 24)}`;
  rotate.ariaLabel = `Rotate key ${shown(id, 24)}`;
  revoke.ariaLabel = `Revoke key ${shown(id, 24)}`;
}

function text(id, title, { code, ...marks }) {
  const make = () => el(code ? "code" : "bdi");
  const fill = (cell, row) => setText(cell, row[id] === "" ? "" : shown(row[id]));
  return { id, title, value: (row) => row[id], make, fill, ...marks };
}
