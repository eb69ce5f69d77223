// The window that shows one tenant: what it has, what is left of its limits, how its last requests went.

import { Detail, factList } from "./detail.js";
import { byId, el } from "./dom.js";
import { plainTable } from "./plain_table.js";
import { idButton } from "./requests.js";
import { shown } from "./text.js";
import { bytes, clock, duration, percent, whole } from "./units.js";

const MOST = 12; // keys and requests
const LIMITS = [["Limit"], ["Of"], ["Left", true], ["Amount", true], ["Full again in", true]];
const REQUESTS = [["Request"], ["Outcome"], ["Ended", true], ["Took", true], ["First token", true]];

/** `openRequest(row)` shows one of the tenant's requests. */
export function tenantDetail(openRequest) {
  return new Detail(byId("tenant-dialog"), "tenant-title", "tenants", (tenant) => content(tenant, openRequest));
}

function content(tenant, openRequest) {
  const limits = (tenant.limits ?? []).map(limitCells);
  const recent = (tenant.recent ?? []).slice(0, MOST).map((row) => requestCells(row, openRequest));
  return [
    factList(facts(tenant)),
    ...part("Limits", LIMITS, limits, "No limit applies to it."),
    ...part("Its last requests", REQUESTS, recent, "None is remembered."),
  ];
}

function facts(tenant) {
  const keys = (tenant.keys ?? []).slice(0, MOST).map(({ id }) => shown(id, 24));
  return {
    Class: shown(tenant.class ?? "–", 24),
    Weight: whole(tenant.weight),
    "Engine share": percent(tenant.share),
    "Engine time": duration(tenant.service_seconds),
    Credit: duration(tenant.credit_seconds),
    Running: whole(tenant.running),
    Waiting: whole(tenant.waiting),
    KV: bytes(tenant.kv_bytes),
    Requests: whole(tenant.requests),
    Refused: whole(tenant.refused),
    "Prompt tokens": whole(tenant.prompt_tokens),
    "Output tokens": whole(tenant.output_tokens),
    Keys: keys.join(", ") || "–",
  };
}

function limitCells({ name, resource, left, amount, resets_in }) {
  const unit = resource.includes("bytes") ? bytes : whole;
  return [shown(name, 40), shown(resource, 40), unit(left), unit(amount), duration(resets_in)];
}

function requestCells(row, openRequest) {
  const { outcome, ended, duration: took, ttft } = row;
  return [idButton(() => row, openRequest), shown(outcome ?? "–", 40), clock(ended), duration(took), duration(ttft)];
}

function part(title, columns, rows, empty) {
  return [el("h3", {}, title), rows.length ? plainTable(title, columns, rows) : el("p", { class: "muted" }, empty)];
}
