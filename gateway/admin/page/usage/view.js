// The view of usage and spend: by tenant or key, by day, over a period; what is left of budgets; all of it as CSV.

import { byId, el, fillChildren, setText } from "../dom.js";
import { shown } from "../text.js";
import { compact, number } from "../units.js";
import { Bill } from "./bill.js";
import { Days } from "./days.js";
import { gauge } from "./parts.js";
import { Period } from "./period.js";
import { Question } from "./question.js";
import { budgetsTable, costInWords, usageTable } from "./tables.js";

const PATIENCE = 60000; // milliseconds for a download
const DAMAGED = "Values in the quota store are damaged and left out: the gateway's log names them.";

export class UsageView {
  #api = null;
  #query = ""; // of the period, once it is chosen
  #used = new Question((report) => this.#showUsage(report), () => this.#tell());
  #left = new Question((answer) => this.#showBudgets(answer), () => this.#tell());
  #damaged = { used: 0, left: 0 }; // stored values that an answer leaves out

  constructor() {
    this.period = new Period(() => this.#choose());
    this.days = new Days(byId("usage-days"), byId("usage-legend"), "Tokens by day", ["input", "output"], compact);
    this.costs = new Days(byId("usage-costs"), byId("usage-costs-legend"), "Cost by day", ["cost"], amount);
    this.bill = new Bill();
    this.usage = usageTable(byId("usage-table"));
    this.budgets = budgetsTable(byId("usage-budgets"));
    this.tables = [this.usage, this.budgets, this.bill.table];
    for (const what of ["usage", "bill"])
      byId(`${what}-csv`).addEventListener("click", () => this.#download(what));
  }

  /** Returns at once: no other view waits for what may be thousands of ledgers. */
  refresh(api) {
    this.#api = api;
    if (this.#used.isDue) this.#choose();
    else this.#ask();
  }

  #choose() {
    this.period.renew();
    if (this.period.isWhole) this.#query = this.period.query;
    this.#ask();
  }

  /** Budgets are of now: another period leaves their question as it is. */
  #ask() {
    if (this.#api === null) return;
    if (this.#query) this.#used.ask(this.#api, `usage${this.#query}`, "&");
    this.#left.ask(this.#api, "budgets", "?");
  }

  #tell() {
    const damaged = this.#damaged.used || this.#damaged.left ? DAMAGED : "";
    setText(byId("usage-problem"), [this.#used.problem, this.#left.problem, damaged].filter(Boolean).join(" "));
    setText(byId("usage-other"), this.#used.isOther ? "Below is what was asked for before." : "");
  }

  #showBudgets({ budgets, truncated, damaged }) {
    this.#damaged.left = damaged;
    this.budgets.update(budgets, truncated);
  }

  #showUsage(report) {
    this.#damaged.used = report.damaged + (report.bill?.damaged ?? 0);
    this.#show(report);
    byId("bill-panel").hidden = report.bill === null;
    if (report.bill !== null) this.bill.update(report.bill);
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

  /** A link could not carry the key. */
  async #download(what) {
    const days = new URLSearchParams(this.#query);
    try {
      const text = await this.#api.text(`${what}.csv${this.#query}`, PATIENCE);
      const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
      el("a", { href: address, download: `${what}-${days.get("from")}-${days.get("to")}.csv` }).click();
      setTimeout(() => URL.revokeObjectURL(address), 10_000);
    } catch (error) {
      setText(byId("usage-problem"), `Not answered: ${shown(error.message, 300)}.`);
    }
  }
}

/** A number as it is, or the first digits of a small one. */
function amount(value) {
  return value > 0 && value < 0.01 ? String(Number(value.toPrecision(2))) : number(value);
}
