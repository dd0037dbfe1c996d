// Collectives with their reasons, and graph breaks with their remedies.

function header(names) {
  return el("thead", {}, el("tr", {}, names.map(([name, numeric]) => el("th", { class: numeric ? "number" : "" }, name))));
}

function drawBuckets(step) {
  const rows = step.parts.flatMap(({ program }) => {
    const reasons = new Map(program.buckets.map((each) => [`${each.kind} ${each.members}`, each.reason]));
    return program.collectives.map((each) => {
      const names = each.members.map((member) => member.param);
      return bucketRow(program, each, names, reasons.get(`${each.kind} ${names}`) || "");
    });
  });
  find("bucket-table").replaceChildren(
    header([["Collective"], ["In"], ["Parameters"], ["Full size", 1], ["Sent", 1], ["On the wire"], ["Time", 1], ["Hidden and exposed"], ["Why"]]),
    el("tbody", {}, rows.length ? rows
      : el("tr", {}, el("td", { colspan: 9, class: "empty" }, "This graph communicates nothing."))));
}

function bucketRow(program, each, names, reason) {
  const kind = each.kind === "reduce" ? "reduce" : "gather";
  const exposed = each.exposed_seconds, hidden = each.seconds - exposed;
  const whole = each.seconds || 1;
  const local = names.map((name) => (name.startsWith(`${each.bucket}.`) ? name.slice(each.bucket.length + 1) : name));
  const members = local.slice(0, 4).join(", ") + (names.length > 4 ? `, and ${names.length - 4} more` : "");
  const why = [reason && `ends: ${reason}`, each.starts_late && `not earlier: ${each.starts_late}`].filter(Boolean).join("; ");
  return el("tr", {},
    el("td", { class: "nowrap" }, el("i", { class: `dot ${kind}` }), el("span", { class: "mono" }, each.node)),
    el("td", {}, program.region),
    el("td", { class: "mono", title: names.join("\n") }, members),
    el("td", { class: "number" }, bytes(sum(each.members.map((member) => member.full_bytes)))),
    el("td", { class: "number" }, bytes(each.bytes_per_step ?? (each.seconds ? each.wire_bytes : 0))),
    el("td", { class: "wire" }, each.seconds ? wire(each) : ""),
    el("td", { class: "number" }, each.seconds ? seconds(each.seconds) : "–"),
    el("td", {}, each.seconds
      ? el("div", { class: "meter", title: `${seconds(hidden)} hidden, ${seconds(exposed)} exposed` },
        el("i", { class: `hidden-part ${kind}`, style: `width:${(100 * hidden) / whole}%` }),
        el("i", { class: "stall", style: `width:${(100 * exposed) / whole}%` }))
      : el("small", {}, "already here")),
    el("td", { class: "why" }, el("small", {}, readable(why))));
}

function wire(each) {
  const across = each.across_nodes_bytes;
  const hops = across ? `${bytes(each.wire_bytes - across)} inside the node, ${bytes(across)} between nodes` : "inside the node";
  return [el("span", { class: "mono" }, each.wire_dtype),
    each.scale_bytes ? el("small", {}, `, scales ${bytes(each.scale_bytes)}`) : null,
    el("br"), el("small", {}, hops)];
}

function drawBreaks(graphs) {
  const broken = graphs.filter((graph) => graph.break);
  find("break-list").replaceChildren(...(broken.length
    ? [el("p", { class: "lead" }, "Nothing is gathered ahead across a break: each one costs at least one exposed gather."),
      ...broken.map(breakItem)]
    : [el("p", { class: "empty good" }, graphs.length === 1 ? "The graph ends where its function returns."
      : "Every graph ends where its function returns; there are several because Dynamo compiled several times.")]));
}

function breakItem(graph) {
  const found = graph.break;
  return el("div", { class: "break" },
    el("div", {}, el("b", {}, `Graph ${graph.graph} ends at `), el("code", {}, `${found.file}:${found.line}`),
      found.function ? ` in ${found.function}` : ""),
    found.code ? el("pre", {}, found.code) : null,
    el("div", {}, found.reason, "."),
    el("ul", {}, found.remedies.map((each) => el("li", {}, each))));
}
