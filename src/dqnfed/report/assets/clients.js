const ROWS_PER_PAGE = 25;
const BIGGEST_FIRST = ["train", "skew"];

/** The client table of one experiment: who is failed, and what is special about their data. */
class ClientTable {
  constructor(section, data, slots) {
    this.section = section;
    this.part = (name) => section.querySelector(`[data-part="${name}"]`);
    this.state = {
      seed: 0,
      method: data.focus,
      other: otherMethod(data),
      text: "",
      group: "",
      label: "",
      worst: false,
      sort: "accuracy",
      down: false,
      page: 0,
      open: null,
    };
    for (const [name, key] of [
      ["seed", "seed"],
      ["method", "method"],
      ["other", "other"],
    ])
      this.listen(name, "change", (value) => ({ [key]: Number(value) }));
    for (const name of ["group", "label"]) this.listen(name, "change", (value) => ({ [name]: value }));
    this.listen("sort", "change", (value) => ({ sort: value, down: BIGGEST_FIRST.includes(value) }));
    this.listen("search", "input", (value) => ({ text: value.trim().toLowerCase() }));
    this.part("worst").addEventListener("change", (event) => this.change({ worst: event.target.checked }));
    this.part("before").addEventListener("click", () => this.change({ page: this.state.page - 1 }, true));
    this.part("after").addEventListener("click", () => this.change({ page: this.state.page + 1 }, true));
    this.part("body").addEventListener("click", (event) => {
      const button = event.target.closest("button[data-row]");
      if (button) this.open(Number(button.dataset.row));
    });
    this.part("head").addEventListener("click", (event) => {
      const button = event.target.closest("button[data-sort]");
      if (!button) return;
      const key = button.dataset.sort;
      this.change({ sort: key, down: this.state.sort === key ? !this.state.down : BIGGEST_FIRST.includes(key) });
      this.part("head").querySelector(`button[data-sort="${key}"]`).focus();
    });
    this.update(data, slots);
  }

  listen(name, event, read) {
    this.part(name).addEventListener(event, ({ target }) => this.change(read(target.value)));
  }

  update(data, slots) {
    this.data = data;
    this.slots = slots;
    const methods = data.methods.map((method, i) => [i, method.label]);
    fill(
      this.part("seed"),
      data.seeds.map((seed, i) => [i, seed]),
      this.state.seed,
    );
    fill(this.part("method"), methods, this.state.method);
    fill(this.part("other"), [[-1, "nothing"], ...methods], this.state.other);
    fill(this.part("group"), [["", "all"], ...data.groups.map((group, i) => [i, group])], this.state.group);
    fill(this.part("label"), [["", "any"], ...data.labels.map((label, i) => [i, label])], this.state.label);
    this.part("group").closest("label").hidden = !data.groups.length;
    this.part("label").closest("label").hidden = !data.labels.length;
    this.part("seed").closest("label").hidden = data.seeds.length < 2;
    this.draw();
  }

  change(changes, samePlace = false) {
    Object.assign(this.state, samePlace ? {} : { page: 0 }, changes);
    if ("seed" in changes) this.state.open = null;
    this.draw();
  }

  rows() {
    const { data, state } = this;
    const clients = data.clients[state.seed];
    const final = data.final[state.seed];
    const whole = labelShares(clients, data.labels.length);
    const mine = final[state.method] || [];
    const theirs = state.other >= 0 ? final[state.other] || [] : [];
    const rows = clients.client.map((client, row) => ({
      row,
      client,
      name: clients.name[row],
      group: clients.group[row],
      train: clients.train[row],
      test: clients.test[row],
      mix: clients.mix[row],
      skew: skew(clients.mix[row], whole),
      accuracy: mine[row],
      other: theirs[row],
      gap: known(mine[row]) && known(theirs[row]) ? mine[row] - theirs[row] : null,
    }));
    const ranked = rows.filter((r) => known(r.accuracy)).sort((a, b) => a.accuracy - b.accuracy);
    ranked.slice(0, Math.max(1, Math.floor(ranked.length * 0.1 + 1e-9))).forEach((r) => {
      r.worst = true;
    });
    return rows;
  }

  kept() {
    const { state, data } = this;
    const kept = this.rows().filter(
      (r) =>
        (!state.text || r.name.toLowerCase().includes(state.text) || String(r.client) === state.text) &&
        (state.group === "" || r.group === Number(state.group)) &&
        (state.label === "" || r.mix.some((label, i) => i % 2 === 0 && label === Number(state.label))) &&
        (!state.worst || r.worst),
    );
    const value =
      { name: (r) => r.client, group: (r) => data.groups[r.group] || "", mix: (r) => r.mix.length }[state.sort] ||
      ((r) => r[state.sort]);
    const missing = (x) => x === null || x === undefined;
    kept.sort((a, b) => {
      const [p, q] = [value(a), value(b)];
      if (missing(p) || missing(q)) return missing(p) - missing(q);
      const order = typeof p === "string" ? p.localeCompare(q) : p - q;
      return (state.down ? -order : order) || a.client - b.client;
    });
    return kept;
  }

