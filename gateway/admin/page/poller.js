// Asks again and again: each second while it is answered, less and less often while it is not.

import { failure } from "./api.js";

const PERIOD = 1000; // milliseconds from one beginning to the next
const HIDDEN_PERIOD = 10000; // while nobody looks
const LONGEST = 15000; // of the back-off

export class Poller {
  #timer = null;
  #asking = false;
  #failures = 0;

  /** `ask` is awaited, one at a time; `failed(error, milliseconds until the next)` hears of each that throws. */
  constructor(ask, failed) {
    this.ask = ask;
    this.failed = failed;
    this.running = false;
    document.addEventListener("visibilitychange", () => this.running && !document.hidden && this.now());
  }

  start() {
    this.running = true;
    this.#failures = 0;
    this.now();
  }

  stop() {
    this.running = false;
    clearTimeout(this.#timer);
  }

  /** At once, unless it is asking already. */
  async now() {
    if (this.#asking || !this.running) return;
    clearTimeout(this.#timer);
    this.#asking = true;
    const began = performance.now();
    const error = await failure(this.ask());
    this.#asking = false;
    if (!this.running) return;
    this.#failures = error ? this.#failures + 1 : 0;
    const wait = error ? this.#backOff() : this.#period(performance.now() - began);
    if (error) this.failed(error, wait);
    if (this.running) this.#timer = setTimeout(() => this.now(), wait);
  }

  #backOff() {
    return Math.min(PERIOD * 2 ** (this.#failures - 1), LONGEST);
  }

  #period(taken) {
    return document.hidden ? HIDDEN_PERIOD : Math.max(PERIOD - taken, PERIOD / 4);
  }
}
