// The head of the page: what runs here, whether it is well, how full it is.

import { byId, el, fillChildren, setAttribute, setText } from "./dom.js";
import { counted, shown } from "./text.js";
import { age, bytes, duration, percent, whole } from "./units.js";

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
  fillFacts(facts);
}

/** [name, value] of each, where the page has its facts. */
export function fillFacts(facts) {
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
    ["Waiting", whole(engine.waiting), waits(engine), null],
    [
      "KV pool",
      percent(engine.kv_blocks_used / engine.kv_blocks),
      `${bytes(used)} of ${bytes(engine.kv_blocks * engine.block_bytes)}`,
      engine.kv_blocks_used / engine.kv_blocks,
    ],
    ["Engine busy", percent(engine.busy), "of the last 10\u00a0s", engine.busy],
  ];
  fillGauges(gauges);
}

/** [name, value, unit, share or null] of each, where the page has its gauges. */
export function fillGauges(gauges) {
  fillChildren(byId("gauges"), gauges, gauge, fillGauge);
}

/** The sequences without a first token, queued or in prefill. */
function waits({ oldest_wait: oldest }) {
  return oldest > 0 ? `sequences, oldest waits ${age(oldest)}` : "sequences";
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

/** What an operator should know first: [{serious, gist, text, remedy, with}], most serious first. */
export function troubles(overview, findings, unanswered) {
  const own = [
    overview.store === "unavailable" && {
      serious: true,
      gist: "The store does not answer",
      text: "The store does not answer: limits are enforced from what this gateway last knew.",
    },
    overview.policy.problem && {
      serious: true,
      gist: "The policy file was not taken",
      text: `The policy file was not taken: ${shown(overview.policy.problem, 300)}`,
    },
    overview.draining && {
      serious: false,
      gist: "Draining: nothing new is taken",
      text: `Draining: nothing new is taken; ${counted(overview.engine.running, "sequence")} still running.`,
    },
  ];
  return allTroubles(own, findings, unanswered);
}

/** Those of the page's own, of which some may be false, with what the doctor found and what did not answer. */
export function allTroubles(own, findings, unanswered) {
  const found = [...own.filter(Boolean), ...ofFindings(findings), ...unanswered.map(ofPart)];
  return found.sort((one, other) => other.serious - one.serious);
}

/** Each with those that it explains, which stand behind it. */
function ofFindings(findings) {
  const causes = [];
  for (const finding of findings) {
    const cause = finding.cause ? causes.at(-1) : undefined;
    if (cause) cause.with.push(inOneLine(finding));
    else causes.push({ ...ofFinding(finding), with: [] });
    causes.at(-1).serious ||= finding.severity === "serious";
  }
  return causes;
}

function ofFinding({ severity, trouble, evidence, remedy, replicas }) {
  const gist = `${whose(replicas)}${shown(trouble, 160)}`;
  return { serious: severity === "serious", gist, text: `${gist}: ${shown(evidence, 240)}.`, remedy };
}

function inOneLine({ trouble, evidence, replicas }) {
  return `${whose(replicas)}${shown(trouble, 160)} (${shown(evidence, 240)})`;
}

function whose(replicas = []) {
  return replicas.length ? `${shown(replicas.join(", "), 80)}: ` : "";
}

function ofPart({ part, error }) {
  const gist = `What is shown of ${part} is old: ${shown(error.message, 160)}`;
  return { serious: false, gist, text: `${gist}.` };
}

/** One line that counts them and names the first, always there so that nothing moves when they come and go; it unfolds. */
export class Troubles {
  constructor(root) {
    this.root = root;
    [this.count, this.gist] = root.querySelector("summary").children;
    this.list = root.querySelector("ul");
  }

  /** `looked`: whether the gateway has been asked for its own findings yet. */
  show(found, looked) {
    const severity = found.length === 0 ? "none" : found.some(({ serious }) => serious) ? "serious" : "warning";
    setAttribute(this.root, "class", `problems ${severity}`);
    setText(this.count, found.length ? inNumbers(found) : looked ? "No trouble" : "Looking for troubles…");
    setText(this.gist, found.length ? `${found[0].gist}.` : "");
    const rows = found.length ? found : [{ none: true, text: looked ? "Nothing is wrong that the gateway knows of." : "" }];
    fillChildren(this.list, rows, () => el("li", {}, el("b"), " ", el("span"), el("ul")), fillTrouble);
  }
}

function fillTrouble(entry, trouble) {
  const severity = trouble.none ? "none" : trouble.serious ? "serious" : "warning";
  setAttribute(entry, "class", severity);
  setText(entry.firstElementChild, { serious: "Serious", warning: "Warning", none: "" }[severity]);
  setText(entry.children[1], inWords(trouble));
  fillChildren(entry.lastElementChild, trouble.with ?? [], () => el("li"), (line, text) => setText(line, `With it: ${text}.`));
}

function inWords({ text, remedy }) {
  return remedy ? `${text} Remedy: ${shown(remedy, 240)}.` : text;
}

function inNumbers(found) {
  if (found.length === 1) return found[0].serious ? "Serious" : "Warning";
  const serious = found.filter((trouble) => trouble.serious).length;
  const parts = [serious && `${serious} serious`, found.length > serious && counted(found.length - serious, "warning")];
  return parts.filter(Boolean).join(", ");
}
