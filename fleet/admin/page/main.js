// Puts the page of a fleet together: one poll a second, whose answers go to the parts.

import { Unauthorized } from "./api.js";
import { byId } from "./dom.js";
import { Freshness } from "./freshness.js";
import { Poller } from "./poller.js";
import { replicaDetail, replicasTable } from "./replicas.js";
import { SignIn } from "./sign_in.js";
import { Troubles, allTroubles, fillFacts, fillGauges } from "./summary.js";
import { tenantDetail, tenantsTable } from "./tenants.js";
import { counted, shown } from "./text.js";
import { compact, duration, number, percent, whole } from "./units.js";

const DIAGNOSIS_PERIOD = 10000; // milliseconds
const DIAGNOSIS_PATIENCE = 30000; // the router and its replicas watch themselves for a while before they answer

class Board {
  #api = null;
  #findings = null; // not looked for yet
  #diagnosed = -Infinity;
  #undiagnosed = null; // why the last question was not answered

  constructor() {
    const openReplica = (name) => this.#open(this.replica, this.tenant, name, `Replica ${shown(name)}`);
    const openTenant = (name) => this.#open(this.tenant, this.replica, name, `Tenant ${shown(name)}`);
    this.replica = replicaDetail(openTenant);
    this.tenant = tenantDetail(openReplica);
    this.tables = [replicasTable(byId("replicas"), openReplica), tenantsTable(byId("tenants"), openTenant)];
    this.troubles = new Troubles(byId("problems"));
    this.freshness = new Freshness();
    this.poller = new Poller(
      () => this.#poll(),
      (error, wait) => this.#failed(error, wait),
    );
    this.signIn = new SignIn((api) => this.#begin(api));
    this.#listen();
    this.signIn.begin();
  }

  /** In place of the other window, from which it may have been asked for. */
  #open(detail, other, name, title) {
    if (other.dialog.open) other.dialog.close();
    detail.open(this.#api, name, title);
  }

  #listen() {
    byId("sign-out").addEventListener("click", () => this.#leave(""));
    byId("try-now").addEventListener("click", () => this.poller.now());
    byId("pause").addEventListener("click", () => this.#pause(this.poller.running));
    byId("filter").addEventListener("input", ({ target }) => {
      for (const table of this.tables) table.filter(target.value.trim().toLowerCase());
    });
  }

  #begin(api) {
    this.#api = api;
    byId("sign-in").hidden = true;
    byId("board").hidden = false;
    this.#pause(false);
  }

  #leave(why) {
    this.poller.stop();
    this.#api = null;
    for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
    this.signIn.ask(why);
  }

  #pause(paused) {
    byId("pause").setAttribute("aria-pressed", paused);
    if (paused) this.poller.stop();
    else this.poller.start();
    this.freshness.pause(paused);
  }

  /** Of the parts, only the overview must answer. */
  async #poll() {
    const api = this.#api;
    const asked = Promise.allSettled([api.get("fleet/tenants")]);
    const overview = await api.get("overview");
    const [tenants] = await asked;
    if (api !== this.#api) return;
    this.#diagnose(api);
    this.#show(overview, tenants.value);
    const unanswered = tenants.reason ? [{ part: "tenants", error: tenants.reason }] : [];
    if (this.#undiagnosed) unanswered.push(this.#undiagnosed);
    this.troubles.show(troubles(overview, this.#findings ?? [], unanswered), this.#findings !== null);
    await Promise.all([this.replica.refresh(), this.tenant.refresh()]);
  }

  #show(overview, tenants) {
    this.freshness.answered({ model: models(overview), draining: overview.draining, engine: overview });
    byId("model").textContent = models(overview);
    fillFacts(facts(overview));
    fillGauges(gauges(overview));
    const [replicas, tenantsTable] = this.tables;
    replicas.update(overview.replicas);
    if (tenants) tenantsTable.update(tenants.tenants, tenants.truncated);
  }

  async #diagnose(api) {
    if (performance.now() - this.#diagnosed < DIAGNOSIS_PERIOD) return;
    this.#diagnosed = Infinity; // until it is answered
    try {
      this.#findings = (await api.get("diagnosis", DIAGNOSIS_PATIENCE)).findings;
      this.#undiagnosed = null;
    } catch (error) {
      this.#undiagnosed = { part: "diagnosis", error };
    }
    this.#diagnosed = performance.now();
  }

  #failed(error, wait) {
    if (error instanceof Unauthorized) this.#leave("The key is no longer accepted.");
    else this.freshness.failed(error, wait);
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

function troubles({ draining, replicas }, findings, unanswered) {
  const own = [
    draining && {
      serious: false,
      gist: "This router drains: it takes nothing new",
      text: `This router drains: it takes nothing new, for ${counted(replicas.length, "replica")}.`,
    },
  ];
  return allTroubles(own, findings, unanswered);
}

new Board();