  columns() {
    const { data, state } = this;
    const columns = [["name", "Client", "left"]];
    if (data.groups.length) columns.push(["group", "Group", "left"]);
    columns.push(["train", "Examples", ""]);
    if (data.labels.length) columns.push(["mix", "Labels", "left"], ["skew", "Skew", ""]);
    const unit = data.score === "accuracy" ? ", %" : "";
    columns.push(["accuracy", data.methods[state.method].label + unit, "left"]);
    if (state.other >= 0)
      columns.push(["other", data.methods[state.other].label + unit, ""], ["gap", "Difference", ""]);
    return columns;
  }

  draw() {
    const { state } = this;
    const columns = this.columns();
    const kept = this.kept();
    const pages = Math.max(1, Math.ceil(kept.length / ROWS_PER_PAGE));
    state.page = Math.min(Math.max(0, state.page), pages - 1);
    const from = state.page * ROWS_PER_PAGE;
    const shown = kept.slice(from, from + ROWS_PER_PAGE);
    this.part("head").replaceChildren(
      html(
        "tr",
        {},
        ...columns.map(([key, title, side]) =>
          html(
            "th",
            {
              scope: "col",
              class: side,
              "data-column": key,
              "aria-sort": state.sort === key ? (state.down ? "descending" : "ascending") : null,
            },
            html("button", { type: "button", "data-sort": key }, title),
          ),
        ),
      ),
    );
    fill(
      this.part("sort"),
      columns.map(([key, title]) => [key, title]),
      state.sort,
    );
    this.part("body").replaceChildren(
      ...shown.flatMap((row) =>
        row.row === state.open ? [this.line(row, columns), this.detailLine(columns.length)] : [this.line(row, columns)],
      ),
    );
    this.drawDetail();
    this.part("count").textContent = kept.length
      ? `${decimals(from + 1, 0)}–${decimals(from + shown.length, 0)} of ${decimals(kept.length, 0)} clients`
      : "No client matches; widen the filters.";
    this.part("before").disabled = state.page === 0;
    this.part("after").disabled = state.page >= pages - 1;
  }

  line(r, columns) {
    const { data, state } = this;
    const cells = {
      name: () =>
        html("button", { type: "button", "data-row": r.row, "aria-expanded": String(state.open === r.row) }, r.name),
      group: () => data.groups[r.group] || "–",
      train: () => decimals(r.train, 0),
      mix: () =>
        html(
          "span",
          {},
          html("span", { class: "mix", style: `background:${mixGradient(r.mix, data.labels.length)}` }),
          mixText(r.mix, data.labels),
        ),
      skew: () => (known(r.skew) ? decimals(r.skew, 2) : "–"),
      accuracy: () =>
        known(r.accuracy)
          ? html(
              "span",
              {},
              decimals(r.accuracy, data.digits).padStart(5, "\u2007"),
              data.score === "accuracy"
                ? html("span", {
                    class: "bar",
                    style: `width:${(r.accuracy * 0.06).toFixed(2)}rem;background:${colour(this.slots[state.method])}`,
                  })
                : "",
            )
          : "–",
      other: () => (known(r.other) ? decimals(r.other, data.digits) : "–"),
      gap: () =>
        known(r.gap)
          ? html(
              "span",
              { class: r.gap >= 0 ? "gain" : "loss" },
              `${r.gap >= 0 ? "+" : "−"}${decimals(Math.abs(r.gap), data.digits)}`,
            )
          : "–",
    };
    return html(
      "tr",
      { class: state.open === r.row ? "chosen" : null },
      ...columns.map(([key, , side]) => html("td", { class: side, "data-column": key }, cells[key]())),
    );
  }

  open(row) {
    this.state.open = this.state.open === row ? null : row;
    this.draw();
    const button = this.part("body").querySelector(`button[data-row="${row}"]`);
    if (button) button.focus();
  }

  detailLine(width) {
    return html("tr", {}, html("td", { class: "detail", colspan: width, "data-part": "detail" }));
  }

