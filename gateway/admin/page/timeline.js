// One request from left to right: a lane for each thing that happened to it, a bar for as long as it took.

import { el } from "./dom.js";
import { plainTable } from "./plain_table.js";
import { shown } from "./text.js";
import { duration } from "./units.js";

const LASTING = ["auth", "body", "reserve", "queue", "prefill", "decode", "preempted", "settle"];
const MOMENTS = ["first token", "resumed", "end"];
const MOST = 200; // entries in words
const COLUMNS = [["After", true], ["Took", true], ["What"], ["Detail"]];

/** `given`: {at, until, what, detail} in seconds since the request began; `length`: how far it has come. */
export function timeline(given, length) {
  const entries = closed(given);
  const end = Math.max(length ?? 0, ...entries.map(({ at, until }) => until ?? at), 1e-6);
  const corners = [el("span"), axis(end), el("span", { class: "took" })];
  const lanes = byWhat(entries).flatMap(([what, marks]) => lane(what, marks, end));
  const picture = el("div", { class: "lanes", "aria-hidden": "true" }, ...corners, ...lanes);
  return el("div", { class: "timeline" }, picture, inWords(entries));
}

/** What lasts and has no end of its own ended with the request, or goes on with it. */
function closed(entries) {
  const ended = entries.find(({ what }) => what === "end")?.at ?? null;
  return entries.map((entry) => {
    if (entry.until !== null || MOMENTS.includes(entry.what)) return { ...entry, goesOn: false };
    return { ...entry, until: ended, goesOn: ended === null };
  });
}

function byWhat(entries) {
  const found = new Map();
  for (const entry of entries) found.set(entry.what, [...(found.get(entry.what) ?? []), entry]);
  return [...found];
}

function axis(end) {
  const step = niceStep(end / 5);
  const ticks = Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, index) => tidy(index * step));
  const labels = ticks.map((at) => el("span", { class: "tick" }, el("span", {}, duration(at))));
  return el("div", { class: "axis" }, ...labels.map((label, index) => placed(label, ticks[index] / end)));
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return ([1, 2, 5].find((times) => times * power >= least) ?? 10) * power;
}

function tidy(value) {
  return Number(value.toPrecision(6));
}

function lane(what, marks, end) {
  const track = el("div", { class: "track" }, ...marks.map((mark) => bar(mark, end)));
  return [el("span", { class: "what" }, shown(what, 24)), track, el("span", { class: "took" }, took(marks, end))];
}

function took(marks, end) {
  if (MOMENTS.includes(marks[0].what)) return `at ${duration(marks[0].at)}`;
  const sum = marks.reduce((total, { at, until }) => total + (until ?? end) - at, 0);
  const parts = marks.length > 1 ? ` in ${marks.length}` : "";
  return `${duration(sum)}${parts}${marks.some(({ goesOn }) => goesOn) ? " so far" : ""}`;
}

function bar({ at, until, what, detail, goesOn }, end) {
  const isMoment = MOMENTS.includes(what);
  const shape = isMoment ? "mark" : goesOn ? "goes-on" : "";
  const mark = el("span", { class: `${shape} ${kind(what)}`, title: `${duration(at)}: ${shown(detail || what, 120)}` });
  const length = (until ?? end) - at;
  if (!isMoment) mark.style.width = `calc(${(100 * length) / end}% - 1px)`; // a gap between neighbours
  return placed(mark, at / end);
}

function kind(what) {
  return [...LASTING, ...MOMENTS].includes(what) ? `kind-${what.replace(" ", "-")}` : "";
}

function placed(node, share) {
  node.style.left = `${100 * share}%`;
  return node;
}

function inWords(entries) {
  const rows = entries.slice(0, MOST).map(({ at, until, what, detail, goesOn }) => {
    const took = goesOn ? "goes on" : until === null ? "" : duration(until - at);
    return [duration(at), took, shown(what, 24), detail ? shown(detail, 240) : ""];
  });
  const rest = entries.length - rows.length;
  if (rest > 0) rows.push(["", "", `and ${rest.toLocaleString("en")} more`, ""]);
  return plainTable("Timeline in words", COLUMNS, rows);
}
