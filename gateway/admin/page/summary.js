// The head of the page: what runs here, whether it is well, how full it is.

import { byId, el, fillChildren, setAttribute, setText } from "./dom.js";
import { counted, shown } from "./text.js";
import { bytes, duration, percent, whole } from "./units.js";

/** Facts that seldom change. */
export function showFacts(overview) {
  setText(byId("model"), shown(overview.model, 60));
  const facts = [
    ["Version", shown(overview.version, 24)],
    ["Device", shown(overview.device, 40)],
    ["Policy", shown(overview.policy.version, 24)],
    ["Store", shown(overview.store, 24)],
    ["Up", duration(Math.floor(overview.now - overview.started))],
    ["Serving", overview.draining ? "draining" : "yes"],
  ];
  fillChildren(byId("facts"), facts, pair, fillPair);
}

function pair() {
  return el("div", {}, el("dt"), el("dd"));
}

function fillPair(entry, [name, value]) {
  setText(entry.firstElementChild, name);
  setText(entry.lastElementChild, value);
}

/** How full the engine is, as numbers and bars. */
export function showGauges({ engine }) {
  const used = engine.kv_blocks_used * engine.block_bytes;
  const gauges = [
    [
      "Running",
      `${whole(engine.running)} / ${whole(engine.max_num_seqs)}`,
      "sequences",
      engine.running / engine.max_num_seqs,
    ],
    ["Waiting", whole(engine.waiting), "sequences", null],
    [
      "KV pool",
      percent(engine.kv_blocks_used / engine.kv_blocks),
      `${bytes(used)} of ${bytes(engine.kv_blocks * engine.block_bytes)}`,
      engine.kv_blocks_used / engine.kv_blocks,
    ],
    ["Engine busy", percent(engine.busy), "of the last 10\u00a0s", engine.busy],
  ];
  fillChildren(byId("gauges"), gauges, gauge, fillGauge);
}

function gauge() {
  return el(
    "div",
    { class: "panel gauge" },
    el("dt"),
    el(
      "dd",
      {},
      el("b"),
      " ",
      el("span", { class: "muted" }),
      el("span", { class: "track", "aria-hidden": "true" }, el("span")),
    ),
  );
}

function fillGauge(entry, [name, value, unit, share]) {
  setText(entry.querySelector("dt"), name);
  setText(entry.querySelector("b"), value);
  setText(entry.querySelector(".muted"), unit);
  const track = entry.querySelector(".track");
  setAttribute(track, "class", share === null ? "track away" : "track");
  track.firstElementChild.style.width = `${100 * Math.min(Math.max(share || 0, 0), 1)}%`;
}

/** What an operator should know first: [{serious, text, remedy}], most serious first. */
export function troubles(overview, findings, unanswered) {
  const own = [
    overview.store === "unavailable" && {
      serious: true,
      text: "The store does not answer: limits are enforced from what this gateway last knew.",
    },
    overview.policy.problem && {
      serious: true,
      text: `The policy file was not taken: ${shown(overview.policy.problem, 300)}`,
    },
    overview.draining && {
      serious: false,
      text: `Draining: nothing new is taken; ${counted(overview.engine.running, "sequence")} still running.`,
    },
    ...findings.map((found) => ({
      serious: found.severity === "serious",
      text: `${shown(found.trouble, 160)}: ${shown(found.evidence, 240)}.`,
      remedy: found.remedy,
    })),
    ...unanswered.map(({ part, error }) => ({
      serious: false,
      text: `What is shown of ${part} is old: ${shown(error.message, 160)}.`,
    })),
  ];
  return own.filter(Boolean).sort((one, other) => other.serious - one.serious);
}

export function showTroubles(found) {
  fillChildren(
    byId("problems"),
    found,
    () => el("li", {}, el("b"), " ", el("span"), " ", el("span", { class: "remedy" })),
    (entry, { serious, text, remedy }) => {
      setAttribute(entry, "class", serious ? "serious" : "warning");
      setText(entry.children[0], serious ? "Serious" : "Warning");
      setText(entry.children[1], text);
      setText(entry.children[2], remedy ? `Remedy: ${shown(remedy, 240)}.` : "");
    },
  );
}
