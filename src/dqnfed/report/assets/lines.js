/** Lines with their names at their ends. Series: {label, slot, main, x, y, low?, high?}. */
function lineChart(host, spec) {
  const series = spec.series.filter((s) => s.x.length && s.y.some(known));
  if (!series.length) return emptyPlot(host, spec.none || "These runs did not measure it.");
  const width = Math.max(280, host.clientWidth);
  const nameRoom = Math.min(width * 0.34, Math.max(...series.map((s) => textWidth(s.label, true))) + 20);
  const height = Math.max(spec.height || 340, series.length * 15 + 90);
  const yDomain =
    spec.yDomain ||
    padded(
      series.flatMap((s) => (s.low && spec.bands !== false ? [...s.low, ...s.high] : s.y)),
      spec.limits,
    );
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
  for (const s of series)
    if (s.low && spec.bands !== false)
      root.append(svg("path", { class: "band", d: bandPath(s, x, y), style: `fill:${colour(s.slot)}` }));
  for (const s of [...series].sort((a, b) => Number(a.main) - Number(b.main))) {
    root.append(
      svg("path", {
        class: s.main ? "line main" : "line",
        d: linePath(s, x, y),
        style: `stroke:${colour(s.slot)}`,
        "stroke-dasharray": dash(s.slot),
      }),
    );
  }
  const ends = series.map((s) => lastKnown(s));
  const places = spreadApart(
    ends.map((end) => y(end.y)),
    15,
    frame.top,
    frame.bottom,
  );
  series.forEach((s, i) => {
    const from = [x(ends[i].x), y(ends[i].y)];
    root.append(
      svg("path", {
        class: "leader",
        style: `stroke:${colour(s.slot)}`,
        d: `M${from[0] + 2},${from[1]}L${frame.right + 5},${from[1]}L${frame.right + 11},${places[i]}`,
      }),
    );
    const name = shortened(s.label, nameRoom - 15, true);
    root.append(
      svg("text", { class: "name", x: frame.right + 14, y: places[i] + 4, style: `fill:${colour(s.slot)}` }, name),
    );
  });
  host.replaceChildren(root);
  reader(host, root, spec, series, frame, x, y, width, height);
}

function lastKnown(s) {
  for (let i = s.y.length - 1; i >= 0; i--) if (known(s.y[i])) return { x: s.x[i], y: s.y[i] };
  return { x: 0, y: 0 };
}

function linePath(s, x, y) {
  let path = "",
    pen = "M";
  s.x.forEach((value, i) => {
    if (!known(s.y[i])) {
      pen = "M";
      return;
    }
    path += `${pen}${x(value).toFixed(1)},${y(s.y[i]).toFixed(1)}`;
    pen = "L";
  });
  return path;
}

function bandPath(s, x, y) {
  const at = s.x.map((_, i) => i).filter((i) => known(s.low[i]) && known(s.high[i]));
  const point = (i, values) => `${x(s.x[i]).toFixed(1)},${y(values[i]).toFixed(1)}`;
  if (!at.length) return "";
  return `M${at.map((i) => point(i, s.high)).join("L")}L${at
    .reverse()
    .map((i) => point(i, s.low))
    .join("L")}Z`;
}

function describe(spec, series) {
  const ends = series.map((s) => [s.label, lastKnown(s).y]).sort((a, b) => b[1] - a[1]);
  return `${spec.yTitle} against ${spec.xTitle}. At the end: ${ends.map(([name, value]) => `${name} ${spec.valueFormat(value)}`).join(", ")}.`;
}

function nearest(values, wanted) {
  let low = 0,
    high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle;
    else high = middle;
  }
  return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
}

/** A crosshair for pointer and arrow keys; for assistive technology it is a slider whose text reads the values. */
function reader(host, root, spec, series, frame, x, y, width, height) {
  const longest = series.reduce((a, b) => (b.x.length > a.x.length ? b : a));
  const handle = html("div", {
    class: "reader",
    tabindex: "0",
    role: "slider",
    "aria-label": `Read values: ${spec.yTitle} against ${spec.xTitle}`,
    "aria-valuemin": 0,
    "aria-valuemax": longest.x.length - 1,
    "aria-valuenow": longest.x.length - 1,
    "aria-orientation": "horizontal",
    style: `left:${(100 * frame.left) / width}%;width:${(100 * (frame.right - frame.left)) / width}%;top:${(100 * frame.top) / height}%;height:${(100 * (frame.bottom - frame.top)) / height}%`,
  });
  const box = html("div", { class: "readout", hidden: true });
  const cross = svg("g", { visibility: "hidden" });
  root.append(cross);
  let at = longest.x.length - 1;
  const textAt = () =>
    series
      .map((s) => {
        const i = nearest(s.x, longest.x[at]);
        return { s, value: s.y[i] };
      })
      .filter((entry) => known(entry.value))
      .sort((a, b) => b.value - a.value);
  const announce = () => {
    const entries = textAt();
    handle.setAttribute("aria-valuenow", at);
    handle.setAttribute(
      "aria-valuetext",
      `${spec.xTitle} ${spec.xValue(longest.x[at])}: ${entries.map(({ s, value }) => `${s.label} ${spec.valueFormat(value)}`).join(", ")}`,
    );
    return entries;
  };
  const show = () => {
    const entries = announce();
    const here = x(longest.x[at]);
    cross.replaceChildren(svg("line", { class: "cross", x1: here, x2: here, y1: frame.top, y2: frame.bottom }));
    for (const { s, value } of entries)
      cross.append(svg("circle", { cx: here, cy: y(value), r: 3.5, style: `fill:${colour(s.slot)}` }));
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
  const hide = () => {
    box.hidden = true;
    cross.setAttribute("visibility", "hidden");
  };
  handle.addEventListener("pointermove", (event) => {
    const bounds = handle.getBoundingClientRect();
    const share = (event.clientX - bounds.left) / bounds.width;
    const [first, last] = [longest.x[0], longest.x[longest.x.length - 1]];
    const wanted = linear(
      [0, 1],
      [Math.min(first, ...series.map((s) => s.x[0])), Math.max(last, ...series.map((s) => s.x[s.x.length - 1]))],
    )(share);
    at = nearest(longest.x, wanted);
    show();
  });
  handle.addEventListener("pointerleave", () => {
    if (document.activeElement !== handle) hide();
  });
  handle.addEventListener("focus", () => {
    if (handle.matches(":focus-visible")) show();
  });
  handle.addEventListener("blur", hide);
  handle.addEventListener("keydown", (event) => {
    const last = longest.x.length - 1;
    const page = Math.max(1, Math.round(last / 10));
    const moves = {
      ArrowLeft: at - 1,
      ArrowDown: at - 1,
      ArrowRight: at + 1,
      ArrowUp: at + 1,
      PageDown: at - page,
      PageUp: at + page,
      Home: 0,
      End: last,
    };
    if (event.key === "Escape") return hide();
    if (!(event.key in moves)) return undefined;
    event.preventDefault();
    at = Math.min(last, Math.max(0, moves[event.key]));
    return show();
  });
  announce();
  host.append(handle, box);
}
