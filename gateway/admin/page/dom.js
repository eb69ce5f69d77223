// Elements without markup: every string becomes text or an attribute's value, never HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element with attributes (a function is a listener, true a bare attribute) and children (nodes or text). */
export function el(tag, attributes = {}, ...children) {
  return dressed(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return dressed(document.createElementNS(SVG, tag), attributes, children);
}

function dressed(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else setAttribute(node, name, value);
  }
  node.append(...children);
  return node;
}

/** Sets it, or removes it for null and false; an attribute that is right already is not touched. */
export function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value === true ? "" : value);
}

/** Replaces the text where it differs, so that a selection or a screen reader is not disturbed. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function byId(id) {
  return document.getElementById(id);
}

/** Keeps children in step with values, adding and removing at the end: make(value) once, fill(node, value). */
export function fillChildren(parent, values, make, fill) {
  while (parent.children.length > values.length) parent.lastElementChild.remove();
  values.forEach((value, index) => {
    if (index >= parent.children.length) parent.append(make(value));
    fill(parent.children[index], value);
  });
}

/** Says it once to screen readers, without moving the focus. */
export function announce(text) {
  setText(byId("announcer"), text);
}
