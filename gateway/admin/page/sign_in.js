// The key: asked for once a tab, kept in its session storage, tried before it is believed.

import { Api, Unauthorized, failure } from "./api.js";
import { byId, setText } from "./dom.js";

const STORED = "sluice-admin-key";
const SENDABLE = /^[\x21-\x7e]+$/; // no header holds anything else

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
    if (key === null) this.ask("");
    else this.signedIn(new Api(key));
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
