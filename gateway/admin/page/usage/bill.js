// What the machine cost: each tenant's part by engine time, what was idle, and the price of a million tokens.

import { byId, fillChildren, setText } from "../dom.js";
import { Table, quantity } from "../table.js";
import { shown } from "../text.js";
import { compact, duration, money, percent } from "../units.js";
import { gauge, tenantName } from "./parts.js";

export class Bill {
  constructor() {
    this.table = new Table(byId("bill-table"), {
      title: "The machine's bill",
      columns: [
        tenantName("tenant", "Tenant", { stretches: true }),
        quantity("engine_seconds", "Engine time", duration),
        quantity("part", "Part", percent, { note: "of the machine's time", major: true }),
        quantity("cost", "Cost", (cost) => this.#money(cost), {}),
      ],
      key: ({ tenant }) => tenant,
      matches: ({ tenant }, words) => tenant.toLowerCase().includes(words),
      limit: 25,
      empty: "No engine time on these days.",
    });
  }

  update({ rows, truncated, ...bill }) {
    this.currency = bill.currency ? shown(bill.currency, 8) : "";
    const each = (cost) => (cost === null ? "no tokens" : this.#money(Number(cost)));
    const totals = [
      ["Machines ran", duration(bill.running_seconds)],
      [`At ${this.#money(Number(bill.price_per_hour))} an hour`, this.#money(Number(bill.cost))],
      ["Of it idle", this.#money(Number(bill.idle_cost))],
      [`A million of ${compact(bill.tokens)} tokens`, each(bill.cost_per_million_tokens)],
      ["The same without idle time", each(bill.cost_per_million_tokens_busy)],
    ];
    fillChildren(byId("bill-totals"), totals, gauge, (entry, [title, value]) => {
      setText(entry.firstElementChild, title);
      setText(entry.querySelector("b"), value);
    });
    const whole = bill.running_seconds || 1;
    this.table.update(rows.map((row) => ({ ...row, part: row.engine_seconds / whole, cost: Number(row.cost) })), truncated);
  }

  #money(amount) {
    return money(amount, this.currency).trim();
  }
}
