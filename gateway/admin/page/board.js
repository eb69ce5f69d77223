// What the pages of a gateway and of a fleet have in common: sign-in, one poll a second, a pause, and the diagnosis.

import { Unauthorized } from "./api.js";
import { byId, setAttribute } from "./dom.js";
import { Freshness } from "./freshness.js";
import { Poller } from "./poller.js";
import { SignIn } from "./sign_in.js";
import { Troubles } from "./summary.js";
import { shown } from "./text.js";

const DIAGNOSIS_PERIOD = 10000; // milliseconds
const DIAGNOSIS_PATIENCE = 30000; // who is asked watches itself for a while before it answers

/**
 * A page has `ask(api)`, which returns the `answers` to a poll and the parts `unanswered`; `show(answers)`;
 * `troublesOf(overview, findings, unanswered)`; `allTables()`, which are filtered; and `windows`, which are refreshed.
 */
export class Board {
  api = null; // until somebody has signed in
  #findings = null; // not looked for yet
  #diagnosed = -Infinity;
  #undiagnosed = null; // why the last question was not answered

  constructor() {
    this.troubles = new Troubles(byId("problems"));
    this.freshness = new Freshness();
    this.poller = new Poller(
      () => this.poll(),
      (error, wait) => this.failed(error, wait),
    );
    this.signIn = new SignIn((api) => this.#begin(api));
  }

  start() {
    byId("sign-out").addEventListener("click", () => this.#leave(""));
    byId("try-now").addEventListener("click", () => this.poller.now());
    byId("pause").addEventListener("click", () => this.#pause(this.poller.running));
    byId("filter").addEventListener("input", ({ target }) => {
      for (const table of this.allTables()) table.filter(target.value.trim().toLowerCase());
    });
    this.signIn.begin();
  }

  async poll() {
    const api = this.api;
    const { answers, unanswered } = await this.ask(api);
    if (api !== this.api) return;
    this.#diagnose(api);
    this.show(answers);
    if (this.#undiagnosed) unanswered.push(this.#undiagnosed);
    this.troubles.show(this.troublesOf(answers.overview, this.#findings ?? [], unanswered), this.#findings !== null);
    await Promise.all(this.windows.map((window) => window.refresh()));
  }

  failed(error, wait) {
    if (error instanceof Unauthorized) this.#leave("The key is no longer accepted.");
    else this.freshness.failed(error, wait);
  }

  #begin(api) {
    this.api = api;
    this.#showRole(api);
    byId("sign-in").hidden = true;
    byId("board").hidden = false;
    this.#pause(false);
  }

  /** Buttons that this admin may not press are hidden; the gateway refuses them in any case. */
  async #showRole(api) {
    const me = await api.get("me").catch(() => null);
    if (me === null || api !== this.api) return;
    document.body.dataset.role = me.role;
    setAttribute(byId("sign-out"), "title", `${shown(me.name, 64)}, ${me.role}`);
  }

  #leave(why) {
    this.poller.stop();
    this.api = null;
    delete document.body.dataset.role;
    for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
    this.signIn.ask(why);
  }

  #pause(paused) {
    byId("pause").setAttribute("aria-pressed", paused);
    if (paused) this.poller.stop();
    else this.poller.start();
    this.freshness.pause(paused);
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
}
