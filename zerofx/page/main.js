// Read the data, draw, and listen.

const read = (kind) => [...document.querySelectorAll(`script.${kind}`)].map((node) => JSON.parse(node.textContent));
const diffs = read("diffs"), measured = read("measured");
// A folder may still hold graphs that another version of zerofx dumped.
const graphs = read("graph").map((graph, place) => ({ ...graph, diffs: diffs[place], measured: measured[place] })).filter((graph) => graph.version === 2);
let step = null;

function drawChart() {
  const chart = find("chart"), width = chart.clientWidth;
  if (!step.parts.length) {
    chart.replaceChildren(el("p", { class: "empty" }, "Nothing of this graph has run through all passes yet: call backward once."));
    return;
  }
  const left = 84, right = width - 8, top = 24;
  const scale = (second) => left + (step.seconds ? second / step.seconds : 0) * (right - left);
  const lanes = drawLanes(step, scale, left, right, top);
  const memory = drawMemory(step, scale, left, right, lanes.bottom + 26);
  const cross = svg("line", { class: "cross", y1: top - 4, y2: memory.bottom, visibility: "hidden" });
  const hatch = svg("defs", {}, svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)" }, svg("line", { class: "hatch", x1: 1.5, x2: 1.5, y1: 0, y2: 6 })));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${memory.bottom + 24}`, height: memory.bottom + 24, role: "img",
    "aria-label": "Timeline and memory of one step" },
    hatch, drawAxis(step, scale, left, right, top, memory.bottom), lanes.group, memory.group, cross);
  const secondAt = (event) => ((event.clientX - picture.getBoundingClientRect().left - left) / (right - left)) * step.seconds;
  picture.addEventListener("pointermove", (event) => hover(event, secondAt(event), scale, cross));
  picture.addEventListener("pointerleave", () => { find("tip").hidden = true; cross.setAttribute("visibility", "hidden"); });
  picture.addEventListener("click", (event) => follow(event, secondAt(event), picture, lanes.bottom));
  chart.replaceChildren(picture);
}

function hover(event, second, scale, cross) {
  const tip = find("tip");
  if (second < 0 || second > step.seconds) { tip.hidden = true; return; }
  const { part, local, spans } = happeningAt(step, second);
  const words = { compute: "computes", link: "on the link", stall: "waits for", slow: "slowed by the link", host: "waits to be launched" };
  const memory = memoryAt(part.program, local);
  const x = scale(second);
  cross.setAttribute("x1", x); cross.setAttribute("x2", x); cross.setAttribute("visibility", "visible");
  tip.replaceChildren(
    el("b", {}, `${seconds(second)} · ${part.program.region}`),
    el("dl", {},
      spans.flatMap((span) => [el("dt", {}, words[span.stream]),
        el("dd", {}, el("code", {}, span.node), ` ${seconds(span.end - span.begin)} ${part.rows.get(span.node)?.module || ""}`)]),
      MEMORY.filter(([name]) => memory[name]).flatMap(([name, kind, word]) => [
        el("dt", {}, el("i", { class: `key ${kind}` }), word), el("dd", {}, bytes(memory[name]))])));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const beside = event.clientX + 18 + box.width < innerWidth ? event.clientX + 18 : event.clientX - 18 - box.width;
  tip.style.left = `${Math.max(6, beside)}px`;
  tip.style.top = `${Math.max(6, Math.min(event.clientY + 14, innerHeight - box.height - 6))}px`;
}

function follow(event, second, picture, border) {
  const { part, spans } = happeningAt(step, second);
  const y = event.clientY - picture.getBoundingClientRect().top;
  const inCompute = y < 24 + LANES[0][1] + GAP / 2;
  const found = spans.find((span) => (span.stream === "link") !== inCompute) || spans[0];
  if (y < border && found) showNode(part.program.region, found.node);
}

function drawGraph(place) {
  const graph = graphs[place];
  step = stepOf(graph);
  document.querySelectorAll("#graphs button").forEach((button, i) => button.setAttribute("aria-pressed", String(i === place)));
  const params = new Set(graph.programs.flatMap((program) => program.inputs.filter((each) => each.role === "shard").map((each) => each.param)));
  find("step-title").textContent = isMeasured(step) ? "One step, predicted and measured" : "One step, predicted";
  find("title").textContent = `graph ${graph.graph} · stage ${graph.stage} · ${plural(params.size, "parameter")}`;
  document.title = `zerofx report: graph ${graph.graph}, stage ${graph.stage}`;
  find("assumed").textContent = describeSetting(graph);
  find("step-legend").replaceChildren(key("compute", "compute, by block of the model"), key("gather", "gathers"),
    key("reduce", "reductions"), key("stall", "exposed: compute waits"), key("message", "buffers of collectives"),
    el("span", {}, "memory in the colours of its cause"));
  drawTiles(graph, step, graphs);
  drawChart();
  drawPeakList(step);
  drawBuckets(step);
  drawBreaks(graphs);
  drawProgram(graph);
  drawPasses(graph, graph.diffs);
}

function chooseTheme(name) {
  const root = document.documentElement;
  if (name === "auto") delete root.dataset.theme; else root.dataset.theme = name;
  find("theme").textContent = `Theme: ${name}`;
}

find("theme").addEventListener("click", () => {
  const order = ["auto", "light", "dark"];
  chooseTheme(order[(order.indexOf(document.documentElement.dataset.theme || "auto") + 1) % order.length]);
});
if (graphs.length > 1) {
  find("graphs").append(...graphs.map((graph, place) =>
    el("button", { type: "button", onclick: () => drawGraph(place) }, `Graph ${graph.graph}`)));
}
drawGraph(0);
let drawnWidth = find("chart").clientWidth;
new ResizeObserver(() => {
  if (find("chart").clientWidth === drawnWidth) return;
  drawnWidth = find("chart").clientWidth;
  drawChart();
}).observe(find("chart"));
