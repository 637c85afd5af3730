/** One small histogram per method on a common axis. Rows: {label, slot, values}. */
function histogram(host, spec) {
  const rows = spec.rows.filter((row) => row.values.length);
  if (!rows.length) return emptyPlot(host, "These runs hold no scores of clients.");
  const width = Math.max(280, host.clientWidth);
  const all = rows.flatMap((row) => row.values);
  const { digits } = spec.data;
  let [low, high] = [Math.min(...all), Math.max(...all)];
  const step =
    [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 2.5, 5, 10].find(
      (size) => (high - low) / size <= 24,
    ) || (high - low) / 24;
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
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": `Histograms of client ${spec.data.score}. ${rows.map((row) => `${row.label}: from ${decimals(Math.min(...row.values), digits)} to ${decimals(Math.max(...row.values), digits)}, mean ${decimals(mean(row.values), digits)}`).join("; ")}.`,
  });
  rows.forEach((row, i) => {
    const base = (i + 1) * rowHeight + 6;
    const tall = linear([0, tallest], [0, rowHeight - 24]);
    counts[i].forEach((share, bin) => {
      if (share)
        root.append(
          svg("rect", {
            x: x(low + bin * step) + 0.5,
            y: base - tall(share),
            width: Math.max(1, x(low + step) - x(low) - 1),
            height: tall(share),
            style: `fill:${colour(row.slot)}`,
          }),
        );
    });
    root.append(
      svg("line", {
        class: "axis",
        x1: frame.left,
        x2: frame.right,
        y1: base,
        y2: base,
        opacity: i === rows.length - 1 ? 1 : 0.35,
      }),
    );
    const centre = x(mean(row.values));
    root.append(
      svg("line", {
        x1: centre,
        x2: centre,
        y1: base - rowHeight + 22,
        y2: base,
        style: "stroke:var(--ink)",
        "stroke-width": 1.5,
        "stroke-dasharray": "3 2",
      }),
    );
    root.append(
      svg(
        "text",
        { class: "name", x: 0, y: base - rowHeight + 16, style: `fill:${colour(row.slot)}` },
        shortened(row.label, width * 0.5, true),
      ),
    );
    root.append(
      svg(
        "text",
        { x: frame.right, y: base - rowHeight + 16, "text-anchor": "end" },
        `mean ${decimals(mean(row.values), digits)}, lowest ${decimals(Math.min(...row.values), digits)}`,
      ),
    );
  });
  const bottom = rows.length * rowHeight + 6;
  for (const value of ticks(low, high, Math.max(3, width / 90))) {
    root.append(svg("line", { class: "axis", x1: x(value), x2: x(value), y1: bottom, y2: bottom + 4 }));
    const anchor = x(value) < 12 ? "start" : x(value) > width - 16 ? "end" : "middle";
    root.append(svg("text", { x: x(value), y: bottom + 18, "text-anchor": anchor }, shortNumber(value)));
  }
  root.append(
    svg(
      "text",
      { x: frame.right, y: bottom + 36, "text-anchor": "end" },
      withUnit(`client ${spec.data.score}`, spec.data),
    ),
  );
  host.replaceChildren(root);
  return undefined;
}