  drawDetail() {
    const { data, state } = this;
    const panel = this.part("detail");
    if (!panel) return;
    const plot = html("div", { class: "plot" });
    panel.replaceChildren(
      html(
        "ul",
        {},
        ...this.reasons(this.rows()[state.open], data.clients[state.seed]).map((reason) => html("li", {}, reason)),
      ),
      html("h3", {}, `${data.score.charAt(0).toUpperCase()}${data.score.slice(1)} over rounds`),
      plot,
    );
    lineChart(plot, {
      series: data.methods
        .map((method, i) => {
          const past = data.history[state.seed][i];
          return {
            label: method.label,
            slot: this.slots[i],
            main: i === state.method,
            x: past ? past.x : [],
            y: past ? past.y.map((values) => values[state.open]) : [],
          };
        })
        .filter((s, i) => [state.method, state.other].includes(i) || data.methods.length <= N_COLOURS),
      xTitle: "rounds",
      yTitle: withUnit(data.score, data),
      xFormat: shortNumber,
      xValue: shortNumber,
      yFormat: (v) => (data.digits > 1 ? shortNumber(v) : decimals(v, 0)),
      valueFormat: (v) => decimals(v, data.digits),
      height: 260,
      limits: scoreLimits(data),
    });
  }

  reasons(r, clients) {
    const { data, state } = this;
    const reasons = [];
    const all = (data.final[state.seed][state.method] || []).filter(known);
    if (known(r.accuracy)) {
      const gap = r.accuracy - mean(all);
      const rank = all.filter((value) => value < r.accuracy).length + 1;
      reasons.push(
        `${decimals(r.accuracy, data.digits)}${data.score === "accuracy" ? " %" : ""} under ${data.methods[state.method].label}: ${decimals(Math.abs(gap), data.digits)}${data.digits > 1 ? "" : " points"} ${gap < 0 ? "below" : "above"} the mean client, number ${rank} of ${all.length} from below.`,
      );
    }
    const sizes = [...clients.train].sort((a, b) => a - b);
    const middle = sizes[Math.floor(sizes.length / 2)];
    reasons.push(
      `${decimals(r.train, 0)} training examples (the median client has ${decimals(middle, 0)})${r.test ? `, ${decimals(r.test, 0)} for testing` : ""}.`,
    );
    if (r.mix.length) {
      const shares = labelShares(clients, data.labels.length);
      const parts = pairs(r.mix).map(
        ([label, n]) =>
          `${data.labels[label]} (${decimals(n, 0)} here, ${decimals(100 * shares[label], 1)} % of everyone's data)`,
      );
      reasons.push(
        `Labels: ${parts.slice(0, 8).join(", ")}${parts.length > 8 ? `, and ${parts.length - 8} more` : ""}.`,
      );
      reasons.push(
        `Label skew ${decimals(r.skew, 2)}: that share of its examples would have to change label to match the whole federation.`,
      );
    }
    return reasons;
  }
}

function otherMethod(data) {
  const plain = data.methods.findIndex((method) => method.algorithm === "fedavg");
  if (plain >= 0 && plain !== data.focus) return plain;
  return data.methods.findIndex((_, i) => i !== data.focus);
}

function fill(select, options, chosen) {
  select.replaceChildren(
    ...options.map(([value, text]) =>
      html("option", { value, selected: String(value) === String(chosen) }, String(text)),
    ),
  );
}

function pairs(mix) {
  const found = [];
  for (let i = 0; i < mix.length; i += 2) found.push([mix[i], mix[i + 1]]);
  return found.sort((a, b) => b[1] - a[1]);
}

function labelShares(clients, n) {
  const counts = new Array(n).fill(0);
  for (const mix of clients.mix) for (let i = 0; i < mix.length; i += 2) counts[mix[i]] += mix[i + 1];
  const total = counts.reduce((a, b) => a + b, 0) || 1;
  return counts.map((count) => count / total);
}

/** Total variation distance between a client's label mix and everyone's: 0 the same, near 1 nothing in common. */
function skew(mix, whole) {
  let total = 0;
  for (let i = 1; i < mix.length; i += 2) total += mix[i];
  if (!total) return null;
  let distance = 1;
  for (let i = 0; i < mix.length; i += 2) distance -= Math.min(mix[i + 1] / total, whole[mix[i]]);
  return distance;
}

const hue = (label, n) => Math.round((label * 360) / Math.max(1, n) + 15);

function mixGradient(mix, n) {
  const parts = pairs(mix).sort((a, b) => a[0] - b[0]);
  const total = parts.reduce((sum, part) => sum + part[1], 0) || 1;
  let at = 0;
  const stops = parts.map(([label, count]) => {
    const from = at;
    at += (100 * count) / total;
    return `hsl(${hue(label, n)} var(--mix-s) var(--mix-l)) ${from.toFixed(1)}% ${at.toFixed(1)}%`;
  });
  return stops.length ? `linear-gradient(90deg, ${stops.join(", ")})` : "none";
}

function mixText(mix, labels) {
  const parts = pairs(mix);
  const names = parts.slice(0, 3).map(([label]) => labels[label]);
  return names.join(", ") + (parts.length > 3 ? ` +${parts.length - 3}` : "");
}
