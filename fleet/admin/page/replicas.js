// The table of replicas side by side, and the window that shows one with the tenants that it serves.

import { Detail, factList } from "./detail.js";
import { byId, el, setAttribute, setText } from "./dom.js";
import { plainTable } from "./plain_table.js";
import { Table, quantity } from "./table.js";
import { shown } from "./text.js";
import { age, compact, duration, number, percent, whole } from "./units.js";

const LEAST = { least: true };
const MINOR = { minor: true };
const MAJOR = { major: true };
const MOST = 50; // tenants of a window
const HERE = [["Tenant", false, "names"], ["Waiting", true], ["Work", true], ["Running", true]];

/** `open(name)` shows one of them. */
export function replicasTable(root, open) {
  return new Table(root, {
    title: "Replicas",
    columns: [
      nameColumn("Replica", open, { stretches: true }),
      conditionColumn(),
      told("running", "Running", whole, MAJOR),
      told("waiting", "Waiting", whole),
      told("work_seconds", "Work", duration, { note: "predicted engine time of all that runs and waits there" }),
      { ...told("kv_share", "KV", percent, { note: "of its KV memory, what requests hold", ...MAJOR }), ...shareCell },
      told("hit_share", "Cache hits", percent, { note: "of prompt tokens since its start, those found cached", ...MAJOR }),
      quantity("open_requests", "Open", whole, { note: "requests of this router that it has to answer", ...MINOR }),
      quantity("attempts", "Sent", compact, { note: "requests, since this router's start", ...MINOR }),
      quantity("retried", "Retried", compact, { note: "requests then sent to another replica", ...MINOR }),
      told("version", "Version", (version) => (version ? shown(version, 24) : "–"), { numeric: false, ...LEAST }),
    ],
    key: ({ name }) => name,
    matches: (row, words) => [row.name, row.condition].some((text) => text.toLowerCase().includes(words)),
    sort: { id: "name", descending: false },
    limit: 50,
    empty: "The router knows of no replica.",
  });
}

/** A column whose rows have a button with their name. */
export function nameColumn(title, open, marks) {
  const make = (current) => nameButton(() => current().name, open);
  const fill = (cell, { name }) => setText(cell.querySelector("bdi"), shown(name));
  return { id: "name", title, value: ({ name }) => name, make, fill, ...marks };
}

/** `name()` is asked for when it is pressed. */
export function nameButton(name, open) {
  const button = el("button", { type: "button", class: "link", click: () => open(name()) }, el("bdi", {}, shown(name())));
  return el("div", { class: "name" }, button);
}

/** A column of what a replica has told in its state; a dash where it is silent. */
function told(id, title, format, marks = {}) {
  const value = (row) => row.told?.[id] ?? null;
  return { ...quantity(id, title, format, marks), value, text: (row) => (row.told ? format(row.told[id]) : "–") };
}

const shareCell = {
  make: () =>
    el("div", { class: "share" }, el("span", { class: "track", "aria-hidden": "true" }, el("span")), el("span")),
  fill: (cell, row) => {
    const share = row.told?.kv_share ?? null;
    cell.querySelector(".track span").style.width = `${100 * Math.min(Math.max(share ?? 0, 0), 1)}%`;
    setText(cell.lastElementChild, percent(share));
  },
};

function conditionColumn() {
  const fill = (cell, row) => {
    setAttribute(cell, "class", `state ${row.condition}`);
    setText(cell, words(row));
  };
  return { id: "condition", title: "State", value: (row) => row.condition, make: () => el("span"), fill };
}

/** "serving", "ejected, 3 s", "silent, 12 s". */
function words({ condition, left_out_seconds, silent_seconds }) {
  if (condition === "ejected") return `ejected, ${age(left_out_seconds)}`;
  if (condition === "silent" && silent_seconds !== null) return `silent, ${age(silent_seconds)}`;
  return condition;
}

/** `openTenant(name)` shows a tenant on all replicas. */
export function replicaDetail(openTenant) {
  return new Detail(byId("replica-dialog"), "replica-title", "fleet/replicas", (row) => content(row, openTenant));
}

function content(row, openTenant) {
  const state = row.state;
  const problem = row.problem ? [el("p", { class: "problem" }, `No recent state: ${shown(row.problem, 240)}.`)] : [];
  const tenants = state ? tenantRows(state, openTenant) : [];
  const served = tenants.length
    ? plainTable("Tenants there", HERE, tenants.slice(0, MOST))
    : el("p", { class: "muted" }, state ? "Nobody has work there." : "Nothing is known of its tenants.");
  const page = el("a", { href: row.admin, rel: "noreferrer" }, "Its own admin page");
  return [...problem, factList(facts(row)), el("h3", {}, "Tenants there"), served, el("p", { class: "note" }, page)];
}

function facts(row) {
  const sent = {
    State: words(row),
    Address: shown(row.url, 80),
    "Requests sent": whole(row.attempts),
    "Then sent to another": whole(row.retried),
    "Not answered to the end": whole(row.open_requests),
    "Times left out": whole(row.ejections),
  };
  const { told, state } = row;
  if (!told) return sent;
  return {
    ...sent,
    Model: shown(told.model, 60),
    Version: shown(told.version, 24),
    Policy: shown(told.policy, 24),
    Instance: shown(told.instance, 24),
    Running: `${whole(told.running)} of ${whole(told.seats)}`,
    Waiting: whole(told.waiting),
    Work: duration(told.work_seconds),
    "Replicas wanted": number(state.replicas_wanted),
    "KV held": `${percent(told.kv_share)} of ${compact(told.kv_tokens)} tokens`,
    "KV idle, cached": `${compact(state.kv.cached)} tokens`,
    "Cache hits": percent(told.hit_share),
    "A prompt token takes": duration(state.token_seconds),
  };
}

function tenantRows({ waiting, running_by_tenant: running }, openTenant) {
  const names = [...new Set([...Object.keys(waiting), ...Object.keys(running)])];
  const rows = names.map((name) => ({ name, ...waiting[name], running: running[name] ?? 0 }));
  rows.sort((one, other) => (other.seconds ?? 0) - (one.seconds ?? 0) || other.running - one.running);
  return rows.map(({ name, requests = 0, seconds = 0, running: runs }) => [
    nameButton(() => name, openTenant),
    whole(requests),
    duration(seconds),
    whole(runs),
  ]);
}
