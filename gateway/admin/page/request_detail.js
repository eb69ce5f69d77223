// The window that shows one request: what it is, where it is, and where its time went.

import { Detail, factList } from "./detail.js";
import { byId, el } from "./dom.js";
import { address, outcome } from "./requests.js";
import { lines, shown } from "./text.js";
import { timeline } from "./timeline.js";
import { duration, whole } from "./units.js";

/** `cancel(row)` asks whether to end it; `texts(row)` and `explain(row)` promise its prompts and answers, and its story. */
export function requestDetail(cancel, texts, explain) {
  const content = (request) => shownWhole(request, cancel, texts, explain);
  return new Detail(byId("request-dialog"), "request-title", "requests", content);
}

function shownWhole(request, cancel, texts, explain) {
  const reason = request.reason ? [el("p", { class: "note" }, shown(request.reason, 240))] : [];
  const picture = timeline(request.timeline ?? [], request.age ?? request.duration);
  const end = request.state ? cancelling(request, cancel) : more(request, texts, explain);
  return [factList(facts(request)), ...reason, picture, end];
}

function facts(request) {
  return {
    Tenant: shown(request.tenant ?? "–"),
    Key: shown(request.key ?? "–", 40),
    ...(request.response_id ? { Response: shown(request.response_id, 64) } : {}),
    Class: shown(request.class ?? "–", 24),
    Model: shown(request.model ?? "–", 40),
    ...(request.state ? { State: shown(request.state, 24) } : { Outcome: outcome(request) }),
    ...(request.state ? { Age: duration(request.age) } : { Took: duration(request.duration) }),
    ...(request.state ? { "KV blocks": whole(request.kv_blocks) } : { Queued: duration(request.queue_seconds) }),
    ...(request.state ? {} : { "First token": duration(request.ttft) }),
    Prompt: `${whole(request.prompt_tokens)} tokens${request.cached_tokens ? `, ${whole(request.cached_tokens)} cached` : ""}`,
    Output: `${whole(request.output_tokens)}${request.max_tokens ? ` of ${whole(request.max_tokens)}` : ""} tokens`,
    Preempted: whole(request.preemptions),
    ...(request.engine_seconds === undefined ? {} : { "Engine time": duration(request.engine_seconds) }),
    ...(request.session ? { Session: shown(request.session, 64) } : {}),
    ...(request.trace_id ? { Trace: shown(request.trace_id, 32) } : {}),
  };
}

let asked = { of: null, place: null }; // of the request that is shown, whose answers outlast a refresh, and no closed window

/** Buttons that ask for its story, and for prompts and answers: the log has them by the tenant's consent, each look is on record. */
function more(request, texts, explain) {
  if (asked.of === address(request) && asked.place.isConnected) return asked.place;
  const answer = el("div", { role: "status" });
  const button = (title, attributes, ask) => {
    const show = () => ask(request).then((parts) => answer.replaceChildren(...parts), (error) => answer.replaceChildren(failed(error)));
    return el("button", { type: "button", ...attributes, click: show }, title);
  };
  const place = el(
    "div",
    {},
    el(
      "div",
      { class: "answers left" },
      button("Explain", { id: "explain" }, async (row) => [said("Why", (await explain(row)).lines.join("\n"))]),
      button("Prompt and answer", { id: "texts", class: "for-operators" }, async (row) =>
        (await texts(row)).texts.flatMap(({ prompt, answer: end }) => [said("Prompt", prompt), said("Answer", end)]),
      ),
    ),
    answer,
  );
  asked = { of: address(request), place };
  return place;
}

function failed(error) {
  return el("p", { class: "note" }, `${shown(error.message, 500)}.`);
}

function said(title, text) {
  return el("section", {}, el("h3", {}, title), el("pre", { tabindex: 0 }, lines(text)));
}

function cancelling(request, cancel) {
  const button = { type: "button", class: "danger", click: () => cancel(request) };
  return el("div", { class: "answers for-operators" }, el("button", button, "Cancel the request…"));
}
