// A question to the gateway that may take it seconds: asked when it is due, and at once when it has become another.

import { Search } from "../search.js";
import { shown } from "../text.js";

const PERIOD = 15000; // milliseconds between two looks at what may be thousands of ledgers
const PAUSE = 20; // times as long as an answer took, before the next is asked for
const PATIENCE = 60000;

export class Question {
  #api = null;
  #path = null; // of the latest question
  #told = null; // the path of the answer that is shown
  #due = -Infinity;
  #number = 0; // questions so far: an answer to another than the last comes too late
  #search = new Search();
  problem = ""; // why the latest is not answered

  /** `show(answer)`; `changed()` is told when the problem, or what is shown, may be another. */
  constructor(show, changed) {
    Object.assign(this, { show, changed });
  }

  get isDue() {
    return performance.now() >= this.#due;
  }

  /** Whether what is shown is the answer to another question than the latest. */
  get isOther() {
    return this.#told !== null && this.#told !== this.#path;
  }

  /** A question in flight is kept, unless it has become another; `first` begins the words of the filter in its path. */
  async ask(api, path, first) {
    const asked = path + this.#search.ask(first);
    if (api === this.#api && asked === this.#path && !this.isDue) return;
    const began = performance.now();
    const number = ++this.#number;
    this.problem = "";
    [this.#api, this.#path, this.#due] = [api, asked, Infinity]; // until it is answered
    this.changed();
    try {
      const answer = await api.get(asked, PATIENCE);
      if (number !== this.#number) return;
      this.#search.answered(answer.truncated);
      this.#told = asked;
      this.show(answer);
    } catch (error) {
      if (number !== this.#number) return;
      this.problem = `Not answered: ${shown(error.message, 300)}.`;
    }
    this.#due = performance.now() + Math.max(PERIOD, PAUSE * (performance.now() - began));
    this.changed();
  }
}
