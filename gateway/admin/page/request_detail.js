// The window that shows one request: what it is, where it is, and where its time went.

import { Detail, factList } from "./detail.js";
import { byId, el } from "./dom.js";
import { address, outcome } from "./requests.js";
import { lines, shown } from "./text.js";
import { timeline } from "./timeline.js";
import { duration, whole } from "./units.js";

/** `cancel(row)` asks whether to end it; `texts(row)` promises its prompts and answers. */
export function requestDetail(cancel, texts) {
  return new Detail(byId("request-dialog"), "request-title", "requests", (request) => content(request, cancel, texts));
}

function content(request, cancel, texts) {
  const reason = request.reason ? [el("p", { class: "note" }, shown(request.reason, 240))] : [];
  const picture = timeline(request.timeline ?? [], request.age ?? request.duration);
  return [factList(facts(request)), ...reason, picture, request.state ? cancelling(request, cancel) : reading(request, texts)];
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

let reader = { of: null, place: null }; // of the request that is shown, whose texts outlast a refresh

/** A button that asks for prompts and answers, which the log has by the tenant's consent; each look is on record. */
function reading(request, texts) {
  if (reader.of === address(request)) return reader.place;
  const place = el("div", { class: "for-operators" });
  reader = { of: address(request), place };
  const show = async () => {
    try {
      const { texts: found } = await texts(request);
      place.replaceChildren(...found.flatMap(({ prompt, answer }) => [said("Prompt", prompt), said("Answer", answer)]));
    } catch (error) {
      place.replaceChildren(el("p", { class: "note" }, `${shown(error.message, 240)}.`));
    }
  };
  place.append(el("button", { type: "button", class: "texts", click: show }, "Prompt and answer"));
  return place;
}

function said(title, text) {
  return el("section", {}, el("h3", {}, title), el("pre", { tabindex: 0 }, lines(text)));
}

function cancelling(request, cancel) {
  const button = { type: "button", class: "danger", click: () => cancel(request) };
  return el("div", { class: "answers for-operators" }, el("button", button, "Cancel the request…"));
}
