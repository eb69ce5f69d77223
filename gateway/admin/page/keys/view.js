// The view of API keys: which there are, what is done to them, and the audit log of what was.

import { segment } from "../api.js";
import { byId } from "../dom.js";
import { auditTable } from "./audit.js";
import { KeyDialog } from "./dialog.js";
import { keysTable } from "./table.js";

const PERIOD = 3000; // milliseconds

export class KeysView {
  #api = null;
  #asked = -Infinity;
  #words = "";

  constructor() {
    this.dialog = new KeyDialog(
      () => this.#api,
      () => this.#ask(),
    );
    this.keys = keysTable(byId("keys-table"), this.dialog);
    this.audit = auditTable(byId("audit-table"));
    this.tables = [this.keys, this.audit];
    byId("key-create").addEventListener("click", () => this.dialog.create());
  }

  async refresh(api) {
    const words = byId("filter").value.trim();
    const isNew = api !== this.#api || words !== this.#words;
    if (!isNew && performance.now() - this.#asked < PERIOD) return;
    this.#api = api;
    this.#words = words;
    await this.#ask();
  }

  /** The words of the filter are the gateway's to find: it may have more keys than it tells. */
  async #ask() {
    this.#asked = performance.now();
    const contains = this.#words ? `?contains=${segment(this.#words)}` : "";
    const [keys, audit] = await Promise.all([this.#api.get(`keys${contains}`), this.#api.get("audit")]);
    this.keys.update(keys.keys, keys.truncated);
    this.audit.update(audit.entries);
    this.dialog.suggest(keys.tenants);
  }
}
