// What each pass did to each program.

function drawPasses(graph, diffs) {
  const list = find("pass-list");
  const show = (program) => {
    const changes = new Map((diffs[program.region] || []).map((each) => [each.pass.replace(/^\d+_/, ""), each.diff]));
    const items = program.passes.map((each, place) => passItem(each, place + 1, changes.get(each.name) || ""));
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.value === program.region)));
    list.replaceChildren(el("div", { class: "region" }, buttons),
      ...(items.length ? items : [el("p", { class: "empty" }, "No pass ran on this program.")]));
  };
  const buttons = graph.programs.map((program) =>
    el("button", { type: "button", value: program.region, onclick: () => show(program) }, program.region));
  const first = graph.programs.find((program) => program.timeline) || graph.programs[0];
  if (first) show(first);
  else list.replaceChildren(el("p", { class: "empty" }, "This graph has no program."));
}

function passItem(each, number, diff) {
  const lines = diff.split("\n").filter((line) => line && !/^(---|\+\+\+) /.test(line));
  const plus = lines.filter((line) => line[0] === "+").length, minus = lines.filter((line) => line[0] === "-").length;
  const body = el("div");
  const head = el("summary", {}, el("span", { class: "number" }, String(number)), el("b", {}, each.name),
    el("small", {}, [each.mandatory ? "mandatory" : "optional", each.numerics].join(", ")),
    el("span", { class: "delta" }, each.changed
      ? [el("span", { class: "plus" }, `+${plus}`), " ", el("span", { class: "minus" }, `−${minus}`), " lines"] : "nothing changed"));
  // A diff is drawn when it is first looked at.
  const open = () => { if (!body.childElementCount) body.append(passBody(each, lines)); };
  return el("details", { ontoggle: open, "data-pass": each.name }, head, body);
}

function passBody(each, lines) {
  const options = Object.entries(each.options || {}).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join("  ");
  const kinds = { "+": "added", "-": "removed", "@": "place" };
  return el("div", {},
    el("p", { class: "empty mono" }, `${each.class}${options ? `  ${options}` : ""}`),
    lines.length ? el("pre", {}, lines.map((line) => el("span", { class: kinds[line[0]] || "" }, line))) : null);
}
