// What all charts point at together.

/** A second, as seconds before now, of at most `span`; null: none. */
export class Cursor {
  #listeners = [];
  ago = null;

  constructor(span) {
    this.span = span;
  }

  onMove(listener) {
    this.#listeners.push(listener);
  }

  moveTo(ago) {
    this.ago = ago === null ? null : Math.min(Math.max(ago, 0), this.span - 1);
    for (const listener of this.#listeners) listener();
  }
}
