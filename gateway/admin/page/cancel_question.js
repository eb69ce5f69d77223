// The question before a request is cancelled, and how it went.

import { Refused, failure, segment } from "./api.js";
import { announce, byId, el, setText } from "./dom.js";
import { address } from "./requests.js";
import { counted, shortId, shown } from "./text.js";

/** Nothing happens before the second press. */
export class CancelQuestion {
  #api = null;
  #row = null;

  constructor() {
    this.dialog = byId("cancel-dialog");
    this.title = el("h2", { id: "cancel-title" });
    this.text = el("p", { id: "cancel-text" });
    this.result = el("p", { class: "problem", role: "alert" });
    this.keep = el("button", { type: "button", click: () => this.dialog.close() });
    this.confirm = el("button", { type: "button", class: "danger", click: () => this.#cancel() }, "Cancel the request");
    const answers = el("div", { class: "answers" }, this.keep, this.confirm);
    this.dialog.replaceChildren(this.title, this.text, this.result, answers);
  }

  ask(api, row) {
    this.#api = api;
    this.#row = row;
    const made = counted(row.output_tokens, "token");
    setText(this.title, `Cancel request ${shortId(row.id)}?`);
    setText(this.text, `It belongs to ${shown(row.tenant, 60)} and has made ${made}. What it used is charged.`);
    this.#offer("", "Keep it running");
    this.dialog.showModal();
    this.keep.focus();
  }

  /** What went wrong, if anything, and how to leave. */
  #offer(problem, leave) {
    setText(this.result, problem);
    setText(this.keep, leave);
    this.confirm.hidden = problem !== "";
  }

  async #cancel() {
    this.confirm.disabled = true;
    const error = await failure(this.#api.post(`requests/${segment(address(this.#row))}/cancel`));
    this.confirm.disabled = false;
    if (error !== null) return this.#explain(error);
    this.dialog.close();
    announce(`Request ${shortId(this.#row.id)} is cancelled.`);
  }

  #explain(error) {
    const over = error instanceof Refused && error.status === 404;
    this.#offer(over ? "It has ended by itself." : `Not cancelled: ${error.message}.`, "Close");
    this.keep.focus();
  }
}
