// The view of the log of requests: a form of filters, and a page of what it finds.

import { byId, setText } from "./dom.js";
import { recentTable } from "./requests.js";
import { shown } from "./text.js";

const PERIOD = 5000; // milliseconds between two looks at the newest page
const PAGE = 100; // rows
const PATIENCE = 10000;

export class LogView {
  #api = null;
  #due = -Infinity;
  #before = null; // the place from which the page goes on; null: the newest page
  #asked = 0;

  /** `open(row)` shows a request's timeline. */
  constructor(open) {
    const options = { title: "Log of requests", empty: "No request meets these filters.", limit: PAGE };
    this.tables = [recentTable(byId("log-table"), open, options)];
    this.form = byId("log-search");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#turn(null);
    });
    this.form.addEventListener("change", ({ target }) => target.tagName === "SELECT" && this.#turn(null));
    byId("log-newest").addEventListener("click", () => this.#turn(null));
  }

  async refresh(api) {
    if (api === this.#api && (this.#before !== null || performance.now() < this.#due)) return;
    this.#api = api;
    await this.#ask();
  }

  #turn(place) {
    this.#before = place;
    this.#ask();
  }

  /** A failure is told in the view, where the filters are that may have caused it. */
  async #ask() {
    this.#due = performance.now() + PERIOD;
    const number = ++this.#asked;
    const filters = [...new FormData(this.form)].filter(([, value]) => value.trim());
    const query = new URLSearchParams({ ...Object.fromEntries(filters), limit: PAGE });
    if (this.#before !== null) query.set("before", this.#before);
    try {
      const { requests, next } = await this.#api.get(`request-log?${query}`, PATIENCE);
      if (number !== this.#asked) return; // another answer is on its way
      setText(byId("log-problem"), "");
      this.tables[0].update(requests);
      byId("log-newest").hidden = this.#before === null;
      byId("log-older").hidden = next === null;
      byId("log-older").onclick = () => this.#turn(next);
    } catch (error) {
      if (number === this.#asked) setText(byId("log-problem"), `Not answered: ${shown(error.message, 300)}.`);
    }
  }
}
