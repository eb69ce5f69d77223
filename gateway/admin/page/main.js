// Puts the page together: one poll a second, whose answers go to the parts.

import { segment } from "./api.js";
import { Board } from "./board.js";
import { CancelQuestion } from "./cancel_question.js";
import { Charts } from "./charts.js";
import { byId } from "./dom.js";
import { KeysView } from "./keys/view.js";
import { PolicyView } from "./policy/view.js";
import { Pool } from "./pool.js";
import { refusalsTable } from "./refusals.js";
import { LogView } from "./log.js";
import { requestDetail } from "./request_detail.js";
import { address, liveTable, recentTable } from "./requests.js";
import { Search } from "./search.js";
import { Slots, patterns } from "./slots.js";
import { showFacts, showGauges, troubles } from "./summary.js";
import { tenantDetail } from "./tenant_detail.js";
import { tenantsTable } from "./tenants.js";
import { shown } from "./text.js";
import { UsageView } from "./usage/view.js";
import { Views } from "./views.js";

const EXPLANATION = 70000; // milliseconds
const NOW = ["tenants", "requests", "queue", "kv", "refusals"]; // what the first view asks each second

class GatewayBoard extends Board {
  constructor() {
    super();
    document.body.append(patterns());
    this.slots = new Slots();
    this.charts = new Charts(byId("charts"));
    this.pool = new Pool(byId("pool"), byId("pool-scale"), this.slots);
    this.request = requestDetail(
      (row) => this.question.ask(this.api, row),
      (row) => this.api.post(`request-log/${segment(address(row))}/texts`),
      (row) => this.api.get(`requests/${segment(address(row))}/explanation`, EXPLANATION),
    );
    this.tenant = tenantDetail((row) => this.#openRequest(row));
    this.windows = [this.request, this.tenant];
    this.question = new CancelQuestion();
    this.tables = this.#makeTables();
    this.search = new Search(); // of tenants
    this.others = { policy: new PolicyView(), keys: new KeysView(), usage: new UsageView(), log: new LogView((row) => this.#openRequest(row)) };
    this.views = new Views(["now", ...Object.keys(this.others)], () => this.#turn());
    for (const choice of document.querySelectorAll("[name=which]"))
      choice.addEventListener("change", () => this.#choose(choice.value));
  }

  #makeTables() {
    const openRequest = (row) => this.#openRequest(row);
    const openTenant = (name) => this.tenant.open(this.api, name, `Tenant ${shown(name)}`);
    return {
      tenants: tenantsTable(byId("tenants"), this.slots, openTenant),
      live: liveTable(byId("live"), openRequest, (row) => this.question.ask(this.api, row)),
      recent: recentTable(byId("recent"), openRequest),
      refusals: refusalsTable(byId("refusals"), openRequest),
    };
  }

  #openRequest(row) {
    this.request.open(this.api, address(row), `Request ${shown(row.id, 128)}`);
  }

  #choose(which) {
    for (const id of ["live", "recent"]) byId(id).hidden = id !== which;
  }

  /** To another view, which is asked for even while the page is paused. */
  #turn() {
    if (this.poller.running) this.poller.now();
    else if (this.api !== null) this.poll().catch((error) => this.failed(error, 0));
  }

  allTables() {
    return [this.tables, ...Object.values(this.others).map((view) => view.tables)].flatMap(Object.values);
  }

  /** For the view that is shown. Of the parts, only the overview must answer. */
  async ask(api) {
    const view = this.views.current;
    const parts = view === "now" ? NOW : [view];
    const coming = api.get("overview");
    const asked = Promise.allSettled(parts.map((part) => this.#askPart(part, api, coming)));
    const overview = await coming;
    const settled = await asked;
    const answers = Object.fromEntries(parts.map((part, index) => [part, settled[index].value]));
    const unanswered = parts.map((part, index) => ({ part, error: settled[index].reason }));
    return { answers: { ...answers, overview }, unanswered: unanswered.filter(({ error }) => error) };
  }

  async #askPart(part, api, overview) {
    if (part in this.others) return this.others[part].refresh(api, overview);
    return api.get(part === "tenants" ? part + this.search.ask() : part);
  }

  show({ overview, tenants, requests, queue, kv, refusals }) {
    this.freshness.answered(overview);
    showFacts(overview);
    showGauges(overview);
    this.charts.update(overview);
    if (tenants) this.#showTenants(tenants);
    if (requests) this.#showRequests(requests, queue?.waiting ?? []);
    if (kv) this.pool.update(kv);
    if (refusals) this.tables.refusals.update(refusals.refusals);
  }

  troublesOf(overview, findings, unanswered) {
    return troubles(overview, findings, unanswered);
  }

  #showTenants({ tenants, truncated }) {
    this.tables.tenants.update(tenants, truncated);
    this.search.answered(truncated);
    if (this.search.words) return; // a few of them, by which nothing gets its colour
    const present = tenants.filter(({ kv_blocks, share }) => kv_blocks || share);
    present.sort((one, other) => other.kv_blocks - one.kv_blocks || other.share - one.share);
    this.slots.assign(present.map(({ name }) => name));
  }

  #showRequests({ live, recent, truncated }, waiting) {
    const places = new Map(waiting.map((row, index) => [address(row), index + 1]).reverse()); // the first one counts
    const place = (row) => (row.state === "waiting" ? places.get(address(row)) : null); // it may run by now
    this.tables.live.update(
      live.map((row) => ({ ...row, place: place(row) })),
      truncated,
    );
    this.tables.recent.update(recent);
  }
}

new GatewayBoard().start();
