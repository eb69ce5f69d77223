// The KV pool as a picture: a square for a block, or for as many as it takes, in the colour of who holds it.

import { el, fillChildren, setAttribute, setText, svg } from "./dom.js";
import { FREE, OTHERS, fillSwatch, paint, swatch } from "./slots.js";
import { counted, shown } from "./text.js";
import { bytes, percent, whole } from "./units.js";

const HEIGHT = 216; // of the picture at most, in pixels
const LARGEST = 16; // side of a square with its gap
const SMALLEST = 5;
const HINT = "Point at a square to read whose it is.";

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
    root.append(this.picture, this.reading, this.legend);
    new ResizeObserver(() => this.#draw()).observe(root);
  }

  /** `kv` as the API gives it: num_blocks, block_bytes, block_tokens, owners, runs of [owner, blocks]. */
  update(kv) {
    this.#kv = kv;
    this.#draw();
    this.#showLegend();
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
    this.#cells.forEach((owner, index) => {
      const slot = this.#slot(owner);
      const [x, y] = [(index % columns) * side, Math.floor(index / columns) * side];
      paths.set(slot, `${paths.get(slot) ?? ""}M${x} ${y}h${side - 1}v${side - 1}h${1 - side}z`);
    });
    fillChildren(
      this.picture,
      [...paths],
      () => svg("path"),
      (path, [slot, squares]) => {
        setAttribute(path, "class", slot === FREE ? "free" : "held");
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
    const held = blocksBySlot(this.#kv, (owner) => this.#slot(owner));
    const shares = held.map(({ name, blocks }) => `${shown(name, 40)} ${percent(blocks / this.#kv.num_blocks)}`);
    setAttribute(this.picture, "aria-label", `KV pool: ${shares.join(", ")}.`);
    fillChildren(this.legend, held, legendEntry, (entry, { slot, name, blocks }) => {
      fillSwatch(entry.firstElementChild, slot);
      setText(entry.querySelector("bdi"), shown(name));
      setText(entry.querySelector(".size"), bytes(blocks * this.#kv.block_bytes));
      setText(entry.querySelector("b"), percent(blocks / this.#kv.num_blocks));
    });
  }

  #point(event) {
    const index = event === null || !this.layout ? -1 : this.#indexAt(event);
    if (!(index in this.#cells)) return setText(this.reading, HINT);
    const { each } = this.layout;
    const [first, last] = [index * each, Math.min((index + 1) * each, this.#kv.num_blocks) - 1];
    const owner = this.#cells[index];
    const blocks = first === last ? `Block ${whole(first)}` : `Blocks ${whole(first)} to ${whole(last)}`;
    setText(this.reading, `${blocks}: ${owner < 0 ? "free" : shown(this.#kv.owners[owner], 40)}`);
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

/** Who holds most of every `each` blocks, by block number; -1: they are free. */
export function cells({ runs }, each) {
  const owners = [];
  let votes = new Map();
  let filled = 0;
  const close = () => {
    if (filled) owners.push([...votes].reduce((most, vote) => (vote[1] > most[1] ? vote : most))[0]);
    votes = new Map();
    filled = 0;
  };
  for (const [owner, blocks] of runs) {
    for (let left = blocks; left > 0;) {
      const taken = Math.min(left, each - filled);
      votes.set(owner, (votes.get(owner) ?? 0) + taken);
      filled += taken;
      left -= taken;
      if (filled === each) close();
    }
  }
  close();
  return owners;
}

/** The legend's lines: who has a slot, most blocks first, then all others as one, then what is free. */
function blocksBySlot({ owners, runs }, slotOf) {
  const held = new Map();
  for (const [owner, blocks] of runs) {
    const slot = slotOf(owner);
    const entry = held.get(slot) ?? { slot, names: new Set(), blocks: 0 };
    entry.names.add(owner < 0 ? "free" : owners[owner]);
    entry.blocks += blocks;
    held.set(slot, entry);
  }
  const rank = ({ slot }) => (slot === FREE ? 2 : slot === OTHERS ? 1 : 0);
  const entries = [...held.values()].sort((one, other) => rank(one) - rank(other) || other.blocks - one.blocks);
  return entries.map(({ slot, names, blocks }) => ({
    slot,
    blocks,
    name: slot === OTHERS ? counted(names.size, "other tenant") : [...names][0],
  }));
}

function legendEntry() {
  return el("li", {}, swatch(), el("bdi"), el("span", { class: "size" }), el("b"));
}
