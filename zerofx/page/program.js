// The table of a program's nodes, and its filters. Rows are made once; a filter hides some.

const table = { region: "", rows: [] };
const FILTERS = [["module", "any module"], ["bucket", "any bucket"], ["by", "traced, or any pass"], ["kind", "any kind"]];

function drawProgram(graph) {
  const regions = graph.programs.map((program) => program.region);
  const preferred = ["forward", "inference", "backward", "joint"].find((name) => regions.includes(name));
  const inputs = [select("region", regions.map((name) => [name, `${name} program`]), preferred, () => showRegion(graph)),
    el("input", { id: "search", type: "search", placeholder: "Find a name, op or parameter", oninput: applyFilters,
      "aria-label": "Find" }),
    ...FILTERS.map(([name, any]) => select(name, [["", any]], "", applyFilters)),
    el("output", { id: "shown" })];
  find("filters").replaceChildren(...inputs);
  showRegion(graph);
}

function select(id, choices, value, onchange) {
  const node = el("select", { id: `by-${id}`, onchange, "aria-label": id });
  node.append(...choices.map(([each, text]) => el("option", { value: each }, text)));
  node.value = value;
  return node;
}

function showRegion(graph) {
  const program = graph.programs.find((each) => each.region === find("by-region").value);
  const rows = program ? program.nodes : [];
  const times = spanSeconds(program);
  for (const [name, any] of FILTERS) {
    const values = [...new Set(rows.flatMap((row) => (name === "module" ? prefixes(row.module) : [row[name]])))];
    const choices = values.filter(Boolean).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    find(`by-${name}`).replaceChildren(el("option", { value: "" }, any), ...choices.map((each) => el("option", { value: each }, each)));
  }
  table.rows = rows.map((row) => ({ row, text: `${row.text} ${row.op} ${row.params}`.toLowerCase(), node: nodeRow(row, times) }));
  find("node-table").replaceChildren(headRow(), ...table.rows.map((each) => each.node));
  applyFilters();
}

const prefixes = (path) => path.split(".").map((_, place, parts) => parts.slice(0, place + 1).join("."));

function spanSeconds(program) {
  const spans = program?.timeline?.spans.filter((span) => span.stream !== "stall") || [];
  return new Map(spans.map((span) => [span.node, span.end - span.begin]));
}

const COLUMNS = ["Node", "Kind", "Module", "Bucket", "By", "Size", "Sent", "Time"];
const cell = (kind, ...children) => el("div", { class: kind, role: "cell" }, ...children);

function headRow() {
  return el("div", { class: "head", role: "row" }, COLUMNS.map((name, place) =>
    el("div", { role: "columnheader", class: place > 4 ? "number" : "" }, name)));
}

// Boxes, not a table: a browser lays out only those that are seen.
function nodeRow(row, times) {
  const time = times.get(row.name);
  return el("div", { class: "row", role: "row", "data-name": row.name },
    cell("mono", row.text),
    cell("", el("i", { class: `dot ${row.kind}` }), row.kind),
    cell("mono", row.module),
    cell("mono", row.bucket),
    cell("mono", row.by || el("small", {}, "traced")),
    cell("number", row.bytes ? bytes(row.bytes) : ""),
    cell("number", row.wire_bytes ? bytes(row.wire_bytes) : ""),
    cell("number", time ? seconds(time) : ""));
}

function matches({ row, text }, words, wanted) {
  const inModule = !wanted.module || row.module === wanted.module || row.module.startsWith(`${wanted.module}.`);
  const same = ["bucket", "by", "kind"].every((name) => !wanted[name] || row[name] === wanted[name]);
  return inModule && same && words.every((word) => text.includes(word));
}

function applyFilters() {
  const words = find("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = Object.fromEntries(FILTERS.map(([name]) => [name, find(`by-${name}`).value]));
  let shown = 0;
  for (const each of table.rows) {
    const good = matches(each, words, wanted);
    if (each.node.hidden === good) each.node.hidden = !good;
    shown += good;
  }
  find("shown").textContent = shown === table.rows.length ? plural(shown, "node")
    : `${shown.toLocaleString("en")} of ${plural(table.rows.length, "node")}`;
}

// Show one node of a program; the chart leads here.
function showNode(region, name) {
  const choice = find("by-region");
  if (choice.value !== region) { choice.value = region; choice.dispatchEvent(new Event("change")); }
  for (const id of ["search", ...FILTERS.map(([each]) => `by-${each}`)]) find(id).value = "";
  applyFilters();
  const row = table.rows.find((each) => each.row.name === name)?.node;
  if (!row) return;
  row.setAttribute("tabindex", "-1");
  row.scrollIntoView({ block: "center" });
  row.focus({ preventScroll: true });
}
