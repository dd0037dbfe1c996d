// How numbers are written and elements are made.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const find = (id) => document.getElementById(id);

function scaled(value, units, step) {
  let place = 0;
  while (Math.abs(value) >= 999.5 && place < units.length - 1) { value /= step; place += 1; }
  const digits = value === 0 || place === 0 ? 0 : value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return `${value.toFixed(digits)} ${units[place]}`;
}

const bytes = (n) => scaled(n, ["B", "kB", "MB", "GB", "TB"], 1000);
const rate = (n) => (n === null ? "unlimited" : `${bytes(n)}/s`);
const count = (n) => scaled(n, ["", "k", "M", "G", "T", "P"], 1000).trim();

function seconds(s) {
  if (s === 0) return "0";
  const [value, unit] = s < 1e-3 ? [s * 1e6, "µs"] : s < 1 ? [s * 1e3, "ms"] : [s, "s"];
  return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${unit}`;
}

// Figures on an axis need no zeros behind the point; sizes in sentences of passes need a unit.
const short = (text) => text.replace(/(\.\d*?)0+(?= )/, "$1").replace(/\.(?= )/, "");
const readable = (text) => text.replace(/\b(\d{4,})( B)?(?![\w.])/g, (_, n) => bytes(Number(n)));

const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–");
const sum = (values) => values.reduce((total, value) => total + value, 0);
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

// Round positions for ticks, at most `most` of them.
function ticks(limit, most) {
  if (!(limit > 0)) return [0];
  const rough = limit / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let i = 0; i * step <= limit * 1.0001; i += 1) found.push(i * step);
  return found;
}

// The outermost numbered module of a path, else its first part: what is drawn as one block.
function blockOf(path) {
  const parts = path.split(".");
  const number = parts.findIndex((part) => /^\d+$/.test(part));
  return number < 0 ? parts[0] : parts.slice(0, number + 1).join(".");
}

function key(kind, text) {
  return el("span", {}, el("i", { class: `key ${kind}` }), text);
}
