// The words of the filter, for lists that are longer than an answer: the gateway looks for them there.

import { segment } from "./api.js";
import { byId } from "./dom.js";

export class Search {
  #isLong = false;
  #words = "";

  /** The words to ask for now; none while the page has the whole list, and finds them itself. */
  get words() {
    return this.#isLong ? byId("filter").value.trim() : "";
  }

  /** Whether the words are others than were asked for last. */
  get isOther() {
    return this.words !== this.#words;
  }

  /** The end of a path that asks for the words; `first` begins it. */
  ask(first = "?") {
    this.#words = this.words;
    return this.#words ? `${first}contains=${segment(this.#words)}` : "";
  }

  /** `truncated`: how many rows the answer lacks. */
  answered(truncated) {
    if (!this.#words) this.#isLong = truncated > 0;
  }
}
