// The policy that holds: its classes, and what each tenant may do.

import { byId, el, setText } from "../dom.js";
import { plainTable } from "../plain_table.js";
import { Table } from "../table.js";
import { counted, shown } from "../text.js";
import { moment } from "../units.js";

const CLASSES = [
  ["Class"],
  ["Service tiers", false, "major"],
  ["First token"],
  ["Per token"],
  ["When late", false, "major"],
  ["Aging"],
  ["Queue", false, "major"],
];
const OTHERS = "all others";
const IN_LINES = { minor: true, lines: true };
const MAJOR = { major: true };

export class InForce {
  constructor() {
    this.tenants = new Table(byId("policy-tenants"), {
      title: "Tenants of the policy",
      columns: [
        text("name", "Tenant", { names: true }),
        { ...text("weight", "Weight", { numeric: true, ...MAJOR }), value: ({ weight }) => weight },
        text("classes", "Class, highest"),
        text("limits", "Limits", { wide: true }),
        text("models", "Models", IN_LINES),
        text("price", "Price", IN_LINES),
        text("outage", "Without store", { least: true }),
        text("keys", "Keys named", IN_LINES),
        text("cached", "Cached prefixes", IN_LINES),
      ],
      key: ({ name, isDefault }) => `${isDefault} ${name}`,
      matches: (row, words) => `${row.name} ${row.limits} ${row.classes}`.toLowerCase().includes(words),
      empty: "No tenant is named: the defaults hold for all.",
    });
  }

  show({ version, history, has_files: hasFiles, effective, problem, named: number, truncated }) {
    const { classes, defaults, tenants, prefix_sharing: groups } = effective;
    const named = Object.entries(tenants);
    const since = history.find((edition) => edition.version === version);
    const from = hasFiles ? "" : ", the built-in one";
    const facts = `Version ${shown(version, 24)}${from}, since ${moment(since?.at)}; ${counted(number, "tenant")} named.`;
    setText(byId("in-force-facts"), facts);
    setText(byId("policy-problem"), problem ? `An edit was rejected: ${shown(problem, 600)}` : "");
    byId("policy-reload").hidden = !hasFiles;
    byId("policy-classes").replaceChildren(plainTable("Classes", CLASSES, Object.entries(classes).map(classCells)));
    const groupOf = groupsByTenant(groups);
    const rows = named.map(([name, fields]) => tenantRow(name, fields, false, groupOf.get(name)));
    this.tenants.update([tenantRow(OTHERS, defaults, true), ...rows], truncated);
  }
}

function classCells([name, level]) {
  const queue = Object.entries(level.queue ?? {}).map(([what, most]) => `${what} ${most}`);
  const late = level.ttft ? (level.when_late === "refuse" ? "is refused" : "waits") : "";
  const cells = [(level.service_tiers ?? []).join(", "), level.ttft, level.time_per_output_token, late, level.aging];
  return [name, ...cells, queue.join(", ")].map((cell) => (cell ? shown(cell, 60) : ""));
}

function tenantRow(name, fields, isDefault, group) {
  const { highest_class: highest, default_class: usual, limits, price } = fields;
  return {
    name,
    isDefault,
    weight: Number(fields.weight),
    classes: highest === usual ? usual : `${usual}, ${highest}`,
    limits: limitsInWords(limits),
    models: (fields.models ?? []).join(", "),
    price: price === "none" ? "" : `${price.input} in, ${price.output} out, ${price.currency}`,
    outage: fields.on_store_outage,
    keys: Object.keys(fields.keys ?? {}).join(", "),
    cached: cachedInWords(isDefault ? { ...fields.prefix_cache, floor: "0B", pinned: "none" } : fields.prefix_cache, group),
  };
}

function groupsByTenant(groups) {
  return new Map(Object.entries(groups ?? {}).flatMap(([group, members]) => members.map((name) => [name, group])));
}

function cachedInWords({ floor = "0B", ceiling = "unlimited", pinned = "none" } = {}, group) {
  const kept = floor === "0B" ? [] : [`${floor} kept`];
  const most = ceiling === "unlimited" ? [] : [`at most ${ceiling}`];
  const prompts = pinned === "none" ? [] : [`${counted(pinned.length, "system prompt")} pinned`];
  return [...kept, ...most, ...prompts, ...(group ? [`shared in ${group}`] : [])].join(", ");
}

function limitsInWords(limits) {
  const set = Object.entries(limits ?? {}).filter(([, amount]) => amount !== "unlimited");
  return set.map(([what, amount]) => `${what} ${amountInWords(amount)}`).join(", ") || "unlimited";
}

/** A limit, as the API writes it, for a table. Of alerts it has no addresses, which may hold a secret. */
export function amountInWords(amount) {
  if (Array.isArray(amount)) return amount.map(amountInWords).join(" and ");
  if (amount?.rate) return `${amount.rate} (burst ${amount.burst})`;
  if (!amount?.budget) return String(amount);
  const alerts = amount.alerts?.length ? [`alerts at ${amount.alerts.map(({ at }) => at).join(", ")}`] : [];
  const more = [...(amount.soft ? ["soft"] : []), ...alerts].join(", ");
  return more ? `${amount.budget} (${more})` : amount.budget;
}

function text(id, title, marks = {}) {
  return { id, title, value: (row) => row[id], text: (row) => (row[id] === "" ? "" : shown(row[id], 240)), ...marks };
}
