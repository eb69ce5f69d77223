// Which part of the page is shown: named in the address, so that it survives a reload and can be linked to.

import { byId, setAttribute } from "./dom.js";

const FIRST = "now";

export class Views {
  /** `names`: each has an element view-NAME and a link #/NAME; `shown(name)` hears of each change. */
  constructor(names, shown) {
    this.names = names;
    this.shown = shown;
    this.current = FIRST;
    addEventListener("hashchange", () => this.#follow());
    this.#follow();
  }

  #follow() {
    if (location.hash && !location.hash.startsWith("#/")) return; // a place within the view
    const name = location.hash.slice(2);
    const before = this.current;
    this.current = this.names.includes(name) ? name : FIRST;
    for (const one of this.names) byId(`view-${one}`).hidden = one !== this.current;
    for (const link of byId("views").children)
      setAttribute(link, "aria-current", link.hash === `#/${this.current}` ? "page" : null);
    byId("skip").hidden = this.current !== FIRST;
    if (before !== this.current) this.shown(this.current);
  }
}
