// The tables of requests: those being served, with a way to end them, and those that have ended.

import { el, setAttribute, setText } from "./dom.js";
import { Table, quantity } from "./table.js";
import { shortId, shown } from "./text.js";
import { age, duration, moment, whole } from "./units.js";

const STATES = ["reading", "reserving", "waiting", "prefill", "decoding", "ending"];
const LEAST = { least: true };
const MINOR = { minor: true };
const MAJOR = { major: true };

/** `open(row)` shows a request's timeline, `cancel(row)` asks whether to end it. */
export function liveTable(root, open, cancel) {
  return new Table(root, {
    title: "Live requests",
    columns: [
      idColumn(open),
      tenantColumn(),
      {
        id: "class",
        title: "Class",
        value: (row) => row.class ?? "",
        text: (row) => shown(row.class, 24),
        ...LEAST,
      },
      { id: "state", title: "State", value: ({ state }) => state, make: () => el("span"), fill: fillState },
      quantity("age", "Age", age),
      { ...quantity("prompt_tokens", "Prompt", whole, { note: "tokens, and those found in the cache", ...LEAST }), text: prompt },
      { ...quantity("output_tokens", "Output", whole, { note: "tokens made, of at most", ...MINOR }), text: output },
      quantity("kv_blocks", "KV blocks", whole, LEAST),
      quantity("preemptions", "Preempted", whole, LEAST),
      { id: "reason", title: "Reason", text: ({ reason }) => (reason ? shown(reason, 160) : ""), wide: true, ...MAJOR },
      { id: "cancel", title: "", ...MAJOR, make: (current) => cancelButton(current, cancel), fill: () => {} },
    ],
    key: address,
    matches,
    sort: { id: "age", descending: true },
    empty: "No request is live.",
  });
}

/** `open(row)` as above; `options` are the table's. */
export function recentTable(root, open, options = {}) {
  return new Table(root, {
    title: "Ended requests",
    columns: [
      idColumn(open),
      tenantColumn(),
      { id: "outcome", title: "Outcome", value: (row) => row.outcome ?? "", text: outcome, names: true },
      quantity("ended", "Ended", moment),
      quantity("duration", "Took", duration, MAJOR),
      quantity("queue_seconds", "Queued", duration, LEAST),
      quantity("ttft", "First token", duration, MAJOR),
      quantity("prompt_tokens", "Prompt", whole, { note: "tokens", ...LEAST }),
      quantity("output_tokens", "Output", whole, { note: "tokens", ...MINOR }),
      quantity("preemptions", "Preempted", whole, LEAST),
    ],
    key: (row) => `${address(row)} ${row.ended}`,
    matches,
    sort: { id: "ended", descending: true },
    empty: "No request has ended yet.",
    ...options,
  });
}

export function idColumn(open, marks = {}) {
  return { id: "id", title: "Request", make: (current) => idButton(current, open), fill: () => {}, ...marks };
}

export function tenantColumn() {
  const fill = (name, { tenant }) => setText(name, tenant === null ? "–" : shown(tenant));
  return { id: "tenant", title: "Tenant", value: ({ tenant }) => tenant ?? "", make: () => el("bdi"), fill, names: true };
}

/** A button that opens a request's timeline; `current()` is its row as it is now. */
export function idButton(current, open) {
  const { id } = current();
  const attributes = { type: "button", class: "link id", title: shown(id, 128), click: () => open(current()) };
  return el("button", attributes, shortId(id));
}

/** What the API knows exactly this one by: clients choose request ids, and may choose one twice. */
export function address({ id, response_id }) {
  return response_id ?? id;
}

/** How a request ended, in short. */
export function outcome({ outcome, status, code }) {
  const parts = [outcome, status || null, code].filter(Boolean);
  return parts.map((part) => shown(part, 48)).join(" · ") || "–";
}

function fillState(chip, { state, place }) {
  setAttribute(chip, "class", `state ${STATES.includes(state) ? state : ""}`);
  setText(chip, place ? `${state}, ${place === 1 ? "next" : `place ${place}`}` : shown(state, 24));
}

function prompt({ prompt_tokens: tokens, cached_tokens: cached = 0 }) {
  return cached ? `${whole(tokens)}, ${whole(cached)} cached` : whole(tokens);
}

function output({ output_tokens, max_tokens }) {
  return max_tokens ? `${whole(output_tokens)} / ${whole(max_tokens)}` : whole(output_tokens);
}

function cancelButton(current, cancel) {
  const { id, tenant } = current();
  const name = `Cancel request ${shortId(id)} of ${shown(tenant, 40)}`;
  return el(
    "button",
    { type: "button", class: "danger for-operators", "aria-label": name, click: () => cancel(current()) },
    "Cancel",
  );
}

function matches({ id, response_id, tenant, reason, code }, words) {
  return [id, response_id, tenant, reason, code].some((text) => text?.toLowerCase().includes(words));
}
