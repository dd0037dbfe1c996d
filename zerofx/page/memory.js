// The lower half of the chart, the axis, and what lives at the peak.

const MEMORY_HEIGHT = 150;

function memoryAt(program, local) {
  const { curve, columns } = program.memory;
  let low = 0, high = curve.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (curve[middle][0] <= local) low = middle; else high = middle - 1;
  }
  return Object.fromEntries(columns.map((name, place) => [name, curve[low]?.[place] ?? 0]));
}

function drawMemory(step, scale, left, right, top) {
  const group = svg("g", { id: "memory" });
  const most = Math.max(1, ...step.parts.map((part) => part.program.memory.peak_bytes)) * 1.12;
  const bottom = top + MEMORY_HEIGHT;
  const height = (n) => bottom - (n / most) * MEMORY_HEIGHT;
  group.append(svg("text", { class: "name", x: 0, y: top - 8 }, "memory"));
  for (const value of ticks(most, 4)) {
    group.append(svg("line", { class: "grid", x1: left, x2: right, y1: height(value), y2: height(value) }));
    if (value) group.append(svg("text", { x: left - 8, y: height(value) + 4, "text-anchor": "end" }, short(bytes(value))));
  }
  for (const part of step.parts) {
    const { curve, columns } = part.program.memory;
    const places = MEMORY.map(([name]) => columns.indexOf(name));
    const until = (i) => scale(part.offset + (i + 1 < curve.length ? curve[i + 1][0] : part.program.timeline.seconds)).toFixed(2);
    MEMORY.forEach(([, kind], layer) => {
      const edge = (row, number) => height(sum(places.slice(0, number).map((place) => row[place]))).toFixed(2);
      let path = `M${scale(part.offset).toFixed(2)} ${bottom}`, back = "";
      curve.forEach((row, i) => {
        path += `V${edge(row, layer + 1)}H${until(i)}`;
        back = `V${edge(row, layer)}H${scale(part.offset + row[0]).toFixed(2)}${back}`;
      });
      group.append(svg("path", { class: `area ${kind}`, d: `${path}${back}Z` }));
    });
  }
  if (step.peak) drawPeak(group, step.peak, scale, height, left, right, bottom);
  return { group, bottom };
}

function drawPeak(group, part, scale, height, left, right, bottom) {
  const memory = part.program.memory;
  const x = scale(part.offset + memory.peak_second), y = height(memory.peak_bytes);
  const anchor = x > (left + right) / 2 ? "end" : "start";
  group.append(svg("line", { class: "peak-line", x1: x, x2: x, y1: y, y2: bottom }),
    svg("circle", { class: "peak-dot", cx: x, cy: y, r: 4 }),
    svg("text", { class: "peak-text", x: x + (anchor === "end" ? -9 : 9), y: y - 3, "text-anchor": anchor },
      `peak ${bytes(memory.peak_bytes)}`));
}

function drawAxis(step, scale, left, right, top, bottom) {
  const group = svg("g");
  for (const second of ticks(step.seconds, Math.max(3, Math.round((right - left) / 110)))) {
    const x = scale(second);
    group.append(svg("line", { class: "grid", x1: x, x2: x, y1: top, y2: bottom + 4 }),
      svg("text", { x, y: bottom + 18, "text-anchor": second ? "middle" : "start" }, short(seconds(second))));
  }
  for (const part of step.parts) {
    const x = scale(part.offset);
    if (part.offset) group.append(svg("line", { class: "cut", x1: x, x2: x, y1: 0, y2: bottom }));
    const { region, timeline } = part.program;
    const times = seconds(timeline.seconds) + (part.measured ? `, measured ${seconds(part.measured.seconds)}` : "");
    const fits = 7 * (region.length + times.length + 2) < scale(part.offset + part.seconds) - x;
    group.append(svg("text", { class: "name", x: x + (part.offset ? 6 : 0), y: 13 }, region,
      fits ? svg("tspan", { fill: "var(--soft)", "font-weight": 400, dx: 7 }, times) : null));
  }
  return group;
}

const SHOWN_AT_PEAK = 12;

// What made a value, and where in the model, unless its name says so.
function aboutLife(each) {
  const op = each.name.startsWith("%") ? each.text.match(/= ([\w.]+)\(/)?.[1] : "";
  const module = each.name.includes(each.module) ? "" : each.module;
  return [op, module].filter(Boolean).map((text) => `  ${text}`).join("");
}

function drawPeakList(step) {
  const list = find("peak-list"), lead = find("peak-lead");
  if (!step.peak) {
    lead.textContent = "No program of this graph runs, so nothing is held.";
    list.replaceChildren();
    return;
  }
  const { memory, region } = step.peak.program;
  lead.replaceChildren(`${bytes(memory.peak_bytes)} at `, el("code", {}, memory.peak_node), ` in ${region}: `,
    MEMORY.map(([name, , word]) => [word, sum(memory.at_peak.filter((each) => each.kind === name).map((each) => each.bytes))])
      .filter(([, size]) => size).map(([word, size]) => `${bytes(size)} ${word}`).join(", "),
    ". Parameters at rest and the optimizer's state come on top.");
  const largest = memory.at_peak[0]?.bytes || 1;
  const kinds = Object.fromEntries(MEMORY.map(([name, kind, word]) => [name, [kind, word]]));
  const rest = memory.at_peak.slice(SHOWN_AT_PEAK);
  list.replaceChildren(...memory.at_peak.slice(0, SHOWN_AT_PEAK).flatMap((each) => [
    el("div", { class: "label", title: `${each.text}\n${kinds[each.kind][1]}${each.module ? `, ${each.module}` : ""}` },
      each.name, el("small", {}, aboutLife(each))),
    el("div", { class: "track" }, el("div", { class: `fill ${kinds[each.kind][0]}`, style: `width:${(100 * each.bytes) / largest}%` })),
    el("div", { class: "number" }, bytes(each.bytes)),
  ]), rest.length ? el("div", { class: "rest" },
    `and ${plural(rest.length, "smaller value")}, ${bytes(sum(rest.map((each) => each.bytes)))} together`) : "");
}
