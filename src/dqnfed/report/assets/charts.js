const SVG_NS = "http://www.w3.org/2000/svg";
const N_COLOURS = 8;
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG_NS, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function html(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

const colour = (slot) => `var(--s${slot % N_COLOURS})`;
const dash = (slot) => DASHES[Math.floor(slot / N_COLOURS) % DASHES.length];
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

const formats = new Map();  // making a format takes longer than using it a hundred times
function decimals(value, digits) {
  if (!formats.has(digits)) formats.set(digits, new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  return formats.get(digits).format(value);
}

function shortNumber(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)} G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)} M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)} k`;
  return value.toLocaleString("en", { maximumFractionDigits: size < 1 ? 3 : 1 });
}

function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) {
    found.push(Math.abs(value) < step * 1e-6 ? 0 : value);
  }
  return found;
}

function padded(values, { floor = -Infinity, ceiling = Infinity } = {}) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (known(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > high) return [0, 1];
  if (low === high) { low -= 1; high += 1; }
  const room = (high - low) * 0.04;
  return [Math.max(floor, low - room), Math.min(ceiling, high + room)];
}

function linear(domain, range) {
  const slope = (range[1] - range[0]) / (domain[1] - domain[0] || 1);
  return (value) => range[0] + (value - domain[0]) * slope;
}

const ruler = document.createElement("canvas").getContext("2d");
function textWidth(text, bold = false) {
  ruler.font = `${bold ? 600 : 400} 12px system-ui, sans-serif`;
  return ruler.measureText(text).width * 1.04;
}

function shortened(text, room, bold) {
  if (textWidth(text, bold) <= room) return text;
  let kept = text;
  while (kept.length > 2 && textWidth(`${kept}…`, bold) > room) kept = kept.slice(0, -1);
  return `${kept}…`;
}

/** Positions as near to the wanted ones as a distance of `gap` allows, inside [top, bottom]. */
function spreadApart(wanted, gap, top, bottom) {
  const order = wanted.map((_, i) => i).sort((a, b) => wanted[a] - wanted[b]);
  const placed = [];
  for (const i of order) {  // blocks of touching labels, each centred on the mean of what its labels want
    let block = { members: [i], centre: wanted[i] };
    while (placed.length) {
      const above = placed[placed.length - 1];
      const reach = ((above.members.length + block.members.length) * gap) / 2;
      if (block.centre - above.centre >= reach) break;
      placed.pop();
      const members = [...above.members, ...block.members];
      block = { members, centre: mean(members.map((j, place) => wanted[j] - (place - (members.length - 1) / 2) * gap)) };
    }
    const half = ((block.members.length - 1) * gap) / 2;
    block.centre = Math.min(Math.max(block.centre, top + half), Math.max(bottom - half, top + half));
    placed.push(block);
  }
  const found = new Array(wanted.length);
  for (const block of placed) {
    block.members.forEach((i, place) => { found[i] = block.centre + (place - (block.members.length - 1) / 2) * gap; });
  }
  return found;
}

function axes(root, frame, x, y, xTicks, yTicks, spec) {
  const { left, right, top, bottom } = frame;
  for (const value of yTicks) {
    root.append(svg("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }));
    root.append(svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, spec.yFormat(value)));
  }
  root.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  for (const value of xTicks) {
    root.append(svg("line", { class: "axis", x1: x(value), x2: x(value), y1: bottom, y2: bottom + 4 }));
    root.append(svg("text", { x: x(value), y: bottom + 18, "text-anchor": "middle" }, spec.xFormat(value)));
  }
  root.append(svg("text", { x: right, y: bottom + 36, "text-anchor": "end" }, spec.xTitle));
  root.append(svg("text", { x: 0, y: top - 12 }, spec.yTitle));
}

function emptyPlot(host, message) {
  host.replaceChildren(html("p", { class: "empty" }, message));
}

/** Lines with their names at their ends. Series: {label, slot, main, x, y, low?, high?}. */
function lineChart(host, spec) {
  const series = spec.series.filter((s) => s.x.length && s.y.some(known));
  if (!series.length) return emptyPlot(host, spec.none || "These runs did not measure it.");
  const width = Math.max(280, host.clientWidth);
  const nameRoom = Math.min(width * 0.34, Math.max(...series.map((s) => textWidth(s.label, true))) + 20);
  const height = Math.max(spec.height || 340, series.length * 15 + 90);
  const yDomain = spec.yDomain || padded(series.flatMap((s) => (s.low && spec.bands !== false ? [...s.low, ...s.high] : s.y)), spec.limits);
  const xDomain = padded(series.flatMap((s) => s.x));
  xDomain[0] = Math.min(...series.map((s) => s.x[0]));
  xDomain[1] = Math.max(...series.map((s) => s.x[s.x.length - 1]));
  if (xDomain[0] === xDomain[1]) xDomain[1] += 1;
  const yTicks = ticks(...yDomain, 5);
  const left = Math.max(...yTicks.map((value) => textWidth(spec.yFormat(value)))) + 10;
  const frame = { left, right: width - nameRoom, top: 28, bottom: height - 44 };
  const x = linear(xDomain, [frame.left, frame.right]);
  const y = linear(yDomain, [frame.bottom, frame.top]);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": describe(spec, series) });
  axes(root, frame, x, y, ticks(...xDomain, Math.max(2, (frame.right - left) / 90)), yTicks, spec);
  for (const s of series) if (s.low && spec.bands !== false) root.append(svg("path", { class: "band", d: bandPath(s, x, y), style: `fill:${colour(s.slot)}` }));
  for (const s of [...series].sort((a, b) => Number(a.main) - Number(b.main))) {
    root.append(svg("path", {
      class: s.main ? "line main" : "line", d: linePath(s, x, y), style: `stroke:${colour(s.slot)}`, "stroke-dasharray": dash(s.slot),
    }));
  }
  const ends = series.map((s) => lastKnown(s));
  const places = spreadApart(ends.map((end) => y(end.y)), 15, frame.top, frame.bottom);
  series.forEach((s, i) => {
    const from = [x(ends[i].x), y(ends[i].y)];
    root.append(svg("path", {
      class: "leader", style: `stroke:${colour(s.slot)}`, d: `M${from[0] + 2},${from[1]}L${frame.right + 5},${from[1]}L${frame.right + 11},${places[i]}`,
    }));
    const name = shortened(s.label, nameRoom - 15, true);
    root.append(svg("text", { class: "name", x: frame.right + 14, y: places[i] + 4, style: `fill:${colour(s.slot)}` }, name));
  });
  host.replaceChildren(root);
  reader(host, root, spec, series, frame, x, y, width, height);
}

function lastKnown(s) {
  for (let i = s.y.length - 1; i >= 0; i--) if (known(s.y[i])) return { x: s.x[i], y: s.y[i] };
  return { x: 0, y: 0 };
}

function linePath(s, x, y) {
  let path = "", pen = "M";
  s.x.forEach((value, i) => {
    if (!known(s.y[i])) { pen = "M"; return; }
    path += `${pen}${x(value).toFixed(1)},${y(s.y[i]).toFixed(1)}`;
    pen = "L";
  });
  return path;
}

function bandPath(s, x, y) {
  const at = s.x.map((_, i) => i).filter((i) => known(s.low[i]) && known(s.high[i]));
  const point = (i, values) => `${x(s.x[i]).toFixed(1)},${y(values[i]).toFixed(1)}`;
  if (!at.length) return "";
  return `M${at.map((i) => point(i, s.high)).join("L")}L${at.reverse().map((i) => point(i, s.low)).join("L")}Z`;
}

function describe(spec, series) {
  const ends = series.map((s) => [s.label, lastKnown(s).y]).sort((a, b) => b[1] - a[1]);
  return `${spec.yTitle} against ${spec.xTitle}. At the end: ${ends.map(([name, value]) => `${name} ${spec.valueFormat(value)}`).join(", ")}.`;
}

function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle; else high = middle;
  }
  return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
}

/** A crosshair for pointer and arrow keys; for assistive technology it is a slider whose text reads the values. */
function reader(host, root, spec, series, frame, x, y, width, height) {
  const longest = series.reduce((a, b) => (b.x.length > a.x.length ? b : a));
  const handle = html("div", {
    class: "reader", tabindex: "0", role: "slider", "aria-label": `Read values: ${spec.yTitle} against ${spec.xTitle}`,
    "aria-valuemin": 0, "aria-valuemax": longest.x.length - 1, "aria-valuenow": longest.x.length - 1, "aria-orientation": "horizontal",
    style: `left:${(100 * frame.left) / width}%;width:${(100 * (frame.right - frame.left)) / width}%;top:${(100 * frame.top) / height}%;height:${(100 * (frame.bottom - frame.top)) / height}%`,
  });
  const box = html("div", { class: "readout", hidden: true });
  const cross = svg("g", { visibility: "hidden" });
  root.append(cross);
  let at = longest.x.length - 1;
  const textAt = () => series
    .map((s) => { const i = nearest(s.x, longest.x[at]); return { s, value: s.y[i] }; })
    .filter((entry) => known(entry.value))
    .sort((a, b) => b.value - a.value);
  const announce = () => {
    const entries = textAt();
    handle.setAttribute("aria-valuenow", at);
    handle.setAttribute("aria-valuetext", `${spec.xTitle} ${spec.xValue(longest.x[at])}: ${entries.map(({ s, value }) => `${s.label} ${spec.valueFormat(value)}`).join(", ")}`);
    return entries;
  };
  const show = () => {
    const entries = announce();
    const here = x(longest.x[at]);
    cross.replaceChildren(svg("line", { class: "cross", x1: here, x2: here, y1: frame.top, y2: frame.bottom }));
    for (const { s, value } of entries) cross.append(svg("circle", { cx: here, cy: y(value), r: 3.5, style: `fill:${colour(s.slot)}` }));
    cross.setAttribute("visibility", "visible");
    box.replaceChildren(html("b", {}, `${spec.xTitle}: ${spec.xValue(longest.x[at])}`));
    for (const { s, value } of entries) {
      const line = html("div", {}, html("span", { class: "swatch", style: `color:${colour(s.slot)}` }), `${s.label} `);
      line.append(html("b", {}, spec.valueFormat(value)));
      box.append(line);
    }
    box.hidden = false;
    const share = here / width;
    box.style.left = share < 0.5 ? `calc(${100 * share}% + 12px)` : "";
    box.style.right = share < 0.5 ? "" : `calc(${100 * (1 - share)}% + 12px)`;
  };
  const hide = () => { box.hidden = true; cross.setAttribute("visibility", "hidden"); };
  handle.addEventListener("pointermove", (event) => {
    const bounds = handle.getBoundingClientRect();
    const share = (event.clientX - bounds.left) / bounds.width;
    const [first, last] = [longest.x[0], longest.x[longest.x.length - 1]];
    const wanted = linear([0, 1], [Math.min(first, ...series.map((s) => s.x[0])), Math.max(last, ...series.map((s) => s.x[s.x.length - 1]))])(share);
    at = nearest(longest.x, wanted);
    show();
  });
  handle.addEventListener("pointerleave", () => { if (document.activeElement !== handle) hide(); });
  handle.addEventListener("focus", () => { if (handle.matches(":focus-visible")) show(); });
  handle.addEventListener("blur", hide);
  handle.addEventListener("keydown", (event) => {
    const last = longest.x.length - 1;
    const page = Math.max(1, Math.round(last / 10));
    const moves = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, PageDown: at - page, PageUp: at + page, Home: 0, End: last };
    if (event.key === "Escape") return hide();
    if (!(event.key in moves)) return undefined;
    event.preventDefault();
    at = Math.min(last, Math.max(0, moves[event.key]));
    return show();
  });
  announce();
  host.append(handle, box);
}

/** One small histogram per method on a common axis. Rows: {label, slot, values}. */
function histogram(host, spec) {
  const rows = spec.rows.filter((row) => row.values.length);
  if (!rows.length) return emptyPlot(host, "These runs hold no client accuracies.");
  const width = Math.max(280, host.clientWidth);
  const all = rows.flatMap((row) => row.values);
  let [low, high] = [Math.min(...all), Math.max(...all)];
  const step = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 2.5, 5, 10].find((size) => (high - low) / size <= 24) || (high - low) / 24;
  low = Math.floor(low / step) * step;
  high = Math.max(low + step, Math.ceil(high / step - 1e-9) * step);
  const n = Math.round((high - low) / step);
  const counts = rows.map((row) => {
    const bins = new Array(n).fill(0);
    for (const value of row.values) bins[Math.min(n - 1, Math.floor((value - low) / step))] += 1 / row.values.length;
    return bins;
  });
  const tallest = Math.max(...counts.flat());
  const rowHeight = 64;
  const height = rows.length * rowHeight + 52;
  const frame = { left: 2, right: width - 4 };
  const x = linear([low, high], [frame.left, frame.right]);
  const root = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `Histograms of client ${spec.data.score}. ${rows.map((row) => `${row.label}: from ${decimals(Math.min(...row.values), 1)} to ${decimals(Math.max(...row.values), 1)}, mean ${decimals(mean(row.values), 1)}`).join("; ")}.`,
  });
  rows.forEach((row, i) => {
    const base = (i + 1) * rowHeight + 6;
    const tall = linear([0, tallest], [0, rowHeight - 24]);
    counts[i].forEach((share, bin) => {
      if (share) root.append(svg("rect", { x: x(low + bin * step) + 0.5, y: base - tall(share), width: Math.max(1, x(low + step) - x(low) - 1), height: tall(share), style: `fill:${colour(row.slot)}` }));
    });
    root.append(svg("line", { class: "axis", x1: frame.left, x2: frame.right, y1: base, y2: base, opacity: i === rows.length - 1 ? 1 : 0.35 }));
    const centre = x(mean(row.values));
    root.append(svg("line", { x1: centre, x2: centre, y1: base - rowHeight + 22, y2: base, style: "stroke:var(--ink)", "stroke-width": 1.5, "stroke-dasharray": "3 2" }));
    root.append(svg("text", { class: "name", x: 0, y: base - rowHeight + 16, style: `fill:${colour(row.slot)}` }, shortened(row.label, width * 0.5, true)));
    root.append(svg("text", { x: frame.right, y: base - rowHeight + 16, "text-anchor": "end" }, `mean ${decimals(mean(row.values), 1)}, lowest ${decimals(Math.min(...row.values), 1)}`));
  });
  const bottom = rows.length * rowHeight + 6;
  for (const value of ticks(low, high, Math.max(3, width / 90))) {
    root.append(svg("line", { class: "axis", x1: x(value), x2: x(value), y1: bottom, y2: bottom + 4 }));
    const anchor = x(value) < 12 ? "start" : x(value) > width - 16 ? "end" : "middle";
    root.append(svg("text", { x: x(value), y: bottom + 18, "text-anchor": anchor }, shortNumber(value)));
  }
  root.append(svg("text", { x: frame.right, y: bottom + 36, "text-anchor": "end" }, withUnit(`client ${spec.data.score}`, spec.data)));
  host.replaceChildren(root);
  return undefined;
}

/** Mean against worst 10 %, one large dot a method, one small dot a seed, with the Pareto front. Points: {label, slot, seeds: [[x, y]]}. */
function scatter(host, spec) {
  const points = spec.points
    .map((p) => ({ ...p, seeds: p.seeds.filter((pair) => pair.every(known)) }))
    .filter((p) => p.seeds.length)
    .map((p) => ({ ...p, x: mean(p.seeds.map((s) => s[0])), y: mean(p.seeds.map((s) => s[1])) }));
  if (!points.length) return emptyPlot(host, "These runs hold no accuracies.");
  const width = Math.max(280, host.clientWidth);
  const height = 380;
  const xDomain = padded(points.flatMap((p) => p.seeds.map((s) => s[0])));
  const yDomain = padded(points.flatMap((p) => p.seeds.map((s) => s[1])));
  const widen = (domain, share) => { const room = (domain[1] - domain[0]) * share; return [domain[0] - room, domain[1] + room]; };
  const [xs, ys] = [widen(xDomain, 0.06), widen(yDomain, 0.04)];
  const yTicks = ticks(...ys, 5);
  const format = (value) => decimals(value, Math.min(xs[1] - xs[0], ys[1] - ys[0]) < 5 ? 1 : 0);
  const frame = { left: Math.max(...yTicks.map((v) => textWidth(format(v)))) + 10, right: width - 8, top: 28, bottom: height - 44 };
  const x = linear(xs, [frame.left, frame.right]);
  const y = linear(ys, [frame.bottom, frame.top]);
  const front = points.filter((p) => !points.some((q) => q !== p && q.x >= p.x && q.y >= p.y && (q.x > p.x || q.y > p.y))).sort((a, b) => a.x - b.x);
  const root = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `Mean ${spec.data.score} against that of the worst tenth. On the Pareto front: ${front.map((p) => p.label).join(", ")}. ${points.map((p) => `${p.label}: mean ${decimals(p.x, 1)}, worst tenth ${decimals(p.y, 1)}`).join("; ")}.`,
  });
  axes(root, frame, x, y, ticks(...xs, Math.max(2, (frame.right - frame.left) / 90)), yTicks, { xTitle: withUnit(`mean ${spec.data.score}`, spec.data), yTitle: withUnit(`${spec.data.score} of the worst tenth`, spec.data), xFormat: format, yFormat: format });
  const corners = [[frame.left, y(front[0].y)]];
  front.forEach((p, i) => { corners.push([x(p.x), y(p.y)], [x(p.x), i + 1 < front.length ? y(front[i + 1].y) : frame.bottom]); });
  root.append(svg("path", { class: "front", d: `M${corners.map((corner) => corner.join(",")).join("L")}` }));
  const around = (cx, cy, r) => [cx - r, cy - r, cx + r, cy + r];
  const taken = points.flatMap((p) => [around(x(p.x), y(p.y), 7), ...p.seeds.map(([a, b]) => around(x(a), y(b), 3))]);
  corners.slice(1).forEach(([right, bottom], i) => taken.push([corners[i][0], Math.min(corners[i][1], bottom) - 1, right + 1, Math.max(corners[i][1], bottom) + 1]));
  for (const p of points) {
    if (p.seeds.length > 1) for (const [a, b] of p.seeds) root.append(svg("circle", { cx: x(a), cy: y(b), r: 2.5, opacity: 0.45, style: `fill:${colour(p.slot)}` }));
  }
  for (const p of points) {
    const [cx, cy] = [x(p.x), y(p.y)];
    root.append(svg("circle", { cx, cy, r: 6, style: `fill:${colour(p.slot)};stroke:var(--paper)`, "stroke-width": 1.5 }, svg("title", {}, `${p.label}: mean ${decimals(p.x, 2)}, worst 10 % ${decimals(p.y, 2)}`)));
    const name = shortened(p.label, frame.right - frame.left, true);
    const long = textWidth(name, true);
    const box = labelPlace(cx, cy, long, frame, taken);
    taken.push(box);
    if (Math.hypot((box[0] + box[2]) / 2 - cx, (box[1] + box[3]) / 2 - cy) > long / 2 + 24) {
      root.append(svg("line", { class: "leader", x1: cx, y1: cy, x2: Math.min(Math.max(cx, box[0]), box[2]), y2: (box[1] + box[3]) / 2, style: `stroke:${colour(p.slot)}` }));
    }
    root.append(svg("text", { class: "name", x: box[0], y: box[3] - 4, style: `fill:${colour(p.slot)}` }, name));
  }
  host.replaceChildren(root);
  return undefined;
}

/** The first place around a dot, near ones first, where a label covers nothing yet. */
function labelPlace(cx, cy, long, frame, taken) {
  const free = ([a, b, c, d]) => a >= frame.left && c <= frame.right + 8 && b >= frame.top - 4 && d <= frame.bottom
    && !taken.some((t) => a < t[2] && c > t[0] && b < t[3] && d > t[1]);
  for (const away of [10, 24, 40, 60, 85, 115]) {
    for (const turn of [0, 4, 1, 7, 3, 5, 2, 6]) {
      const angle = (turn * Math.PI) / 4;
      const [px, py] = [cx + away * Math.cos(angle), cy - away * Math.sin(angle)];
      const left = turn === 2 || turn === 6 ? px - long / 2 : [3, 4, 5].includes(turn) ? px - long : px;
      const box = [left, py - 8, left + long, py + 8];
      if (free(box)) return box;
    }
  }
  return [Math.min(cx + 10, frame.right - long), cy - 8, Math.min(cx + 10, frame.right - long) + long, cy + 8];
}
