// Names come from strangers: what cannot be seen is spelled out, what is endless is cut.

// Controls, formats (overrides of direction among them) and separators, but neither a space nor the joiner of an emoji.
const JOINER = String.raw`(?<=[\p{Extended_Pictographic}\p{Emoji_Modifier}\ufe0f])\u200d(?=\p{Extended_Pictographic})`;
const INVISIBLE = new RegExp(String.raw`(?!${JOINER}| )[\p{Cc}\p{Cf}\p{Cs}\p{Z}]`, "gu");
const STRAY = /^ | $| (?= )/gu; // spaces that a page swallows
const MARKS = /(\p{M}{4})\p{M}+/gu; // no script needs more on one letter

/** A name as it may stand on the page: never empty, at most `limit` characters, nothing invisible. */
export function shown(name, limit = 80) {
  const text = String(name ?? "");
  if (text === "") return "(none)";
  const characters = Array.from(text.slice(0, 2 * limit));
  const head = characters.slice(0, limit).join("");
  const visible = head.replace(INVISIBLE, spelled).replace(STRAY, spelled).replace(MARKS, "$1");
  return head.length < text.length ? `${visible}… (${text.length.toLocaleString("en")} characters)` : visible;
}

/** A text of several lines, in which nothing else is invisible. */
export function lines(text) {
  const visible = (line) => line.replaceAll("\t", "  ").replace(INVISIBLE, spelled).replace(MARKS, "$1");
  return text.split("\n").map(visible).join("\n");
}

function spelled(character) {
  return `‹U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`;
}

/** An identifier, short enough for a column and still recognisable. */
export function shortId(id) {
  const text = shown(id, 128);
  return text.length <= 16 ? text : `${text.slice(0, 10)}…${text.slice(-4)}`;
}

/** "1 block", "2 blocks". */
export function counted(number, noun, plural = `${noun}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? noun : plural}`;
}
