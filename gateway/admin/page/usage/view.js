// The view of usage and spend: by tenant or key, by day, over a period; what is left of budgets; all of it as CSV.

import { failure } from "../api.js";
import { byId, el, fillChildren, setText } from "../dom.js";
import { Search } from "../search.js";
import { shown } from "../text.js";
import { compact, number } from "../units.js";
import { Bill } from "./bill.js";
import { Days } from "./days.js";
import { gauge } from "./parts.js";
import { Period } from "./period.js";
import { budgetsTable, costInWords, usageTable } from "./tables.js";

const PERIOD = 15000; // milliseconds between two looks at what may be thousands of ledgers
const PAUSE = 20; // times as long as an answer took, before the next is asked for
const PATIENCE = 60000;
const LATE = new Error("another question was asked since");

export class UsageView {
  #api = null;
  #due = -Infinity;
  #asked = 0; // questions so far: an answer to another than the last comes too late
  #rows = new Search();
  #budgets = new Search();

  constructor() {
    this.period = new Period(() => this.#ask());
    this.days = new Days(byId("usage-days"), byId("usage-legend"), "Tokens by day", ["input", "output"], compact);
    this.costs = new Days(byId("usage-costs"), byId("usage-costs-legend"), "Cost by day", ["cost"], amount);
    this.bill = new Bill();
    this.usage = usageTable(byId("usage-table"));
    this.budgets = budgetsTable(byId("usage-budgets"));
    this.tables = [this.usage, this.budgets, this.bill.table];
    byId("usage-csv").addEventListener("click", () => this.#download(`usage.csv${this.period.query}`, "usage"));
    byId("bill-csv").addEventListener("click", () => this.#download(`bill.csv${this.period.daysQuery}`, "bill"));
  }

  /** Returns at once: no other view waits for what may be thousands of ledgers. */
  refresh(api) {
    const isOther = this.#rows.isOther || this.#budgets.isOther;
    if (api === this.#api && !isOther && performance.now() < this.#due) return;
    this.#api = api;
    this.#ask();
  }

  async #ask() {
    const began = performance.now();
    this.period.renew();
    const api = this.#api;
    if (api === null || this.period.isNameless) return;
    const number = ++this.#asked;
    const answer = async (path) => {
      const answered = await api.get(path, PATIENCE);
      if (number !== this.#asked) throw LATE;
      return answered;
    };
    this.#due = Infinity; // until all is answered
    const failures = await Promise.all([this.#askUsage(answer), this.#askBudgets(answer)].map(failure));
    if (number !== this.#asked) return;
    setText(byId("usage-problem"), "");
    failures.filter((error) => error !== null).forEach((error) => this.#explain(error));
    this.#due = performance.now() + Math.max(PERIOD, PAUSE * (performance.now() - began));
  }

  async #askUsage(answer) {
    const report = await answer(`usage${this.period.query}${this.#rows.ask("&")}`);
    this.#rows.answered(report.truncated);
    this.#show(report);
    byId("bill-panel").hidden = report.bill === null;
    if (report.bill !== null) this.bill.update(report.bill);
  }

  async #askBudgets(answer) {
    const { budgets, truncated } = await answer(`budgets${this.#budgets.ask()}`);
    this.#budgets.answered(truncated);
    this.budgets.update(budgets, truncated);
  }

  #show({ total, rows, truncated, days, model, by }) {
    const table = byId("usage-table");
    table.classList.toggle("without-values", by === "tenant");
    table.classList.toggle("without-tenants", ["team", "model", "class"].includes(by));
    setText(table.querySelector("th:nth-child(2) button"), shown(by.replace(".", ": "), 48));
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
    this.days.update(days.map(({ day, input_tokens: input, output_tokens: output }) => ({ day, input, output })));
    const currency = Object.keys(total.costs)[0];
    byId("usage-costs-panel").hidden = currency === undefined;
    setText(byId("usage-costs-of"), `In ${shown(currency, 8)}${Object.keys(total.costs).length > 1 ? " alone" : ""}.`);
    this.costs.update(days.map(({ day, costs }) => ({ day, cost: Number(costs[currency] ?? 0) })));
    this.usage.update(rows, truncated);
  }

  #explain(error) {
    setText(byId("usage-problem"), `Not answered: ${shown(error.message, 300)}.`);
  }

  /** A link could not carry the key. */
  async #download(path, what) {
    try {
      const text = await this.#api.text(path, PATIENCE);
      const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
      el("a", { href: address, download: this.period.nameOf(what) }).click();
      setTimeout(() => URL.revokeObjectURL(address), 10_000);
    } catch (error) {
      this.#explain(error);
    }
  }
}

/** A number as it is, or the first digits of a small one. */
function amount(value) {
  return value > 0 && value < 0.01 ? String(Number(value.toPrecision(2))) : number(value);
}
