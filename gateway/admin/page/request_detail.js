// The window that shows one request: what it is, where it is, and where its time went.

import { Detail, factList } from "./detail.js";
import { byId, el } from "./dom.js";
import { outcome } from "./requests.js";
import { shown } from "./text.js";
import { timeline } from "./timeline.js";
import { duration, whole } from "./units.js";

/** `cancel(row)` asks whether to end it. */
export function requestDetail(cancel) {
  return new Detail(byId("request-dialog"), "request-title", "requests", (request) => content(request, cancel));
}

function content(request, cancel) {
  const reason = request.reason ? [el("p", { class: "note" }, shown(request.reason, 240))] : [];
  const picture = timeline(request.timeline ?? [], request.age ?? request.duration);
  return [factList(facts(request)), ...reason, picture, ...(request.state ? [cancelling(request, cancel)] : [])];
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

function cancelling(request, cancel) {
  const button = { type: "button", class: "danger", click: () => cancel(request) };
  return el("div", { class: "answers for-operators" }, el("button", button, "Cancel the request…"));
}
