// The table of tenants summed over the replicas, and the window that shows where one of them has its work.

import { Detail, factList } from "./detail.js";
import { byId, el } from "./dom.js";
import { plainTable } from "./plain_table.js";
import { nameButton, nameColumn } from "./replicas.js";
import { Table, quantity } from "./table.js";
import { counted, shown } from "./text.js";
import { compact, duration, number, whole } from "./units.js";

const MINOR = { minor: true };
const WHERE = [["Replica", false, "names"], ["Waiting", true], ["Work", true], ["Prompts", true, "minor"], ["Running", true]];

/** `open(name)` shows one of them. */
export function tenantsTable(root, open) {
  return new Table(root, {
    title: "Tenants",
    columns: [
      nameColumn("Tenant", open, { names: true }),
      quantity("waiting", "Waiting", compact),
      quantity("seconds", "Work", duration, { note: "predicted engine time of all that waits" }),
      quantity("running", "Running", compact),
      quantity("open_requests", "Open", compact, { note: "requests of this router that are not answered", ...MINOR }),
      quantity("weight", "Weight", number, MINOR),
      { id: "where", title: "Where", value: ({ num_replicas }) => num_replicas, text: where, major: true, wide: true },
    ],
    key: ({ name }) => name,
    matches: ({ name }, words) => name.toLowerCase().includes(words),
    sort: { id: "seconds", descending: true },
    empty: "Nobody has work anywhere.",
  });
}

/** "10.0.0.1:8000: 12 waiting, 3 running; …" */
function where({ replicas, num_replicas }) {
  const places = replicas.map(({ name, waiting, running }) => {
    const parts = [waiting && `${whole(waiting)} waiting`, running && `${whole(running)} running`].filter(Boolean);
    return `${shown(name, 60)}: ${parts.join(", ") || "done"}`;
  });
  const more = num_replicas - replicas.length;
  return [...places, ...(more > 0 ? [`${counted(more, "replica")} more`] : [])].join("; ");
}

/** `openReplica(name)` shows a replica with all its tenants. */
export function tenantDetail(openReplica) {
  return new Detail(byId("tenant-dialog"), "tenant-title", "fleet/tenants", (tenant) => content(tenant, openReplica));
}

function content(tenant, openReplica) {
  const rows = tenant.replicas.map(({ name, waiting, seconds, prefill_seconds, running }) => [
    nameButton(() => name, openReplica),
    whole(waiting),
    duration(seconds),
    duration(prefill_seconds),
    whole(running),
  ]);
  const places = rows.length
    ? plainTable("Where its work is", WHERE, rows)
    : el("p", { class: "muted" }, "It has no work anywhere.");
  return [factList(facts(tenant)), el("h3", {}, "Where its work is"), places];
}

function facts(tenant) {
  return {
    Weight: number(tenant.weight),
    Waiting: whole(tenant.waiting),
    "Work that waits": duration(tenant.seconds),
    "Of that, prompts": duration(tenant.prefill_seconds),
    Running: whole(tenant.running),
    "Open at this router": whole(tenant.open_requests),
    Replicas: whole(tenant.num_replicas),
  };
}
