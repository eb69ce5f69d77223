// Puts the page of a fleet together: one poll a second, whose answers go to the parts.

import { Board } from "./board.js";
import { byId } from "./dom.js";
import { replicaDetail, replicasTable } from "./replicas.js";
import { allTroubles, fillFacts, fillGauges } from "./summary.js";
import { tenantDetail, tenantsTable } from "./tenants.js";
import { counted, shown } from "./text.js";
import { compact, duration, number, percent, whole } from "./units.js";

class FleetBoard extends Board {
  constructor() {
    super();
    const openReplica = (name) => this.#open(this.replica, this.tenant, name, `Replica ${shown(name)}`);
    const openTenant = (name) => this.#open(this.tenant, this.replica, name, `Tenant ${shown(name)}`);
    this.replica = replicaDetail(openTenant);
    this.tenant = tenantDetail(openReplica);
    this.windows = [this.replica, this.tenant];
    this.tables = [replicasTable(byId("replicas"), openReplica), tenantsTable(byId("tenants"), openTenant)];
  }

  /** In place of the other window, from which it may have been asked for. */
  #open(detail, other, name, title) {
    if (other.dialog.open) other.dialog.close();
    detail.open(this.api, name, title);
  }

  allTables() {
    return this.tables;
  }

  /** Of the parts, only the overview must answer. */
  async ask(api) {
    const asked = Promise.allSettled([api.get("fleet/tenants")]);
    const overview = await api.get("overview");
    const [tenants] = await asked;
    const unanswered = tenants.reason ? [{ part: "tenants", error: tenants.reason }] : [];
    return { answers: { overview, tenants: tenants.value }, unanswered };
  }

  show({ overview, tenants }) {
    this.freshness.answered({ model: models(overview), draining: overview.draining, engine: overview });
    byId("model").textContent = models(overview);
    fillFacts(facts(overview));
    fillGauges(gauges(overview));
    const [replicas, tenantsTable] = this.tables;
    replicas.update(overview.replicas);
    if (tenants) tenantsTable.update(tenants.tenants, tenants.truncated);
  }

  troublesOf({ draining, replicas }, findings, unanswered) {
    const own = [
      draining && {
        serious: false,
        gist: "This router drains: it takes nothing new",
        text: `This router drains: it takes nothing new, for ${counted(replicas.length, "replica")}.`,
      },
    ];
    return allTroubles(own, findings, unanswered);
  }
}

function models({ models: [first, ...others] }) {
  if (first === undefined) return "fleet";
  return others.length ? `${shown(first, 40)} and ${whole(others.length)} more` : shown(first, 60);
}

function facts({ version, now, started, attempts, retries, retries_left, draining }) {
  return [
    ["Router", shown(version, 24)],
    ["Up", duration(Math.floor(now - started))],
    ["Requests sent", compact(attempts)],
    ["Sent a second time", compact(retries) + (retries_left ? "" : ", and no more for now")],
    ["Routing", draining ? "draining" : "yes"],
  ];
}

function gauges({ replicas, available, replicas_wanted, running, seats, waiting, work_seconds, kv_tokens, kv_tokens_held }) {
  const held = kv_tokens ? kv_tokens_held / kv_tokens : null;
  return [
    [
      "Taking requests",
      `${whole(available)} / ${whole(replicas.length)}`,
      `replicas, work for ${number(replicas_wanted)}`,
      replicas.length ? available / replicas.length : 0,
    ],
    ["Running", `${whole(running)} / ${whole(seats)}`, "sequences", seats ? running / seats : 0],
    ["Waiting", whole(waiting), `sequences, ${duration(work_seconds)} of work in all`, null],
    ["KV memory", percent(held), `of ${compact(kv_tokens)} tokens`, held],
  ];
}

new FleetBoard().start();
