// The key: asked for once a tab, kept in its session storage, tried before it is believed.

import { Api, Unauthorized, failure } from "./api.js";
import { byId, setText } from "./dom.js";

const STORED = "sluice-admin-key";
const SENDABLE = /^[\x21-\x7e]+$/; // no header holds anything else
const PROBLEMS = {
  expired: "That sign-in was not begun here, or took too long: try again.",
  no_role: "You have signed in, but have no role here: the gateway's log names the claim.",
  refused: "The provider refused the sign-in.",
  unavailable: "The provider cannot be asked: the gateway's log says why.",
  untrusted: "What the provider said cannot be trusted: the gateway's log says why.",
};

/** Shows the form, or passes it when the tab has a key; `signedIn(api)` is called with one that was accepted. */
export class SignIn {
  constructor(signedIn) {
    this.signedIn = signedIn;
    this.field = byId("admin-key");
    byId("sign-in-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#try(this.field.value.trim());
    });
  }

  begin() {
    const key = sessionStorage.getItem(STORED);
    if (key !== null) return this.signedIn(new Api(key));
    const problem = new URLSearchParams(location.search).get("problem");
    if (problem !== null) history.replaceState(null, "", location.pathname + location.hash);
    this.ask(Object.hasOwn(PROBLEMS, problem ?? "") ? PROBLEMS[problem] : "");
    this.#comeFromProvider();
  }

  /** Takes the key of a sign-in at a provider that has just succeeded, or offers one. */
  async #comeFromProvider() {
    const answer = await fetch("oidc/session", { cache: "no-store" }).catch(() => null);
    const { offered, key } = answer?.ok ? await answer.json() : {};
    byId("provider").hidden = !offered;
    if (!key || sessionStorage.getItem(STORED) !== null) return;
    sessionStorage.setItem(STORED, key);
    this.signedIn(new Api(key));
  }

  /** Forgets the key and asks for one; `why` is shown. */
  ask(why) {
    sessionStorage.removeItem(STORED);
    this.field.value = "";
    setText(byId("sign-in-problem"), why);
    byId("board").hidden = true;
    byId("sign-in").hidden = false;
    this.field.focus();
  }

  async #try(key) {
    setText(byId("sign-in-problem"), "");
    const api = new Api(key);
    const error = SENDABLE.test(key) ? await failure(api.get("overview")) : new Unauthorized();
    if (error !== null) return this.#explain(error);
    sessionStorage.setItem(STORED, key);
    this.field.value = "";
    this.signedIn(api);
  }

  #explain(error) {
    const rejected = error instanceof Unauthorized;
    const why = rejected ? "This key is not accepted." : `The gateway cannot be reached: ${error.message}.`;
    setText(byId("sign-in-problem"), why);
    this.field.select();
  }
}
