// Who used how much, at what cost; and what is left of budgets.

import { el, setAttribute, setText } from "../dom.js";
import { Table, quantity } from "../table.js";
import { shown } from "../text.js";
import { compact, duration, money, percent, whole } from "../units.js";
import { tenantName as name } from "./parts.js";

const LOW = 0.1; // of a budget

export function usageTable(root) {
  return new Table(root, {
    title: "Usage",
    columns: [
      name("tenant", "Tenant", { stretches: true }),
      { id: "value", title: "Key", value: valueOf, make: () => el("bdi"), fill: fillValue, stretches: true },
      quantity("requests", "Requests", compact, { major: true }),
      quantity("input_tokens", "Input", compact, { note: "tokens" }),
      quantity("cached_tokens", "Cached", compact, { note: "of the input tokens, found in the prefix cache", minor: true }),
      quantity("output_tokens", "Output", compact, { note: "tokens" }),
      quantity("reasoning_tokens", "Reasoning", compact, { note: "of the output tokens, before the content", minor: true }),
      { id: "cost", title: "Cost", value: amount, text: ({ costs }) => costInWords(costs), numeric: true },
    ],
    key: ({ tenant, value }) => `${tenant} ${value}`,
    matches: ({ tenant, value }, words) => `${tenant ?? ""} ${value ?? ""}`.toLowerCase().includes(words),
    limit: 25,
    empty: "No use on these days.",
  });
}

export function budgetsTable(root) {
  return new Table(root, {
    title: "Budgets",
    columns: [
      { ...name("tenant", "Tenant or team", { names: true }), value: owner, fill: (cell, row) => setText(cell, owner(row)) },
      name("key", "Key", { major: true }),
      { id: "what", title: "Budget", text: ({ resource, period, soft }) => `${shown(resource, 24)} a ${shown(period, 8)}${soft ? ", soft" : ""}` },
      { id: "left", title: "Left", value: share, make: budgetCell, fill: fillBudget, numeric: true },
      { id: "amount", title: "Of", value: (row) => row.amount, text: (row) => inUnits(row.amount, row), numeric: true, major: true },
      { id: "held_back", title: "Held back", note: "for an outage of the store, or with lost replicas", text: heldBack, minor: true },
      { id: "alerts", title: "Alerts", text: ({ alerts }) => alerts.map(alertInWords).join(", "), minor: true },
      quantity("resets_in", "Full again in", (seconds) => (seconds === null ? "unknown" : duration(seconds)), { minor: true }),
    ],
    key: ({ team, tenant, key, resource, period }) => `${team} ${tenant} ${key} ${resource} ${period}`,
    matches: (row, words) => `${owner(row)} ${row.key ?? ""}`.toLowerCase().includes(words),
    empty: "The policy sets no budget, such as limits: {tokens: 10M/month, cost: 100/month}.",
  });
}

/** By currency: "1.25 EUR, 0.40 USD"; nothing without a price. Long fractions are cut, not rounded up to a cent. */
export function costInWords(costs) {
  return Object.entries(costs)
    .map(([currency, amount]) => `${Number(amount) < 1 ? Number(amount).toPrecision(3) : grouped(amount)} ${shown(currency, 8)}`)
    .join(", ");
}

function grouped(amount) {
  return Number(amount).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
}

function amount({ costs }) {
  const amounts = Object.values(costs).map(Number);
  return amounts.length ? amounts.reduce((sum, one) => sum + one, 0) : null;
}

function inUnits(number, { currency }) {
  return currency ? money(number, shown(currency, 8)) : compact(number);
}

function heldBack(row) {
  const amounts = { "set aside": row.set_aside, lost: row.lost };
  return Object.entries(amounts).filter(([, amount]) => amount).map(([what, amount]) => `${inUnits(amount, row)} ${what}`).join(", ");
}

function alertInWords({ at_percent, host, state }) {
  return `${at_percent} % to ${shown(host ?? "", 40)}${state ? ` (${shown(state, 8)})` : ""}`;
}

function owner({ team, tenant }) {
  return tenant === null ? `team ${shown(team)}` : shown(tenant);
}

function share({ left, amount: most }) {
  return left === null ? null : left / most;
}

function budgetCell() {
  return el("div", { class: "budget" }, el("span", { class: "track", "aria-hidden": "true" }, el("span")), el("span"));
}

function fillBudget(cell, row) {
  const rest = share(row);
  cell.querySelector(".track span").style.width = `${100 * Math.min(Math.max(rest ?? 0, 0), 1)}%`;
  setAttribute(cell, "class", rest !== null && rest < LOW ? "budget low" : "budget");
  setText(cell.lastElementChild, row.damaged ? "damaged" : rest === null ? "unknown" : `${row.currency ? inUnits(row.left, row) : whole(row.left)} (${percent(rest)})`);
}

function valueOf({ value }) {
  return value ?? "";
}

/** Null is use that a full ledger does not tell apart. */
function fillValue(cell, { value }) {
  setText(cell, value === null ? "all others" : value === "" ? "none" : shown(value));
  cell.classList.toggle("muted", !value);
}