/** Mean against worst 10 %, one large dot a method, one small dot a seed, with the Pareto front. Points: {label, slot, seeds: [[x, y]]}. */
function scatter(host, spec) {
  const points = spec.points
    .map((p) => ({ ...p, seeds: p.seeds.filter((pair) => pair.every(known)) }))
    .filter((p) => p.seeds.length)
    .map((p) => ({ ...p, x: mean(p.seeds.map((s) => s[0])), y: mean(p.seeds.map((s) => s[1])) }));
  if (!points.length) return emptyPlot(host, "These runs hold no scores.");
  const width = Math.max(280, host.clientWidth);
  const height = 380;
  const xDomain = padded(points.flatMap((p) => p.seeds.map((s) => s[0])));
  const yDomain = padded(points.flatMap((p) => p.seeds.map((s) => s[1])));
  const widen = (domain, share) => {
    const room = (domain[1] - domain[0]) * share;
    return [domain[0] - room, domain[1] + room];
  };
  const [xs, ys] = [widen(xDomain, 0.06), widen(yDomain, 0.04)];
  const yTicks = ticks(...ys, 5);
  const format = (value) => decimals(value, Math.min(xs[1] - xs[0], ys[1] - ys[0]) < 5 ? spec.data.digits : 0);
  const frame = {
    left: Math.max(...yTicks.map((v) => textWidth(format(v)))) + 10,
    right: width - 8,
    top: 28,
    bottom: height - 44,
  };
  const x = linear(xs, [frame.left, frame.right]);
  const y = linear(ys, [frame.bottom, frame.top]);
  const front = points
    .filter((p) => !points.some((q) => q !== p && q.x >= p.x && q.y >= p.y && (q.x > p.x || q.y > p.y)))
    .sort((a, b) => a.x - b.x);
  const root = svg("svg", {
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": `Mean ${spec.data.score} against that of the worst tenth. On the Pareto front: ${front.map((p) => p.label).join(", ")}. ${points.map((p) => `${p.label}: mean ${decimals(p.x, spec.data.digits)}, worst tenth ${decimals(p.y, spec.data.digits)}`).join("; ")}.`,
  });
  axes(root, frame, x, y, ticks(...xs, Math.max(2, (frame.right - frame.left) / 90)), yTicks, {
    xTitle: withUnit(`mean ${spec.data.score}`, spec.data),
    yTitle: withUnit(`${spec.data.score} of the worst tenth`, spec.data),
    xFormat: format,
    yFormat: format,
  });
  const corners = [[frame.left, y(front[0].y)]];
  front.forEach((p, i) => {
    corners.push([x(p.x), y(p.y)], [x(p.x), i + 1 < front.length ? y(front[i + 1].y) : frame.bottom]);
  });
  root.append(svg("path", { class: "front", d: `M${corners.map((corner) => corner.join(",")).join("L")}` }));
  const around = (cx, cy, r) => [cx - r, cy - r, cx + r, cy + r];
  const taken = points.flatMap((p) => [around(x(p.x), y(p.y), 7), ...p.seeds.map(([a, b]) => around(x(a), y(b), 3))]);
  corners
    .slice(1)
    .forEach(([right, bottom], i) =>
      taken.push([corners[i][0], Math.min(corners[i][1], bottom) - 1, right + 1, Math.max(corners[i][1], bottom) + 1]),
    );
  for (const p of points) {
    if (p.seeds.length > 1)
      for (const [a, b] of p.seeds)
        root.append(svg("circle", { cx: x(a), cy: y(b), r: 2.5, opacity: 0.45, style: `fill:${colour(p.slot)}` }));
  }
  for (const p of points) {
    const [cx, cy] = [x(p.x), y(p.y)];
    root.append(
      svg(
        "circle",
        { cx, cy, r: 6, style: `fill:${colour(p.slot)};stroke:var(--paper)`, "stroke-width": 1.5 },
        svg("title", {}, `${p.label}: mean ${decimals(p.x, spec.data.digits + 1)}, worst 10 % ${decimals(p.y, spec.data.digits + 1)}`),
      ),
    );
    const name = shortened(p.label, frame.right - frame.left, true);
    const long = textWidth(name, true);
    const box = labelPlace(cx, cy, long, frame, taken);
    taken.push(box);
    if (Math.hypot((box[0] + box[2]) / 2 - cx, (box[1] + box[3]) / 2 - cy) > long / 2 + 24) {
      root.append(
        svg("line", {
          class: "leader",
          x1: cx,
          y1: cy,
          x2: Math.min(Math.max(cx, box[0]), box[2]),
          y2: (box[1] + box[3]) / 2,
          style: `stroke:${colour(p.slot)}`,
        }),
      );
    }
    root.append(svg("text", { class: "name", x: box[0], y: box[3] - 4, style: `fill:${colour(p.slot)}` }, name));
  }
  host.replaceChildren(root);
  return undefined;
}

/** The first place around a dot, near ones first, where a label covers nothing yet. */
function labelPlace(cx, cy, long, frame, taken) {
  const free = ([a, b, c, d]) =>
    a >= frame.left &&
    c <= frame.right + 8 &&
    b >= frame.top - 4 &&
    d <= frame.bottom &&
    !taken.some((t) => a < t[2] && c > t[0] && b < t[3] && d > t[1]);
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
