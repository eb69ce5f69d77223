// The view of the policy: what is in force, what an edit would do, what was changed when.

import { byId } from "../dom.js";
import { Search } from "../search.js";
import { Edit } from "./edit.js";
import { showHistory } from "./history.js";
import { InForce } from "./in_force.js";

export class PolicyView {
  #api = null;
  #search = new Search();
  #seen = null; // version and problem of what is shown

  constructor() {
    this.inForce = new InForce();
    this.edit = new Edit(
      () => this.#api,
      () => (this.#seen = null),
    );
    this.tables = [this.inForce.tenants];
    byId("policy-reload").addEventListener("click", () => this.#reload());
  }

  /** Asks again when the policy is another one than is shown, or other tenants of a long one are looked for. */
  async refresh(api, overview) {
    const { policy } = await overview;
    const state = `${policy.version} ${policy.problem}`;
    if (api === this.#api && state === this.#seen && !this.#search.isOther) return;
    this.#api = api;
    const report = await api.get(`policy${this.#search.ask()}`);
    this.#seen = state;
    this.#search.answered(report.truncated);
    this.inForce.show(report);
    showHistory(report.history, report.edits, (edit) => this.edit.undo(edit));
  }

  async #reload() {
    await this.#api.post("policy/reload").catch(() => null); // what came of it is seen a second later
  }
}
