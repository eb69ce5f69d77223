// The KV pool as a picture: a square for a block, or for as many as it takes, in the colour of who holds it, and in the
// shape of what it is used for.

import { el, fillChildren, setAttribute, setText, svg } from "./dom.js";
import { HELD, IDLE, PINNED, USES, shape, useSwatch } from "./pool_uses.js";
import { FREE, OTHERS, fillSwatch, paint, swatch } from "./slots.js";
import { counted, shown } from "./text.js";
import { bytes, percent, whole } from "./units.js";

const HEIGHT = 216; // of the picture at most, in pixels
const LARGEST = 16; // side of a square with its gap
const SMALLEST = 5;
const HINT = "Point at a square for its tenant.";
const USE = 2 ** 20; // more than there are owners: a cell is its owner plus USE times its use

export class Pool {
  #kv = null;
  #cells = [];

  constructor(root, scale, slots) {
    this.slots = slots;
    this.scale = scale;
    this.picture = svg("svg", {
      class: "pool",
      role: "img",
      pointermove: (event) => this.#point(event),
      pointerleave: () => this.#point(null),
    });
    this.reading = el("p", { class: "pool-reading muted" }, HINT);
    this.legend = el("ul", { class: "pool-legend" });
    this.uses = el("ul", { class: "pool-uses", "aria-label": "Uses of blocks" });
    root.append(this.picture, this.reading, this.legend, this.uses);
    new ResizeObserver(() => this.#draw()).observe(root);
  }

  /** `kv` as the API gives it: num_blocks, block_bytes, block_tokens, owners, runs of [owner, blocks, use], and by tenant the
   * blocks that its floor keeps and those that the host has: kept, swapped. */
  update(kv) {
    this.#kv = kv;
    this.#draw();
    this.#showLegend();
    this.#showUses();
  }

  #draw() {
    const width = this.picture.clientWidth;
    if (this.#kv === null || width === 0) return;
    this.layout = laidOut(this.#kv.num_blocks, width);
    const { side, columns, rows, each } = this.layout;
    this.#cells = cells(this.#kv, each);
    setAttribute(this.picture, "viewBox", `0 0 ${width} ${rows * side}`);
    setAttribute(this.picture, "height", rows * side);
    const paths = new Map();
    this.#cells.forEach((cell, index) => {
      const [slot, use] = [this.#slot(ownerOf(cell)), useOf(cell)];
      const [x, y] = [(index % columns) * side, Math.floor(index / columns) * side];
      const path = paths.get(`${slot} ${use}`) ?? { slot, use, squares: "" };
      path.squares += shape(use, x, y, side - 1);
      paths.set(`${slot} ${use}`, path);
    });
    fillChildren(
      this.picture,
      [...paths.values()],
      () => svg("path"),
      (path, { slot, use, squares }) => {
        setAttribute(path, "class", slot === FREE ? "free" : USES[use].name);
        setAttribute(path, "fill", paint(slot));
        setAttribute(path, "d", squares);
      },
    );
    setText(this.scale, this.#scaleInWords(each));
  }

  #scaleInWords(each) {
    const { num_blocks, block_tokens, block_bytes } = this.#kv;
    const square = each === 1 ? "a block" : `${whole(each)} blocks, shown as whose most of them are`;
    return `${counted(num_blocks, "block")} of ${block_tokens} tokens, ${bytes(block_bytes)}; a square is ${square}.`;
  }

  #slot(owner) {
    return owner < 0 ? FREE : this.slots.of(this.#kv.owners[owner]);
  }

  #showLegend() {
    const { num_blocks, block_bytes } = this.#kv;
    const held = blocksBySlot(this.#kv, (owner) => this.#slot(owner), this.slots);
    const shares = held.map(({ name, blocks }) => `${shown(name, 40)} ${percent(blocks / num_blocks)}`);
    setAttribute(this.picture, "aria-label", `KV pool: ${shares.join(", ")}.`);
    fillChildren(this.legend, held, legendEntry, (entry, { slot, name, blocks, parts }) => {
      fillSwatch(entry.firstElementChild, slot);
      setText(entry.querySelector("bdi"), shown(name));
      setText(entry.querySelector(".size"), bytes(blocks * block_bytes));
      setText(entry.querySelector("b"), percent(blocks / num_blocks));
      const besides = Object.entries(parts).filter(([, number]) => number > 0);
      setText(
        entry.querySelector(".parts"),
        besides.map(([words, number]) => unbroken(`${words} ${bytes(number * block_bytes)}`)).join(", "),
      );
    });
  }

  /** The key to the shapes, with what there is of each; and what is swapped, which is not in the picture. */
  #showUses() {
    const { num_blocks, block_bytes, runs, swapped = {}, host_blocks = 0 } = this.#kv;
    const sums = USES.map(() => 0);
    for (const [owner, blocks, use = HELD] of runs) sums[use] += owner < 0 ? 0 : blocks;
    const rows = USES.map(({ name, words }, use) => ({ use, name, words, blocks: sums[use], of: num_blocks }));
    if (host_blocks > 0) {
      const blocks = Object.values(swapped).reduce((sum, one) => sum + one, 0);
      rows.push({ use: null, name: "swapped", words: "in the host's memory, of the room there", blocks, of: host_blocks });
    }
    const known = sums.some((blocks, use) => use !== HELD && blocks > 0) || host_blocks > 0 ? rows : [];
    fillChildren(this.uses, known, useEntry, (entry, { name, words, blocks, of }) => {
      setAttribute(entry, "title", words);
      setText(entry.querySelector("bdi"), name);
      setText(entry.querySelector(".size"), bytes(blocks * block_bytes));
      setText(entry.querySelector("b"), percent(blocks / of));
    });
  }

