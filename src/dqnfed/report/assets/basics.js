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

const formats = new Map(); // making a format takes longer than using it a hundred times
function decimals(value, digits) {
  if (!formats.has(digits))
    formats.set(digits, new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
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
  let low = Infinity,
    high = -Infinity;
  for (const value of values)
    if (known(value)) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  if (low > high) return [0, 1];
  if (low === high) {
    low -= 1;
    high += 1;
  }
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
  for (const i of order) {
    // blocks of touching labels, each centred on the mean of what its labels want
    let block = { members: [i], centre: wanted[i] };
    while (placed.length) {
      const above = placed[placed.length - 1];
      const reach = ((above.members.length + block.members.length) * gap) / 2;
      if (block.centre - above.centre >= reach) break;
      placed.pop();
      const members = [...above.members, ...block.members];
      block = {
        members,
        centre: mean(members.map((j, place) => wanted[j] - (place - (members.length - 1) / 2) * gap)),
      };
    }
    const half = ((block.members.length - 1) * gap) / 2;
    block.centre = Math.min(Math.max(block.centre, top + half), Math.max(bottom - half, top + half));
    placed.push(block);
  }
  const found = new Array(wanted.length);
  for (const block of placed) {
    block.members.forEach((i, place) => {
      found[i] = block.centre + (place - (block.members.length - 1) / 2) * gap;
    });
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
