// The upper half of the chart: what computes, what is on its way, and where computation stands still.

const LANES = [["compute", 34], ["measured", 26], ["gathers", 22], ["reductions", 22]];
const GAP = 9;

// Neighbouring kernels of one block of the model become one bar.
function computeBars(part) {
  const bars = [];
  for (const span of part.program.timeline.spans) {
    if (span.stream !== "compute") continue;
    const block = blockOf(part.rows.get(span.node)?.module || "");
    const last = bars.at(-1);
    const joins = last && span.begin - last.end < 1e-9 && (last.block === block || block === "");
    if (joins) last.end = span.end;
    else bars.push({ block, begin: span.begin, end: span.end });
  }
  bars.forEach((bar, place) => { bar.kind = place % 2 ? "compute-2" : "compute"; });
  return bars;
}

function label(text, x, y, width, kind) {
  if (width < 26) return null;
  const room = Math.floor((width - 8) / 6.4);
  const short = text.length <= room ? text : text.split(".").at(-1);
  if (!short || short.length > room) return null;
  return svg("text", { class: `in ${kind}`, x: x + width / 2, y, "text-anchor": "middle" }, short);
}

function bar(kind, x, y, width, height) {
  return svg("rect", { class: kind, x: x.toFixed(2), y, width: Math.max(0.6, width).toFixed(2), height, rx: 2 });
}

function drawLanes(step, scale, left, right, top) {
  const group = svg("g", { id: "lanes" });
  const tops = {};
  let y = top;
  for (const [name, height] of LANES) {
    if (name === "measured" && !isMeasured(step)) continue;
    tops[name] = y;
    group.append(svg("rect", { class: "lane", x: left, y, width: right - left, height, rx: 3 }),
      svg("text", { class: "name", x: 0, y: y + height / 2 + 4 }, name));
    y += height + GAP;
  }
  for (const part of step.parts) {
    drawPart(group, part, tops, scale);
    if (part.measured) drawMeasured(group, part, tops.measured, scale);
  }
  return { group, bottom: y - GAP };
}

function drawPart(group, part, tops, scale) {
  const at = (second) => scale(part.offset + second);
  for (const each of computeBars(part)) {
    const x = at(each.begin), width = at(each.end) - x;
    group.append(bar(each.kind, x, tops.compute, Math.max(width - 0.7, 0.3), 34));
    const text = label(each.block, x, tops.compute + 21, width, "on-compute");
    if (text) group.append(text);
  }
  for (const span of part.program.timeline.spans) {
    const x = at(span.begin), width = at(span.end) - x;
    if (span.stream === "stall") group.append(bar("stall", x, tops.compute, width, 34));
    if (span.stream !== "link") continue;
    const row = part.rows.get(span.node), kind = row.kind === "reduce" ? "reduce" : "gather";
    const y = kind === "reduce" ? tops.reductions : tops.gathers;
    const text = label(row.bucket || row.params.join(", "), x, y + 15, width, "on-link");
    group.append(bar(kind, x, y, Math.max(width - 1, 0.6), 22));
    if (text) group.append(text);
  }
}

// The stream that computes, as one run of the program found it.
function drawMeasured(group, part, top, scale) {
  let place = 0;
  for (const span of part.measured.spans) {
    if (span.stream === "link") continue;
    const x = scale(part.offset + span.begin), width = scale(part.offset + span.end) - x;
    const kind = span.stream === "stall" ? "stall" : ["compute", "compute-2"][place++ % 2];
    const shape = bar(kind, x, top, width, 26);
    shape.append(svg("title", {}, `measured: ${span.stream} ${span.node}, ${seconds(span.end - span.begin)}`));
    const text = span.stream === "stall" ? null
      : label(blockOf(part.rows.get(span.node)?.module || ""), x, top + 17, width, "on-compute");
    group.append(shape);
    if (text) group.append(text);
  }
}

// What happens at one second of the step, for the tooltip.
function happeningAt(step, second) {
  const part = step.parts.findLast((each) => each.offset <= second) || step.parts[0];
  const local = second - part.offset;
  const spans = part.program.timeline.spans.filter((span) => span.begin <= local && local < span.end);
  return { part, local, spans };
}
