// The window in which a key is made, edited, rotated or revoked, and the one place where its secret is shown, once.

import { segment } from "../api.js";
import { announce, byId, el } from "../dom.js";
import { shown } from "../text.js";
import { moment } from "../units.js";
import { SIMULATION, whatIf } from "../policy/what_if.js";
import { SettingsFields } from "./settings.js";

const SCOPES = { inference: "inference", limits: "reading its limits" };
const LIFETIMES = [
  ["", "never"],
  ["30", "in 30 days"],
  ["90", "in 90 days"],
  ["365", "in a year"],
];
const OVERLAPS = [
  ["24h", "for 24 hours"],
  ["1h", "for an hour"],
  ["168h", "for 7 days"],
  ["0s", "no more: at once"],
];

export class KeyDialog {
  #api;
  #changed;
  #tenants = el("datalist", { id: "key-tenants" });

  /** `api()` is the one that is signed in to; `changed()` is told when something was done. */
  constructor(api, changed) {
    this.#api = api;
    this.#changed = changed;
    this.dialog = byId("key-dialog");
    this.dialog.addEventListener("close", () => this.dialog.replaceChildren()); // nothing keeps a secret
    document.body.append(this.#tenants);
  }

  /** Tenants to choose from. */
  suggest(names) {
    this.#tenants.replaceChildren(...names.map((name) => el("option", { value: name })));
  }

  create() {
    const tenant = input({ id: "key-tenant", list: "key-tenants", required: true, maxlength: 256 });
    const name = input({ id: "key-name", maxlength: 64 });
    const lifetime = choice("key-expires", LIFETIMES);
    const [scopes, settings] = [scopeBoxes(Object.keys(SCOPES)), new SettingsFields()];
    const fields = [
      ...field("Tenant", tenant, "The tenant of its requests."),
      ...field("Name", name, "A label; may be empty."),
      ...field("Expires", lifetime),
      ...scopes.elements,
      ...settings.elements,
    ];
    const asked = (unnamed) => ({
      tenant: tenant.value.trim(),
      name: name.value.trim() || null,
      expires_days: lifetime.value ? Number(lifetime.value) : null,
      scopes: scopes.chosen(),
      settings: settings.text,
      unnamed,
    });
    this.#show("New API key", fields, "Create the key", (unnamed) => this.#api().post("keys", asked(unnamed)));
    tenant.focus();
  }

  /** What stays as it was is not sent, and so not changed by a rounded date; what another tab has edited is kept. */
  edit(row) {
    const name = input({ id: "key-name", maxlength: 64, value: row.name });
    const day = row.expires === null ? "" : new Date(1000 * row.expires).toISOString().slice(0, 10);
    const expires = input({ id: "key-expires", type: "date", value: day });
    const [scopes, settings] = [scopeBoxes(row.scopes), new SettingsFields(row.settings)];
    const text = settings.text;
    const fields = [
      el("p", { class: "whole" }, `${whose(row)}. Its secret stays.`),
      ...field("Name", name),
      ...field("Expires", expires, "At the day's first moment in UTC; empty: never."),
      ...scopes.elements,
      ...settings.elements,
    ];
    const path = `keys/${segment(row.id)}/edit`;
    fields.push(...this.#whatIf(row, settings));
    this.#show(`Edit key ${shown(row.id, 24)}`, fields, "Put into force", () =>
      this.#api().post(path, {
        edition: row.edition,
        name: name.value.trim(),
        scopes: scopes.chosen(),
        ...(expires.value === day ? {} : { expires: expires.value || "never" }),
        ...(settings.text === text ? {} : { settings: settings.text }),
      }),
    );
    name.focus();
  }

  /** A button that simulates the last hour under the settings, and the place of its answer. */
  #whatIf(row, settings) {
    const place = el("div", { class: "whole", id: "key-what-if-answer", role: "status" });
    const ask = async ({ currentTarget: button }) => {
      button.disabled = true;
      place.replaceChildren(el("p", { class: "muted" }, "Simulating…"));
      const asked = this.#api().post(`keys/${segment(row.id)}/what-if`, { settings: settings.text }, SIMULATION);
      place.replaceChildren(...(await asked.then(whatIf, (error) => [el("p", { class: "problem" }, `${shown(error.message, 400)}.`)])));
      button.disabled = false;
    };
    return [el("button", { type: "button", id: "key-what-if", class: "whole", click: ask }, "What it would have done to the last hour"), place];
  }

  rotate(row) {
    const overlap = choice("key-overlap", OVERLAPS);
    const fields = [
      el("p", { class: "whole" }, `${whose(row)} gets a new secret; its id, limits and usage stay.`),
      ...field("The old one stays valid", overlap),
    ];
    const path = `keys/${segment(row.id)}/rotate`;
    this.#show(`Rotate key ${shown(row.id, 24)}?`, fields, "Rotate", () =>
      this.#api().post(path, { overlap: overlap.value }),
    );
  }

  revoke(row) {
    const text = `${whose(row)} is refused from then on, here at once and elsewhere within a second.`;
    const fields = [el("p", { class: "whole" }, `${text} Requests that run are not ended. It cannot be undone.`)];
    const path = `keys/${segment(row.id)}/revoke`;
    const form = this.#show(`Revoke key ${shown(row.id, 24)}?`, fields, "Revoke", () => this.#api().post(path), true);
    form.querySelector(".answers button").focus();
  }

  /** `send(unnamed)` does it, once the form is sent. */
  #show(title, fields, verb, send, danger = false) {
    const problem = el("p", { class: "problem", role: "alert" });
    const keep = el("button", { type: "button", click: () => this.dialog.close() }, "Close");
    const submit = el("button", { type: "submit", class: danger ? "danger" : "primary" }, verb);
    const anyway = el("button", { type: "submit", hidden: true, value: "unnamed" }, "Create it nevertheless");
    const answers = el("div", { class: "answers" }, keep, anyway, submit);
    const form = el("form", {}, el("div", { class: "fields" }, ...fields), problem, answers);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send(form, () => send(event.submitter === anyway), { problem, anyway });
    });
    form.addEventListener("input", () => (anyway.hidden = true)); // it was about another name
    this.dialog.replaceChildren(el("div", { class: "heading" }, el("h2", { id: "key-title" }, title)), form);
    if (!this.dialog.open) this.dialog.showModal();
    return form;
  }

  async #send(form, send, { problem, anyway }) {
    const controls = [...form.querySelectorAll("button, input, select, textarea")];
    for (const control of controls) control.disabled = true;
    problem.textContent = "";
    try {
      const answer = await send();
      if (answer.key) this.#showSecret(answer);
      else this.dialog.close();
      announce(answer.revoked ? "The key is revoked." : answer.changes ? "The key is changed." : "The key is ready.");
    } catch (error) {
      problem.textContent = `Not done: ${shown(error.message, 400)}.`;
      anyway.hidden = error.code !== "tenant_not_named";
    } finally {
      for (const control of controls) control.disabled = false;
    }
    this.#changed().catch(() => null); // what has become of it is asked for again soon
  }

  #showSecret({ key, id, tenant, old_until: until }) {
    const secret = el("code", { class: "secret", id: "key-secret", tabindex: 0 }, key);
    const copied = el("span", { class: "muted", role: "status" });
    const copy = el("button", { type: "button", class: "primary", click: () => this.#copy(secret, copied) }, "Copy");
    const close = el("button", { type: "button", click: () => this.dialog.close() }, "I have stored it");
    const old = until ? ` The old secret is valid until ${moment(until)}.` : "";
    this.dialog.replaceChildren(
      el("div", { class: "heading" }, el("h2", { id: "key-title" }, `Key ${shown(id, 24)} of ${shown(tenant, 80)}`)),
      el("p", {}, `This is its secret. It is shown this once and stored nowhere: store it now.${old}`),
      secret,
      el("div", { class: "answers" }, copied, close, copy),
    );
    copy.focus();
  }

  /** A page that is not served over TLS or from this machine has no clipboard: then it is marked, to be copied by hand. */
  async #copy(secret, copied) {
    try {
      await navigator.clipboard.writeText(secret.textContent);
      copied.textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(secret);
      copied.textContent = "Marked: copy it with the keyboard.";
    }
  }
}

function whose({ id, tenant, name }) {
  return `Key ${shown(id, 24)}${name ? ` (${shown(name, 64)})` : ""} of ${shown(tenant, 80)}`;
}

function input(attributes) {
  return el("input", { type: "text", autocomplete: "off", spellcheck: "false", ...attributes });
}

function choice(id, options) {
  return el("select", { id }, ...options.map(([value, title]) => el("option", { value }, title)));
}

/** A box for each scope; `chosen()` are the marked ones. */
function scopeBoxes(marked) {
  const boxes = Object.keys(SCOPES).map((value) => el("input", { type: "checkbox", value, checked: marked.includes(value) }));
  const labels = boxes.map((box) => el("label", {}, box, SCOPES[box.value]));
  const elements = [el("span", {}, "May be used for"), el("fieldset", { "aria-label": "May be used for" }, ...labels)];
  return { elements, chosen: () => boxes.filter((box) => box.checked).map((box) => box.value) };
}

function field(title, control, note = "") {
  const label = el("label", { for: control.id }, title);
  return note ? [label, control, el("p", { class: "muted" }, note)] : [label, control];
}
