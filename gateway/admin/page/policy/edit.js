// An edit of the policy: what is wrong with it, or what it would change; and its way into the file it was opened from.

import { byId, el, setText } from "../dom.js";
import { counted, shown } from "../text.js";
import { diff } from "./diff.js";
import { SIMULATION, whatIf } from "./what_if.js";


const DURATION = "it takes up to 10 s on an idle processor, and longer on a busy one";
const PATIENCE = 30000; // milliseconds: a large policy takes its time

export class Edit {
  #api = () => null;
  #changed;
  #isPutting = false;
  #opened = null; // file, tenant, digest and first line of the passage that is edited; null: a pasted text

  /** `api()` is the one that is signed in to; `changed()` is told when the policy was. */
  constructor(api, changed) {
    this.#api = api;
    this.#changed = changed;
    this.field = byId("policy-edit");
    this.result = byId("policy-checked");
    byId("policy-start").addEventListener("click", () => this.#start());
    byId("policy-check").addEventListener("click", () => this.#check());
    byId("policy-what-if").addEventListener("click", ({ currentTarget }) => this.#whatIf(currentTarget));
    byId("policy-put").addEventListener("click", () => this.#put());
    byId("policy-open").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#open(byId("policy-tenant").value.trim());
    });
    this.field.addEventListener("input", () => this.result.replaceChildren()); // it was about another text
  }

  async #start() {
    const answer = await this.#asked(this.#api().get("policy/text", PATIENCE));
    if (answer === null) return;
    if (answer.text === null) return this.#say("It is too long to be edited here: use sluice policy diff.");
    this.#show(answer.text, null);
  }

  async #open(tenant) {
    const query = tenant ? `?${new URLSearchParams({ tenant })}` : "";
    const answer = await this.#asked(this.#api().get(`policy/source${query}`, PATIENCE));
    if (answer === null) return;
    this.#show(answer.text || `  ${tenant}:\n    weight: 1\n`, answer);
    if (answer.obstacle) this.#say(`It can be tried here and not put into force: ${answer.obstacle}.`);
  }

  #show(text, opened) {
    this.#opened = opened;
    this.field.value = text;
    this.field.focus();
    this.field.setSelectionRange(0, 0);
    byId("policy-put").hidden = opened === null;
    const place = opened && (opened.tenant ? `${opened.file}, from line ${opened.first_line}` : opened.file);
    setText(byId("policy-place"), place ? shown(place, 200) : "");
    this.#say("");
  }

  /** Once at a time: the second press of a double click would be refused, since the first has changed the file. */
  async #put(edit = { ...this.#passage(), text: this.field.value }, path = "policy/source") {
    if (this.#isPutting) return;
    this.#isPutting = true;
    this.#say("Putting it into force…");
    let answer = null;
    try {
      answer = await this.#asked(this.#api().post(path, edit, PATIENCE));
    } finally {
      this.#isPutting = false;
    }
    if (answer === null) return;
    if (!answer.valid) return this.result.replaceChildren(...this.#mistakes(answer));
    const done = answer.written ? "It is in force, and in the file." : `Not written: ${answer.obstacle}. The patch:`;
    const lines = answer.patch ? el("pre", { class: "patch", tabindex: 0 }, answer.patch) : diff(answer.changes);
    this.result.replaceChildren(el("p", { class: `verdict ${answer.written ? "good" : "problem"}` }, shown(done, 600)), lines);
    if (!answer.written) return;
    this.#changed();
    if (this.#opened) {
      byId("policy-put").hidden = true; // what was opened is another text now
      this.#opened = null;
    }
  }

  undo(edit) {
    return this.#put({ edit }, "policy/undo");
  }

  #passage() {
    const { file, tenant, digest } = this.#opened;
    return { file, tenant, digest };
  }

  async #check() {
    if (this.field.value.trim() === "") return this.#say("Paste a policy first, or start from the policy in force.");
    this.#say("Checking…");
    const answer = await this.#checked(this.field.value);
    if (answer !== null) this.result.replaceChildren(...(answer.valid ? verdict(answer) : this.#mistakes(answer)));
  }

  #checked(text) {
    const asked = this.#opened
      ? this.#api().post("policy/source", { ...this.#passage(), text, dry_run: true }, PATIENCE)
      : this.#api().post("policy/check", { text }, PATIENCE);
    return this.#asked(asked);
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
    const edit = { ...(this.#opened ? this.#passage() : {}), text };
    let checked = null;
    let answer = null;
    try {
      checked = await this.#checked(text);
      answer = checked?.valid ? await this.#asked(this.#api().post("policy/what-if", edit, SIMULATION)) : null;
    } finally {
      clearInterval(timer);
      button.disabled = false;
    }
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

  /** Only an edit of a file names one, which may be another than the opened one. */
  #mistake({ file, line, column, path, message }) {
    const isElsewhere = file !== undefined && file !== this.#opened?.file;
    if (isElsewhere) return el("li", {}, shown([file, line, column, path, message].filter(Boolean).join(": "), 600));
    const show = { type: "button", class: "link", click: () => this.#select(line - (this.#opened?.first_line ?? 1) + 1) };
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
  const counts = tenants === undefined ? "" : `: ${counted(classes, "class", "classes")}, ${counted(tenants, "tenant")}`;
  const what = changes.length ? "It would change:" : "It changes nothing.";
  const heading = el("p", { class: "verdict good" }, `Valid${counts}. ${what}`);
  return changes.length ? [heading, diff(changes, truncated)] : [heading];
}
