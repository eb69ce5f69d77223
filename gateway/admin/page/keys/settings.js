// What a key may do of its own: fields for its limits, models, classes and tags, and the YAML that they make.

import { el } from "../dom.js";
import { amountInWords } from "../policy/in_force.js";
import { shown } from "../text.js";

const LIMITS = "cost: 50/month\nrequests: 600/min\ntokens: [100k/min, 50M/month]";

export class SettingsFields {
  constructor({ limits = {}, models = [], classes = [], tags = {}, ...others } = {}) {
    this.others = others; // such as highest_class, which has no field
    this.limits = el("textarea", { id: "key-limits", rows: 3, spellcheck: "false", placeholder: LIMITS, maxlength: 2000 });
    this.limits.value = Object.entries(limits).map(([name, amount]) => `${name}: ${yaml(amount)}`).join("\n");
    this.models = line("key-models", models.join(", "), "all of its tenant's");
    this.classes = line("key-classes", classes.join(", "), "all of its tenant's");
    this.tags = line("key-tags", Object.entries(tags).map((pair) => pair.join("=")).join(", "), "project=search, team=ml");
  }

  get elements() {
    return [
      ...labelled("Limits", this.limits, "Besides its tenant's, a line for each, in the words of policy files."),
      ...labelled("Models", this.models),
      ...labelled("Classes", this.classes),
      ...labelled("Tags", this.tags, "For reports of spend."),
    ];
  }

  /** In the words that a policy has for a key. */
  get text() {
    const limits = this.limits.value.split("\n").filter((one) => one.trim());
    const lists = { models: items(this.models), classes: items(this.classes) };
    const tags = Object.fromEntries(items(this.tags).map((item) => item.split("=").map((part) => part.trim())));
    const fields = Object.entries({ ...this.others, ...lists, tags }).filter(([, value]) => Object.keys(value).length);
    const rest = fields.map(([name, value]) => `${name}: ${yaml(value)}`);
    return [...(limits.length ? ["limits:", ...limits.map((one) => `  ${one.trim()}`)] : []), ...rest].join("\n");
  }
}

/** The same in a few words, for a table. */
export function settingsInWords({ limits = {}, tags = {}, ...lists }) {
  const parts = Object.entries(limits).map(([name, amount]) => `${name} ${amountInWords(amount)}`);
  const others = Object.entries(lists).map(([name, value]) => `${name.replace("_", " ")} ${[value].flat().join(", ")}`);
  const words = [...parts, ...others, ...Object.entries(tags).map((pair) => pair.join("="))].join("; ");
  return words && shown(words, 300);
}

/** With spaces in place of JSON's line breaks: a comma may be of a text, such as an address. */
function yaml(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 1).replace(/(?<=[[{])\n *|\n *(?=[\]}])/g, "").replace(/\n */g, " ");
}

function items(field) {
  return field.value.split(",").map((item) => item.trim()).filter(Boolean);
}

function line(id, value, placeholder) {
  return el("input", { id, type: "text", autocomplete: "off", spellcheck: "false", maxlength: 1000, value, placeholder });
}

function labelled(title, control, note = "") {
  const label = el("label", { for: control.id }, title);
  return note ? [label, control, el("p", { class: "muted" }, note)] : [label, control];
}
