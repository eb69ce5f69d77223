// The window that shows one tenant: what it has, what is left of its limits, what it runs and how its last requests went.

import { Detail, factList } from "./detail.js";
import { byId, el } from "./dom.js";
import { plainTable } from "./plain_table.js";
import { idButton, outcome } from "./requests.js";
import { shown } from "./text.js";
import { age, bytes, duration, moment, money, percent, whole } from "./units.js";

const MOST = 12; // keys and requests
const LIMITS = [["Limit"], ["Used", true], ["Left", true], ["Of", true], ["Full again in", true]];
const LIVE = [["Request"], ["State"], ["Age", true], ["Prompt", true], ["Output", true], ["Reason"]];
const ENDED = [["Request"], ["Outcome"], ["Ended", true], ["Took", true], ["First token", true]];

/** `openRequest(row)` shows one of the tenant's requests. */
export function tenantDetail(openRequest) {
  return new Detail(byId("tenant-dialog"), "tenant-title", "tenants", (tenant) => content(tenant, openRequest));
}

function content(tenant, openRequest) {
  const limits = (tenant.limits ?? []).map(limitCells);
  const live = (tenant.live ?? []).slice(0, MOST).map((row) => liveCells(row, openRequest));
  const ended = (tenant.recent ?? []).slice(0, MOST).map((row) => endedCells(row, openRequest));
  return [
    factList(facts(tenant)),
    ...part("Limits", LIMITS, limits, "No limit applies to it."),
    ...part("Its requests now", LIVE, live, "No live request."),
    ...part("Its last requests", ENDED, ended, "No recent request."),
  ];
}

function facts(tenant) {
  const keys = (tenant.keys ?? []).map(({ id }) => shown(id, 24));
  const more = keys.length > MOST ? ` and ${whole(keys.length - MOST)} more` : "";
  return {
    Class: shown(tenant.class ?? "–", 24),
    Team: tenant.team ? shown(tenant.team) : "none",
    Weight: String(tenant.weight),
    "Engine share": percent(tenant.share),
    "Engine time": duration(tenant.service_seconds),
    Credit: duration(tenant.credit_seconds),
    Running: whole(tenant.running),
    Waiting: whole(tenant.waiting),
    KV: bytes(tenant.kv_bytes),
    "KV charged": bytes(tenant.kv_charged_bytes),
    "KV unused": bytes(tenant.kv_wasted_bytes),
    "KV idle, cached": bytes(tenant.kv_cached_bytes),
    "KV kept by its floor": bytes(tenant.kv_kept_bytes),
    "KV pinned, idle": bytes(tenant.kv_pinned_bytes),
    "KV swapped": bytes(tenant.kv_swapped_bytes),
    Requests: whole(tenant.requests),
    Refused: whole(tenant.refused),
    "Prompt tokens": whole(tenant.prompt_tokens),
    "Output tokens": whole(tenant.output_tokens),
    Keys: keys.length ? keys.slice(0, MOST).join(", ") + more : "none",
  };
}

function limitCells({ name, resource, window, left, amount, capacity = amount, currency, resets_in }) {
  const unit = currency ? (value) => money(value, currency) : resource.includes("bytes") ? bytes : whole;
  const most = capacity === amount ? unit(amount) : `${unit(amount)}, ${unit(capacity)} at once`;
  if (window === "session") return [shown(name, 40), "–", "–", most, "of each session"];
  if (left === null) return [shown(name, 40), "unknown", "unknown", most, "unknown"];
  const used = capacity ? percent(1 - Math.min(left / capacity, 1)) : "all";
  return [shown(name, 40), used, unit(left), most, window ? fullAgain(resets_in) : "as requests end"];
}

function fullAgain(seconds) {
  return seconds ? duration(seconds) : "is full";
}

function liveCells(row, openRequest) {
  const { state, age: seconds, prompt_tokens, output_tokens, reason } = row;
  const cells = [shown(state, 24), age(seconds), whole(prompt_tokens), whole(output_tokens)];
  return [idButton(() => row, openRequest), ...cells, reason ? shown(reason, 120) : ""];
}

function endedCells(row, openRequest) {
  const { ended, duration: took, ttft } = row;
  return [idButton(() => row, openRequest), outcome(row), moment(ended), duration(took), duration(ttft)];
}

function part(title, columns, rows, empty) {
  return [el("h3", {}, title), rows.length ? plainTable(title, columns, rows) : el("p", { class: "muted" }, empty)];
}
