// How old the page is: live, paused, or stale since when and asked again when.

import { announce, byId, setAttribute, setText } from "./dom.js";
import { shown } from "./text.js";
import { age, clock } from "./units.js";

export class Freshness {
  #seen = null; // Unix seconds of the last answer, by the reader's clock
  #problem = null;
  #next = 0; // when it is asked again, likewise
  #paused = false;
  #title = "Sluice";

  constructor() {
    setInterval(() => this.#show(), 1000);
  }

  answered({ model, draining, engine }) {
    if (this.#problem !== null) announce("The gateway answers again.");
    this.#problem = null;
    this.#seen = Date.now() / 1000;
    const state = draining ? "Draining" : `${engine.running} running, ${engine.waiting} waiting`;
    this.#title = `${state} · ${shown(model, 40)} · Sluice`;
    this.#show();
  }

  failed(error, wait) {
    if (this.#problem === null) announce("The gateway does not answer.");
    this.#problem = error.message;
    this.#next = (Date.now() + wait) / 1000;
    this.#show();
  }

  pause(paused) {
    this.#paused = paused;
    if (paused) this.#problem = null;
    this.#show();
  }

  #show() {
    const state = this.#paused ? "paused" : this.#problem !== null ? "stale" : "live";
    setAttribute(document.documentElement, "data-state", state);
    setText(byId("freshness"), this.#words(state));
    byId("try-now").hidden = state !== "stale";
    document.title = state === "stale" ? `No answer · ${this.#title}` : this.#title;
  }

  #words(state) {
    const since = this.#seen === null ? "" : ` since ${clock(this.#seen)}`;
    if (state === "live") return this.#seen === null ? "Asking…" : "Live";
    if (state === "paused") return `Paused${since}`;
    const now = Date.now() / 1000;
    const old = this.#seen === null ? "" : ` (${age(now - this.#seen)})`;
    return `Stale${since}${old}: ${shown(this.#problem, 120)}. Next try in ${age(Math.max(this.#next - now, 0))}.`;
  }
}
