// The view of usage and spend: by tenant or key, by day, over a period; what is left of budgets; all of it as CSV.

import { byId, el, fillChildren, setText } from "../dom.js";
import { Search } from "../search.js";
import { shown } from "../text.js";
import { compact } from "../units.js";
import { Days } from "./days.js";
import { Period } from "./period.js";
import { budgetsTable, costInWords, usageTable } from "./tables.js";

const PERIOD = 15000; // milliseconds between two looks at what may be thousands of ledgers
const PAUSE = 20; // times as long as an answer took, before the next is asked for
const PATIENCE = 60000;

export class UsageView {
  #api = null;
  #due = -Infinity;
  #rows = new Search();
  #budgets = new Search();

  constructor() {
    this.period = new Period(() => this.#ask().catch((error) => this.#explain(error)));
    this.days = new Days(byId("usage-days"), byId("usage-legend"));
    this.usage = usageTable(byId("usage-table"));
    this.budgets = budgetsTable(byId("usage-budgets"));
    this.tables = [this.usage, this.budgets];
    byId("usage-csv").addEventListener("click", () => this.#download());
  }

  async refresh(api) {
    const isOther = this.#rows.isOther || this.#budgets.isOther;
    if (api === this.#api && !isOther && performance.now() < this.#due) return;
    this.#api = api;
    await this.#ask().catch((error) => this.#explain(error));
  }

  async #ask() {
    const began = performance.now();
    this.#due = began + PERIOD;
    this.period.renew();
    const { query } = this.period;
    const api = this.#api;
    if (api === null) return;
    const [report, budgets] = await Promise.all([
      api.get(`usage${query}${this.#rows.ask("&")}`, PATIENCE),
      api.get(`budgets${this.#budgets.ask()}`, PATIENCE),
    ]);
    this.#due = Math.max(this.#due, performance.now() + PAUSE * (performance.now() - began));
    this.#rows.answered(report.truncated);
    this.#budgets.answered(budgets.truncated);
    if (query === this.period.query) this.#show(report, budgets); // else another answer is on its way
  }

  #show({ total, rows, truncated, days, model, by }, budgets) {
    setText(byId("usage-problem"), "");
    byId("usage-table").classList.toggle("without-keys", by === "tenant");
    setText(byId("usage-model"), `This gateway serves ${shown(model, 60)}; replicas on the same store count as well.`);
    const totals = [
      ["Requests", compact(total.requests)],
      ["Input tokens", compact(total.input_tokens)],
      ["Output tokens", compact(total.output_tokens)],
      ["Cost", costInWords(total.costs) || "no price is set"],
    ];
    fillChildren(byId("usage-totals"), totals, gauge, (entry, [title, value]) => {
      setText(entry.firstElementChild, title);
      setText(entry.querySelector("b"), value);
    });
    this.days.update(days);
    this.usage.update(rows, truncated);
    this.budgets.update(budgets.budgets, budgets.truncated);
  }

  #explain(error) {
    setText(byId("usage-problem"), `Not answered: ${shown(error.message, 300)}.`);
  }

  /** A link could not carry the key. */
  async #download() {
    try {
      const text = await this.#api.text(`usage.csv${this.period.query}`, PATIENCE);
      const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
      el("a", { href: address, download: this.period.name }).click();
      setTimeout(() => URL.revokeObjectURL(address), 10_000);
    } catch (error) {
      this.#explain(error);
    }
  }
}

function gauge() {
  return el("div", { class: "panel gauge" }, el("dt"), el("dd", {}, el("b")));
}
