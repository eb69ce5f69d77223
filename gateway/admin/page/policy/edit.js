// A pasted edit of the policy: what is wrong with it, or what it would change.

import { byId, el } from "../dom.js";
import { counted, shown } from "../text.js";
import { diff } from "./diff.js";
import { whatIf } from "./what_if.js";

const SIMULATION = 70000;
const DURATION = "it takes up to 10 s on an idle processor, and longer on a busy one";
const PATIENCE = 30000; // milliseconds: a large policy takes its time

export class Edit {
  #api = () => null;

  /** `api()` is the one that is signed in to. */
  constructor(api) {
    this.#api = api;
    this.field = byId("policy-edit");
    this.result = byId("policy-checked");
    byId("policy-start").addEventListener("click", () => this.#start());
    byId("policy-check").addEventListener("click", () => this.#check());
    byId("policy-what-if").addEventListener("click", ({ currentTarget }) => this.#whatIf(currentTarget));
    this.field.addEventListener("input", () => this.result.replaceChildren()); // it was about another text
  }

  async #start() {
    const answer = await this.#asked(this.#api().get("policy/text", PATIENCE));
    if (answer === null) return;
    if (answer.text === null) return this.#say("It is too long to be edited here: use sluice policy diff.");
    this.field.value = answer.text;
    this.field.focus();
    this.#say("");
  }

  async #check() {
    if (this.field.value.trim() === "") return this.#say("Paste a policy first, or start from the policy in force.");
    this.#say("Checking…");
    const answer = await this.#asked(this.#api().post("policy/check", { text: this.field.value }, PATIENCE));
    if (answer !== null) this.result.replaceChildren(...(answer.valid ? verdict(answer) : this.#mistakes(answer)));
  }

  /** Checked first: a mistake has a line there. */
  async #whatIf(button) {
    const text = this.field.value;
    if (text.trim() === "") return this.#say("Paste a policy first, or start from the policy in force.");
    button.disabled = true;
    const began = performance.now();
    const tick = () => this.#say(`Simulating, for ${Math.round((performance.now() - began) / 1000)} s so far; ${DURATION}…`);
    tick();
    const timer = setInterval(tick, 1000);
    const checked = await this.#asked(this.#api().post("policy/check", { text }, PATIENCE));
    const answer = checked?.valid ? await this.#asked(this.#api().post("policy/what-if", { text }, SIMULATION)) : null;
    clearInterval(timer);
    button.disabled = false;
    if (checked && !checked.valid) this.result.replaceChildren(...this.#mistakes(checked));
    else if (answer && this.field.value === text) this.result.replaceChildren(...verdict(checked), ...whatIf(answer));
  }

  /** Null, with a word on why, where nothing useful came back. */
  async #asked(promise) {
    try {
      return await promise;
    } catch (error) {
      this.#say(`Not answered: ${error.message}.`);
      return null;
    }
  }

  #say(text) {
    this.result.replaceChildren(...(text ? [el("p", { class: "note" }, shown(text, 400))] : []));
  }

  #mistakes({ problems }) {
    const heading = el("p", { class: "verdict problem" }, `Not valid: ${counted(problems.length, "problem")}.`);
    return [heading, el("ul", { class: "mistakes" }, ...problems.map((problem) => this.#mistake(problem)))];
  }

  #mistake({ line, column, path, message }) {
    const show = { type: "button", class: "link", click: () => this.#select(line) };
    const place = line ? [el("button", show, `Line ${line}, column ${column}`)] : [];
    return el("li", {}, ...place, shown([path, message].filter(Boolean).join(": "), 400));
  }

  /** Marks the line in the text. */
  #select(number) {
    const lines = this.field.value.split("\n");
    const start = lines.slice(0, number - 1).reduce((sum, line) => sum + line.length + 1, 0);
    this.field.focus();
    this.field.setSelectionRange(start, start + (lines[number - 1] ?? "").length);
    this.field.scrollTop = ((number - 4) / lines.length) * this.field.scrollHeight;
  }
}

function verdict({ changes, truncated, classes, tenants }) {
  const counts = `${classes} ${classes === 1 ? "class" : "classes"}, ${counted(tenants, "tenant")}`;
  const what = changes.length ? "It would change:" : "It changes nothing.";
  const heading = el("p", { class: "verdict good" }, `Valid: ${counts}. ${what}`);
  return changes.length ? [heading, diff(changes, truncated)] : [heading];
}