  #point(event) {
    const index = event === null || !this.layout ? -1 : this.#indexAt(event);
    if (!(index in this.#cells)) return setText(this.reading, HINT);
    const { each } = this.layout;
    const [first, last] = [index * each, Math.min((index + 1) * each, this.#kv.num_blocks) - 1];
    const [owner, use] = [ownerOf(this.#cells[index]), useOf(this.#cells[index])];
    const blocks = first === last ? `Block ${whole(first)}` : `Blocks ${whole(first)} to ${whole(last)}`;
    const holder = owner < 0 ? "free" : shown(this.#kv.owners[owner], 40);
    setText(this.reading, `${blocks}: ${holder}${use === HELD ? "" : `, ${USES[use].words}`}`);
  }

  #indexAt({ offsetX, offsetY }) {
    const { side, columns } = this.layout;
    const column = Math.floor(offsetX / side);
    return column < columns ? Math.floor(offsetY / side) * columns + column : -1;
  }
}

/** The largest squares that fit; when the smallest do not, each stands for several blocks. */
export function laidOut(numBlocks, width) {
  for (let side = LARGEST; side >= SMALLEST; side--) {
    const columns = Math.max(1, Math.floor(width / side));
    const rows = Math.ceil(numBlocks / columns);
    if (rows * side <= HEIGHT) return { side, columns, rows, each: 1 };
  }
  const columns = Math.max(1, Math.floor(width / SMALLEST));
  const each = Math.ceil(numBlocks / (columns * Math.floor(HEIGHT / SMALLEST)));
  return { side: SMALLEST, columns, rows: Math.ceil(Math.ceil(numBlocks / each) / columns), each };
}

/** Who holds most of every `each` blocks and how, by block number: an owner and its use; -1: they are free. */
export function cells({ runs }, each) {
  const owners = [];
  let votes = new Map();
  let filled = 0;
  const close = () => {
    if (filled) owners.push([...votes].reduce((most, vote) => (vote[1] > most[1] ? vote : most))[0]);
    votes = new Map();
    filled = 0;
  };
  for (const [owner, blocks, use = HELD] of runs) {
    const cell = owner < 0 ? owner : owner + use * USE;
    for (let left = blocks; left > 0;) {
      const taken = Math.min(left, each - filled);
      votes.set(cell, (votes.get(cell) ?? 0) + taken);
      filled += taken;
      left -= taken;
      if (filled === each) close();
    }
  }
  close();
  return owners;
}

function ownerOf(cell) {
  return cell < 0 ? cell : cell % USE;
}

function useOf(cell) {
  return cell < 0 ? HELD : Math.floor(cell / USE);
}

/** The legend's lines: who has a slot, most blocks first, then all others as one, then what is free. A tenant's blocks are
 * those held for it; `parts` says which of them are shared, and what it has besides. */
function blocksBySlot({ owners, runs, kept = {}, swapped = {} }, slotOf, slots) {
  const held = new Map();
  const entryOf = (slot, name) => {
    const parts = { shared: 0, pinned: 0, idle: 0, kept: 0, swapped: 0 };
    const entry = held.get(slot) ?? { slot, names: new Set(), blocks: 0, parts };
    entry.names.add(name);
    held.set(slot, entry);
    return entry;
  };
  for (const [owner, blocks, use = HELD] of runs) {
    const entry = entryOf(slotOf(owner), owner < 0 ? "free" : owners[owner]);
    if (use !== IDLE && use !== PINNED) entry.blocks += blocks;
    if (use !== HELD) entry.parts[USES[use].name] += blocks;
  }
  for (const [name, blocks] of Object.entries(kept)) entryOf(slots.of(name), name).parts.kept += blocks;
  for (const [name, blocks] of Object.entries(swapped)) entryOf(slots.of(name), name).parts.swapped += blocks;
  const rank = ({ slot }) => (slot === FREE ? 2 : slot === OTHERS ? 1 : 0);
  const entries = [...held.values()].sort((one, other) => rank(one) - rank(other) || other.blocks - one.blocks);
  return entries.map(({ slot, names, blocks, parts }) => ({
    slot,
    blocks,
    parts,
    name: slot === OTHERS ? counted(names.size, "other tenant") : [...names][0],
  }));
}

/** The text in one line: its spaces are not where it is broken. */
function unbroken(text) {
  return text.replaceAll(" ", "\u00a0");
}

function legendEntry() {
  const figures = [el("span", { class: "size" }), el("b"), el("span", { class: "parts muted" })];
  return el("li", {}, swatch(), el("bdi"), ...figures);
}

function useEntry(row) {
  return el("li", {}, useSwatch(row), el("bdi"), el("span", { class: "size" }), el("b"));
}
