// A window over the page that shows one thing, and follows it while it is open.

import { Refused, segment } from "./api.js";
import { el, setText } from "./dom.js";

const FOCUSABLE = "button, [tabindex]";

/** What it shows is asked for again each time `refresh` is called; `content(answer)` makes nodes of it. */
export class Detail {
  #asked = null;

  constructor(dialog, titleId, path, content) {
    Object.assign(this, { dialog, path, content });
    this.title = el("h2", { id: titleId });
    this.body = el("div");
    const close = el("button", { type: "button", click: () => dialog.close() }, "Close");
    dialog.replaceChildren(el("div", { class: "heading" }, this.title, close), this.body);
    dialog.addEventListener("close", () => this.body.replaceChildren()); // another admin may sign in
  }

  async open(api, name, title) {
    this.#asked = { api, name };
    setText(this.title, title);
    this.body.replaceChildren(el("p", { class: "muted" }, "Asking…"));
    if (!this.dialog.open) this.dialog.showModal();
    await this.refresh();
  }

  async refresh() {
    if (!this.dialog.open || this.#isBusy()) return;
    const asked = this.#asked;
    const content = await asked.api.get(`${this.path}/${segment(asked.name)}`).then(this.content, problem);
    if (asked === this.#asked && this.dialog.open && !this.#isBusy()) replaceInPlace(this.body, content);
  }

  /** A button in it is being pressed, or text in it is marked. */
  #isBusy() {
    const marked = document.getSelection();
    const isMarked = !marked.isCollapsed && this.body.contains(marked.anchorNode);
    return isMarked || this.body.querySelector(":active") !== null;
  }
}

/** New content in which the focus and what was scrolled to are where they were. */
function replaceInPlace(body, content) {
  const scrolled = [...body.querySelectorAll(".scroller")].map(({ scrollTop }) => scrollTop);
  const focused = [...body.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement);
  body.replaceChildren(...content);
  body.querySelectorAll(".scroller").forEach((scroller, index) => (scroller.scrollTop = scrolled[index] ?? 0));
  if (focused >= 0) body.querySelectorAll(FOCUSABLE)[focused]?.focus({ preventScroll: true });
}

function problem(error) {
  const forgotten = error instanceof Refused && error.status === 404;
  const text = forgotten ? "The gateway has no record of it (any more)." : `Not answered: ${error.message}.`;
  return [el("p", { class: "problem" }, text)];
}

/** Names and values beside each other. */
export function factList(facts) {
  const entries = Object.entries(facts).map(([name, value]) => [
    el("dt", {}, name),
    el("dd", {}, el("bdi", {}, value)),
  ]);
  return el("dl", { class: "facts" }, ...entries.map((entry) => el("div", {}, ...entry)));
}
