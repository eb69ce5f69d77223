// A sortable table whose rows are updated in place: focus, selection and a pressed mouse button survive every second.

import { el, setAttribute, setText } from "./dom.js";

const STILL = 3000; // milliseconds the order stands still after the pointer moved over it
const MORE = 50; // rows a press of the button adds
const MOST = 500; // rows ever shown: a filter is the way to the rest

/**
 * A column: {id, title, note, value(row) to sort by, text(row), or make(current) and fill(element, row), and the marks
 * numeric; least, minor and major (left out where the table is narrow, in this order); names (narrower then), stretches
 * (as wide as there is room), lines (not cut, but in lines) and wide (both)};
 * `current()` is the row as it is whenever that is asked.
 * Options: columns, key(row), matches(row, words) for the filter, limit, sort {id, descending}, empty, title.
 */
export class Table {
  #rows = null; // until they come
  #bodyRows = new Map(); // key -> tr
  #current = new WeakMap(); // tr -> row
  #truncated = 0;
  #words = "";
  #pointed = -Infinity; // when the pointer last moved over a row

  constructor(root, { columns, key, matches, limit = 12, sort = null, empty = "Nothing.", title }) {
    Object.assign(this, { columns, key, matches, limit, sort, empty });
    this.body = el("tbody");
    this.headers = columns.map((column) => this.#header(column));
    const head = el("thead", {}, el("tr", {}, ...this.headers));
    const table = el("table", {}, el("caption", { class: "unseen" }, title), head, this.body);
    this.count = el("span", {}, "Being read …");
    this.more = el("button", { type: "button", hidden: true, click: () => this.#showMore() });
    this.foot = el("p", { class: "foot muted" }, this.count, this.more);
    this.scroller = el("div", { class: "scroller", role: "region", "aria-label": title, tabindex: 0 }, table);
    root.append(this.scroller, this.foot);
    new ResizeObserver(() => this.#adjust()).observe(this.scroller);
    this.body.addEventListener("pointermove", () => (this.#pointed = performance.now()));
    this.body.addEventListener("pointerleave", () => (this.#pointed = -Infinity));
  }

  /** `truncated`: how many more there are that the gateway left out. */
  update(rows, truncated = 0) {
    this.#rows = rows;
    this.#truncated = truncated;
    this.#show();
  }

  filter(words) {
    this.#words = words;
    this.#show();
  }

  #show() {
    if (this.#rows === null) return;
    const wanted = this.#words ? this.#rows.filter((row) => this.matches(row, this.#words)) : this.#rows;
    if (performance.now() - this.#pointed < STILL) this.#refill(wanted);
    else this.#refresh(this.#sorted(wanted).slice(0, this.limit));
    this.#showCount(wanted.length + this.#truncated);
  }

  /** The values only: no row moves or vanishes from under the pointer. */
  #refill(wanted) {
    const rows = keyed(wanted, this.key);
    for (const [key, tr] of this.#bodyRows) {
      const row = rows.get(key);
      tr.classList.toggle("gone", row === undefined);
      if (row !== undefined) this.#fill(tr, row);
    }
  }

  /** Values, rows and their order; the row that has the focus stays until it loses it. */
  #refresh(shownRows) {
    const focused = this.body.querySelector(":focus-visible");
    const rows = keyed(shownRows, this.key);
    this.#removeAllBut(rows, focused);
    let place = this.body.firstElementChild;
    for (const [key, row] of rows) {
      const tr = this.#bodyRows.get(key) ?? this.#make(key, row);
      tr.classList.remove("gone");
      this.#fill(tr, row);
      if (tr === place) place = place.nextElementSibling;
      else this.body.insertBefore(tr, place);
    }
    focused?.focus({ preventScroll: true });
  }

  #removeAllBut(rows, focused) {
    for (const [key, tr] of this.#bodyRows) {
      if (rows.has(key)) continue;
      tr.classList.toggle("gone", tr.contains(focused));
      if (tr.contains(focused)) continue;
      tr.remove();
      this.#bodyRows.delete(key);
    }
  }

  #make(key, row) {
    const tr = el("tr");
    this.#bodyRows.set(key, tr);
    this.#current.set(tr, row);
    this.columns.forEach((column, index) => {
      const nodes = content(column, () => this.#current.get(tr));
      tr.append(el(index ? "td" : "th", { class: classes(column), scope: index ? null : "row" }, ...nodes));
    });
    return tr;
  }

  #fill(tr, row) {
    this.#current.set(tr, row);
    this.columns.forEach((column, index) => {
      const cell = tr.children[index];
      if (column.fill) column.fill(cell.firstElementChild, row);
      else setText(cell.firstElementChild ?? cell, column.text(row));
    });
  }

  #showCount(total) {
    const rest = total - this.body.children.length;
    setText(this.count, total === 0 ? this.empty : rest > 0 ? `and ${rest.toLocaleString("en")} more` : "");
    const had = rest - this.#truncated;
    this.more.hidden = had <= 0 || this.limit >= MOST;
    setText(this.more, `Show ${Math.min(MORE, had, MOST - this.limit)} more`);
    this.foot.hidden = this.count.textContent === "" && this.more.hidden;
  }

  #showMore() {
    this.limit = Math.min(this.limit + MORE, MOST);
    this.#show();
  }

  #adjust() {
    setAttribute(this.scroller, "tabindex", this.scroller.scrollWidth > this.scroller.clientWidth ? 0 : null);
  }

  // sorting

  #header(column) {
    const content = column.value
      ? el("button", { type: "button", title: column.note ?? null, click: () => this.#sortBy(column) }, column.title)
      : el("span", { title: column.note ?? null }, column.title);
    const header = el("th", { scope: "col", class: classes(column) }, content);
    if (this.sort?.id === column.id) setAttribute(header, "aria-sort", direction(this.sort));
    return header;
  }

  #sortBy(column) {
    const descending = this.sort?.id === column.id ? !this.sort.descending : Boolean(column.numeric);
    this.sort = { id: column.id, descending };
    this.headers.forEach((header, index) =>
      setAttribute(header, "aria-sort", this.columns[index] === column ? direction(this.sort) : null),
    );
    this.#show();
  }

  #sorted(rows) {
    const column = this.sort && this.columns.find(({ id }) => id === this.sort.id);
    if (!column) return rows;
    const sign = this.sort.descending ? -1 : 1;
    return rows
      .map((row) => [column.value(row) ?? null, row])
      .sort(([one], [other]) => compared(one, other, sign))
      .map(([, row]) => row);
  }
}

/** A column of numbers: how each is written, and marks. */
export function quantity(id, title, format, marks = {}) {
  return { id, title, value: (row) => row[id], text: (row) => format(row[id]), numeric: true, ...marks };
}

function content(column, current) {
  if (column.make) return [column.make(current)];
  return column.wide || column.lines ? [el("div", { class: "clamped" })] : [];
}

/** Two rows of one key are two rows. */
function keyed(rows, key) {
  const found = new Map();
  for (const row of rows) {
    let name = key(row);
    while (found.has(name)) name += "\u0000";
    found.set(name, row);
  }
  return found;
}

/** What is not known comes last, whichever way. */
function compared(one, other, sign) {
  if (one === null || other === null) return (one === null) - (other === null);
  if (typeof one === "string") return sign * one.localeCompare(other, "en");
  return sign * (one - other);
}

function direction({ descending }) {
  return descending ? "descending" : "ascending";
}

const MARKS = ["numeric", "least", "minor", "major", "names", "stretches", "wide", "lines"];

function classes(column) {
  return MARKS.filter((mark) => column[mark]).join(" ") || null;
}
