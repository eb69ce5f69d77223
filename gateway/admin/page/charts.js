// The six charts, and which of the overview's series each shows.

import { Chart, SPAN } from "./chart.js";
import { Cursor } from "./cursor.js";
import { number, percent } from "./units.js";

export class Charts {
  #charts;

  constructor(root) {
    const cursor = new Cursor(SPAN);
    const tokens = new Chart("Tokens per second", number, cursor, { least: 10 });
    const requests = new Chart("Requests per second", number, cursor, { least: 2 });
    const firstToken = new Chart("Time to first token", latency, cursor, { figure: "last", least: 0.001, band: true });
    const gap = new Chart("Time between tokens", latency, cursor, { figure: "last", least: 0.001, band: true });
    const queue = new Chart("Waiting, by class", number, cursor, { figure: "last", least: 2 });
    const load = new Chart("Load, share of capacity", percent, cursor, { figure: "last", top: 1 });
    this.#charts = [
      [tokens, ({ points }) => [line("output", points.output_tokens), line("prompt", points.prompt_tokens)]],
      [requests, ({ points }) => [line("ended", points.requests), line("refused", points.refused)]],
      [firstToken, ({ points }) => [...percentiles(points.ttft_p50, points.ttft_p99), waits(points.oldest_wait)]],
      [gap, ({ points }) => percentiles(points.gap_p50, points.gap_p99)],
      [queue, ({ points }) => Object.entries(points.waiting).map(([name, waiting]) => line(name, waiting))],
      [
        load,
        ({ points }, engine) => [
          line("KV blocks", of(points.kv_blocks_used, engine.kv_blocks)),
          line("sequences", of(points.running, engine.max_num_seqs)),
        ],
      ],
    ];
    root.append(...this.#charts.map(([chart]) => chart.element));
  }

  update({ series, engine }) {
    for (const [chart, lines] of this.#charts) chart.update(lines(series, engine));
  }
}

function percentiles(p50, p99) {
  return [
    { label: "p50", points: p50, style: "p50" },
    { label: "p99", points: p99, style: "p99" },
  ];
}

/** Drawn while somebody waits; one that is stuck does not flatten the others. */
function waits(points = []) {
  return { label: "oldest waits", points: points.map((wait) => wait || null), style: "waits", offScale: true };
}

function line(label, points) {
  return { label, points };
}

function of(points, whole) {
  return points.map((point) => (point === null ? null : point / whole));
}

/** Seconds; an axis keeps the unit of its top. */
function latency(seconds, top = seconds) {
  if (seconds === null) return "–";
  if (seconds === 0) return "0";
  return top < 1 ? `${number(1000 * seconds)} ms` : `${number(seconds)} s`;
}
