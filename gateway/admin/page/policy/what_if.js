// What an edit would have done to the last hour: simulated figures of both policies, and what they leave out.

import { el } from "../dom.js";
import { plainTable } from "../plain_table.js";
import { counted, shown } from "../text.js";
import { duration, percent, whole } from "../units.js";

export const SIMULATION = 70000; // milliseconds for its answer

const FIGURES = [[""], ["As it is", true], ["Edited", true]];
const ONES = [
  [""],
  ["Completed", true],
  ["Refused", true],
  ["In time", true],
  ["First token p50", true, "major"],
  ["First token p99", true],
];
const MOST = 20; // tenants

export function whatIf(answer) {
  const { before, after, requests, left_out: leftOut, span } = answer;
  const rest = leftOut ? `; ${whole(leftOut)} more were left out, for want of time or as older ones` : "";
  const what = `Simulated: ${counted(requests, "request")} of the last ${duration(span)}, under both policies, on the step times that this gateway has measured${rest}. No prompt was computed.`;
  const tenants = answer.tenants.slice(0, MOST);
  return [
    el("h3", {}, "What it would have done to the last hour"),
    el("p", { class: "muted" }, what),
    plainTable("Figures of both policies", FIGURES, figures(before, after)),
    ...remarks("Not simulated", answer.not_simulated),
    ...remarks("Assumptions", answer.assumed),
    ...part("Classes: as it is → edited", answer.classes),
    ...part(`Tenants: as it is → edited${answer.tenants.length > MOST ? `, the first ${MOST}` : ""}`, tenants),
  ];
}

function figures(before, after) {
  const row = (title, read) => [title, read(before), read(after)];
  return [
    row("Completed", ({ completed }) => whole(completed)),
    row("Refused", ({ refused, refusals }) => `${whole(refused)}${reasons(refusals)}`),
    row("Goodput", ({ goodput }) => percent(goodput)),
    row("First token, p50", ({ first_token: tail }) => duration(tail.p50)),
    row("First token, p99", ({ first_token: tail }) => duration(tail.p99)),
    row("Per token, p99", ({ per_token: tail }) => duration(tail.p99)),
    row("Preempted", ({ preemptions }) => whole(preemptions)),
    row("Engine busy", ({ busy }) => percent(busy)),
  ];
}

function reasons(refusals) {
  const named = Object.entries(refusals).map(([reason, count]) => `${shown(reason, 32)} ${whole(count)}`);
  return named.length ? ` (${named.slice(0, 3).join(", ")})` : "";
}

function remarks(title, lines) {
  if (lines.length === 0) return [];
  return [el("h3", {}, title), el("ul", { class: "mistakes" }, ...lines.map((line) => el("li", {}, shown(line, 300))))];
}

function part(title, rows) {
  return rows.length ? [el("h3", {}, title), plainTable(title, ONES, rows.map(cells))] : [];
}

function cells({ name, before, after }) {
  const pair = (read) => {
    const [old, now] = [before, after].map((one) => (one ? read(one) : "–"));
    return old === now ? now : `${old} → ${now}`;
  };
  return [
    shown(name, 60),
    pair(({ completed }) => whole(completed)),
    pair(({ refused }) => whole(refused)),
    pair(({ goodput }) => percent(goodput)),
    pair(({ first_token: tail }) => duration(tail.p50)),
    pair(({ first_token: tail }) => duration(tail.p99)),
  ];
}
