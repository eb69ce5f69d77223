// Which days are looked at: in UTC, as the ledger is kept.

import { byId, el } from "../dom.js";

const DAY = 86_400_000; // milliseconds

/** First and last day of each, from a Date of today. */
const PRESETS = {
  "This month": (today) => [monthStart(today, 0), today],
  "Last month": (today) => [monthStart(today, -1), new Date(monthStart(today, 0) - DAY)],
  Today: (today) => [today, today],
  Yesterday: (today) => [new Date(today - DAY), new Date(today - DAY)],
  "Last 7 days": (today) => [new Date(today - 6 * DAY), today],
  "Last 30 days": (today) => [new Date(today - 29 * DAY), today],
  "Last 365 days": (today) => [new Date(today - 364 * DAY), today],
};
const CHOSEN = "As chosen";
const NAMED = ["metadata", "tag"];

export class Period {
  /** `changed()` is told when other days, or other rows, are asked for. */
  constructor(changed) {
    this.preset = byId("usage-preset");
    this.first = byId("usage-from");
    this.last = byId("usage-to");
    this.named = byId("usage-name");
    this.preset.append(...[...Object.keys(PRESETS), CHOSEN].map((name) => el("option", { value: name }, name)));
    byId("usage-period").addEventListener("submit", (event) => event.preventDefault());
    byId("usage-period").addEventListener("change", ({ target }) => {
      if (target === this.preset) this.renew();
      this.named.hidden = !NAMED.includes(document.querySelector("[name=usage-by]:checked").value);
      if (target.name === "usage-by" && this.#isNameless) this.named.focus();
      else if (this.isWhole) changed();
    });
    for (const day of [this.first, this.last]) day.addEventListener("input", () => (this.preset.value = CHOSEN)); // half typed, too
    this.renew();
  }

  /** Have days such as today's be those of now. */
  renew() {
    const days = PRESETS[this.preset.value]?.(new Date());
    if (days) [this.first.value, this.last.value] = days.map((day) => day.toISOString().slice(0, 10));
  }

  get query() {
    return `?${new URLSearchParams({ from: this.first.value, to: this.last.value, by: this.by })}`;
  }

  /** What use is told by: of metadata and tags, by the one that is named. */
  get by() {
    const by = document.querySelector("[name=usage-by]:checked").value;
    return NAMED.includes(by) ? `${by}.${this.named.value.trim()}` : by;
  }

  /** Whether no day is half typed, and no name still to be given. */
  get isWhole() {
    return Boolean(this.first.value && this.last.value) && !this.#isNameless;
  }

  get #isNameless() {
    return this.by.endsWith(".");
  }
}

function monthStart(today, months) {
  return new Date(Date.UTC(today.getUTCFullYear(), today.getUTCMonth() + months, 1));
}
