// A step: the programs of a graph that run, one after another on one axis; and what is said about it.

const MEMORY = [
  ["activations", "compute", "activations and inputs"],
  ["gathered", "gather", "gathered parameters"],
  ["gradients", "reduce", "gradients"],
  ["messages", "message", "buffers of collectives"],
];

function stepOf(graph) {
  let offset = 0;
  const parts = [];
  for (const program of graph.programs.filter((each) => each.timeline)) {
    const rows = new Map(program.nodes.map((node) => [node.name, node]));
    const measured = graph.measured[program.region] || null;
    const length = Math.max(program.timeline.seconds, measured?.seconds || 0);
    parts.push({ program, rows, offset, measured, seconds: length });
    offset += length;
  }
  const peak = parts.reduce(
    (best, part) => (!best || part.program.memory.peak_bytes > best.program.memory.peak_bytes ? part : best), null);
  return { parts, seconds: offset, peak };
}

const isMeasured = (step) => step.parts.some((part) => part.measured);

// What was measured, in words, if anything was.
function measuredWords(step) {
  const times = step.parts.map((part) => part.measured);
  if (!times.length || times.includes(null)) return "";
  return `; measured: ${seconds(sum(times.map((each) => each.seconds)))}, ` +
    `${seconds(sum(times.map((each) => each.exposed_seconds)))} waiting`;
}

function totals(step) {
  const add = (name) => sum(step.parts.map((part) => part.program.timeline[name]));
  const [compute, link, exposed] = ["compute_seconds", "link_seconds", "exposed_seconds"].map(add);
  return { compute, link, exposed, hidden: Math.max(0, link - exposed) };
}

function tile(title, value, note, bar) {
  return el("div", { class: "tile" }, el("h3", {}, title), el("div", { class: "value" }, value), bar || null,
    el("p", {}, note));
}

function share(parts, whole) {
  return el("div", { class: "share" }, parts.map(([kind, value]) =>
    el("i", { class: kind, style: `width:${whole > 0 ? (100 * value) / whole : 0}%` })));
}

function drawTiles(graph, step, graphs) {
  const found = totals(step);
  const collectives = step.parts.flatMap((part) => part.program.collectives);
  const sent = graph.wire_bytes_per_step ?? sum(step.parts.map((part) => part.program.wire_bytes));
  const breaks = graphs.filter((each) => each.break).length;
  const gathers = collectives.filter((each) => each.kind === "unshard").length;
  find("tiles").replaceChildren(
    tile("Predicted step", seconds(found.compute + found.exposed),
      `${seconds(found.compute)} compute, ${seconds(found.exposed)} waiting; without the optimizer${measuredWords(step)}`,
      share([["compute", found.compute], ["stall", found.exposed]], found.compute + found.exposed)),
    tile("Communication hidden", percent(found.hidden, found.link),
      `${seconds(found.hidden)} of ${seconds(found.link)} behind computation`,
      share([["gather", found.hidden]], found.link)),
    tile("A rank sends in a step", bytes(sent),
      `${plural(gathers, "gather")}, ${plural(collectives.length - gathers, "reduction")}`),
    tile("Most memory at once", step.peak ? bytes(step.peak.program.memory.peak_bytes) : "–",
      step.peak ? `in ${step.peak.program.region}, besides parameters at rest` : "nothing runs"),
    tile("Graphs", String(graphs.length), breaks ? plural(breaks, "graph break") : "no graph break"));
}

function describeSetting(graph) {
  const s = graph.setting;
  const same = s.gathers.bytes_per_second === s.reductions.bytes_per_second;
  const link = same ? `a link of ${rate(s.gathers.bytes_per_second)}`
    : `gathers at ${rate(s.gathers.bytes_per_second)} and reductions at ${rate(s.reductions.bytes_per_second)}`;
  return `ZeRO stage ${graph.stage} on ${plural(s.num_ranks, "rank")}. Each computes ${count(s.flops)}FLOP/s and reads ` +
    `${rate(s.memory_bytes_per_second)} (${s.device === "cuda" ? "GPU" : "CPU"}, kernels ${s.fused ? "" : "not "}fused), over ` +
    `${link} with ${seconds(s.gathers.latency)} latency, ${s.link_measured ? "as measured there." : "both assumed."}`;
}
