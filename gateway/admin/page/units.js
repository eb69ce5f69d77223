// Quantities as people read them: three significant digits, a unit, and a dash for what is not known.

const UNKNOWN = "–";
const BINARY = ["B", "KiB", "MiB", "GiB", "TiB"];
const GROUPED = [0, 1, 2].map((digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits })); // by digits

/** 0.042, 4.2, 42, 4,200. */
export function number(value) {
  if (!known(value)) return UNKNOWN;
  const digits = Math.abs(value) >= 100 || Number.isInteger(value) ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return grouped(value, digits);
}

function grouped(value, digits) {
  return GROUPED[digits].format(Object.is(value, -0) ? 0 : value).replace("-", "−");
}

/** 12.50 EUR. */
export function money(value, currency) {
  const text = value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: value < 1 ? 6 : 2 });
  return `${text} ${currency}`;
}

export function whole(value) {
  return known(value) ? grouped(Math.round(value), 0) : UNKNOWN;
}

/** 950, 12.4 k, 3.1 M: for columns of large counts. */
export function compact(value) {
  if (!known(value) || Math.abs(value) < 10_000) return whole(value);
  const power = Math.min(Math.floor(Math.log10(Math.abs(value)) / 3), 4);
  return `${number(Number((value / 1000 ** power).toPrecision(3)))} ${["", "k", "M", "G", "T"][power]}`;
}

/** 37 % of a share between 0 and 1; what is neither none nor all never looks as if it were. */
export function percent(share) {
  if (!known(share)) return UNKNOWN;
  const value = 100 * share;
  if (value > 0 && value < 1) return "<1 %";
  if (value > 99 && value < 100) return ">99 %";
  return `${grouped(value, 0)} %`;
}

export function bytes(value) {
  if (!known(value)) return UNKNOWN;
  const power = value < 1 ? 0 : Math.min(Math.floor(Math.log2(value) / 10), BINARY.length - 1);
  return `${number(value / 1024 ** power)} ${BINARY[power]}`;
}

/** A duration: 850 µs, 12 ms, 1.25 s, 3 min 5 s, 2 h 7 min, 4 d 2 h. */
export function duration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${grouped(1e6 * seconds, 0)} µs`;
  if (seconds < 1) return `${grouped(1e3 * seconds, seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 60) return `${grouped(seconds, seconds < 10 ? 2 : 1)} s`;
  if (seconds < 3600) return two(seconds, 60, "min", 1, "s");
  if (seconds < 86400) return two(seconds, 3600, "h", 60, "min");
  return two(seconds, 86400, "d", 3600, "h");
}

function two(seconds, large, largeUnit, small, smallUnit) {
  const rest = Math.floor((seconds % large) / small);
  return `${Math.floor(seconds / large)} ${largeUnit}${rest ? ` ${rest} ${smallUnit}` : ""}`;
}

/** What has passed, to the second: no digits that flicker. */
export function age(seconds) {
  return known(seconds) && seconds < 60 ? `${Math.max(0, Math.floor(seconds))} s` : duration(seconds);
}

/** A moment in Unix seconds as the reader's clock shows it. */
export function clock(unix) {
  return known(unix) ? new Date(1000 * unix).toLocaleTimeString("en-GB") : UNKNOWN;
}

/** The day with it, where it is another one than the reader's. */
export function moment(unix) {
  if (!known(unix)) return UNKNOWN;
  const date = new Date(1000 * unix);
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday ? clock(unix) : `${date.toLocaleDateString("sv")} ${clock(unix).slice(0, 5)}`;
}

function known(value) {
  return typeof value === "number" && Number.isFinite(value);
}
