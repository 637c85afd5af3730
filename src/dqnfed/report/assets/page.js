const X_AXES = {
  x: { title: "rounds", format: shortNumber, value: (v) => shortNumber(Math.round(v)) },
  bytes: { title: "bytes sent and received", format: shortNumber, value: shortNumber },
  seconds: { title: "seconds", format: shortNumber, value: (v) => decimals(v, 1) },
};
const Y_AXES = {
  mean: { title: (data) => withUnit(`mean ${data.score}`, data), digits: 2, scored: true },
  worst10: { title: (data) => withUnit(`${data.score} of the worst tenth`, data), digits: 2, scored: true },
  std: { title: () => "standard deviation over clients", digits: 2, limits: { floor: 0 } },
  train_loss: { title: () => "mean training loss", digits: 4, limits: {} },
  train_loss_max: { title: () => "training loss of the worst client", digits: 4, limits: {} },
};
const N_SHOWN_AT_FIRST = 8;

/** One experiment's charts and client table, drawn into its article. */
class ExperimentView {
  constructor(article, data) {
    this.article = article;
    this.y = "mean";
    this.x = "x";
    this.control("y", (value) => {
      this.y = value;
    });
    this.control("x", (value) => {
      this.x = value;
    });
    this.update(data);
    new ResizeObserver(() => this.resized()).observe(article);
  }

  control(name, set) {
    const select = this.article.querySelector(`[data-control="${name}"]`);
    select.addEventListener("change", () => {
      set(select.value);
      this.drawConvergence();
    });
  }

  update(data) {
    const before = this.data
      ? new Set(this.data.methods.filter((_, i) => this.shown.has(i)).map((m) => m.label))
      : null;
    const names = this.data ? new Set(this.data.methods.map((m) => m.label)) : new Set();
    this.data = data;
    this.slots = data.methods.map((_, i) => (i === data.focus ? 0 : i < data.focus ? i + 1 : i));
    this.shown = before
      ? new Set(
          data.methods
            .map((_, i) => i)
            .filter((i) => before.has(data.methods[i].label) || !names.has(data.methods[i].label)),
        )
      : shownAtFirst(data);
    this.drawChips();
    if (!before) this.sayHidden();
    this.draw();
    const section = this.article.querySelector('[data-part="clients"]');
    section.hidden = !data.clients.some((clients) => clients.client.length);
    if (section.hidden) return;
    if (this.table) this.table.update(data, this.slots);
    else this.table = new ClientTable(section, data, this.slots);
  }

  drawChips() {
    const chips = this.article.querySelector(".chips");
    chips.replaceChildren(
      ...this.data.methods.map((method, i) => {
        const chip = html(
          "button",
          { type: "button", "aria-pressed": String(this.shown.has(i)) },
          html("span", { class: "swatch", style: `color:${colour(this.slots[i])}` }),
          method.label,
        );
        chip.addEventListener("click", () => {
          if (this.shown.has(i)) this.shown.delete(i);
          else this.shown.add(i);
          chip.setAttribute("aria-pressed", String(this.shown.has(i)));
          this.draw();
        });
        return chip;
      }),
    );
  }

  sayHidden() {
    const hidden = this.data.methods.filter((_, i) => !this.shown.has(i)).map((method) => method.label);
    this.article.querySelector('[data-part="hidden"]').textContent = hidden.length
      ? `Left out of the charts at first, to keep them legible: ${hidden.join(", ")}. Choose a name to add or remove it.`
      : "";
  }

  plot(name) {
    return this.article.querySelector(`[data-chart="${name}"] .plot`);
  }

  chosen() {
    return this.data.methods
      .map((method, i) => ({ i, label: method.label, slot: this.slots[i], main: i === this.data.focus }))
      .filter((m) => this.shown.has(m.i));
  }

  draw() {
    this.width = this.article.clientWidth;
    if (!this.width) return;
    this.drawConvergence();
    this.drawImproved();
    const pooled = this.chosen().map((m) => ({
      ...m,
      values: this.data.final.flatMap((seed) => (seed[m.i] || []).filter(known)),
    }));
    histogram(this.plot("histogram"), { rows: pooled, data: this.data });
    lineChart(this.plot("sorted"), {
      series: pooled.map((m) => ({ ...m, ...quantiles(m.values) })),
      xTitle: "clients from worst to best, %",
      yTitle: withUnit(this.data.score, this.data),
      xFormat: (v) => decimals(v, 0),
      xValue: (v) => decimals(v, 0),
      yFormat: (v) => (this.data.digits > 1 ? shortNumber(v) : decimals(v, 0)),
      valueFormat: (v) => decimals(v, this.data.digits),
      limits: scoreLimits(this.data),
      none: "These runs hold no scores of clients.",
    });
    scatter(this.plot("scatter"), {
      points: this.chosen().map((m) => ({ ...m, seeds: this.data.points[m.i] })),
      data: this.data,
    });
  }

  drawConvergence() {
    const axis = Y_AXES[this.y];
    const across = X_AXES[this.x];
    const series = this.chosen().map((m) => ({ ...m, ...curve(this.data.curves[this.y][m.i], this.x) }));
    lineChart(this.plot("convergence"), {
      series,
      xTitle: across.title,
      yTitle: axis.title(this.data),
      xFormat: across.format,
      xValue: across.value,
      height: 400,
      yFormat: shortNumber,
      valueFormat: (v) => decimals(v, axis.digits + (axis.scored ? this.data.digits - 1 : 0)),
      limits: axis.scored ? scoreLimits(this.data) : axis.limits,
    });
    this.say("convergence", this.data.curves[this.y]);
  }

  drawImproved() {
    lineChart(this.plot("improved"), {
      series: this.chosen().map((m) => ({ ...m, ...curve(this.data.curves.rho[m.i], "x") })),
      bands: false,
      xTitle: "rounds",
      yTitle: "improved participants, %",
      xFormat: shortNumber,
      xValue: (v) => shortNumber(Math.round(v)),
      yFormat: (v) => decimals(v, 0),
      valueFormat: (v) => decimals(v, 1),
      limits: { floor: 0, ceiling: 101 },
    });
    this.say("improved", this.data.curves.rho);
  }

  say(name, curves) {
    const window = Math.max(1, ...curves.filter(Boolean).map((c) => c.window));
    const text = window > 1 ? `Each point averages up to ${window} measured rounds.` : "";
    this.article.querySelector(`[data-chart="${name}"] [data-part="window"]`).textContent = text;
  }

  resized() {
    if (this.article.hidden || this.article.clientWidth === this.width) return;
    this.draw();
    if (this.table) this.table.drawDetail();
  }
}

const withUnit = (title, data) => (data.score === "accuracy" ? `${title}, %` : title);
const scoreLimits = (data) => (data.score === "accuracy" ? { floor: 0, ceiling: 100 } : {});

/** The focus and the best others, as many as stay legible; a method that learnt nothing would squeeze all other lines. */
function shownAtFirst(data) {
  const value = data.points.map((seeds) => {
    const means = seeds.map((pair) => pair[0]).filter(known);
    return means.length ? mean(means) : -Infinity;
  });
  const best = Math.max(...value);
  const wanted = data.methods
    .map((_, i) => i)
    .filter((i) => i === data.focus || data.score !== "accuracy" || value[i] >= best / 2)
    .sort((a, b) => (b === data.focus) - (a === data.focus) || value[b] - value[a]);
  return new Set(wanted.slice(0, N_SHOWN_AT_FIRST));
}

function curve(found, axis) {
  return found ? { x: found[axis], y: found.y, low: found.low, high: found.high } : { x: [], y: [] };
}

/** Accuracy against the share of clients below it, at no more than 200 points. */
function quantiles(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const n = Math.min(200, sorted.length);
  const at = Array.from({ length: n }, (_, i) => (n === 1 ? 0 : Math.round((i * (sorted.length - 1)) / (n - 1))));
  return {
    x: at.map((i) => (sorted.length === 1 ? 50 : (100 * i) / (sorted.length - 1))),
    y: at.map((i) => sorted[i]),
  };
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

function remembered(key, value) {
  try {
    if (value === undefined) return localStorage.getItem(key);
    localStorage.setItem(key, value);
  } catch {
    /* a page opened from disk may not be allowed to remember */
  }
  return null;
}

function themeSwitch() {
  const button = document.getElementById("theme");
  const themes = ["auto", "light", "dark"];
  const set = (theme) => {
    document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  set(themes.includes(remembered("dqnfed-theme")) ? remembered("dqnfed-theme") : "auto");
  button.hidden = false;
  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length];
    set(next);
    remembered("dqnfed-theme", next);
  });
}

/** Shows one experiment at a time, and one of its two fairness tables. */
function chooser(views) {
  const select = document.getElementById("experiment");
  if (!select) return;
  const show = () => {
    document.querySelectorAll(".experiment").forEach((article, i) => {
      article.hidden = i !== Number(select.value);
    });
    const view = views[Number(select.value)];
    if (view) view.draw();
  };
  select.addEventListener("change", show);
  show();
}

function weightSwitch(article) {
  article.addEventListener("change", (event) => {
    if (event.target.matches("input[data-weighted]")) applyWeight(article);
  });
  applyWeight(article);
}

function applyWeight(article) {
  const chosen = article.querySelector("input[data-weighted]:checked");
  if (!chosen) return;
  article.querySelectorAll("[data-table]").forEach((table) => {
    table.hidden = table.dataset.table !== chosen.dataset.weighted;
  });
}

async function boot() {
  themeSwitch();
  addEventListener("beforeprint", () =>
    document.querySelectorAll("details").forEach((details) => {
      details.open = true;
    }),
  );
  const articles = [...document.querySelectorAll(".experiment")];
  articles.forEach(weightSwitch);
  const data = await unpacked(document.getElementById("data").textContent);
  const views = articles.map((article, i) => new ExperimentView(article, data[i]));
  chooser(views);
  document.documentElement.dataset.ready = "true";
  if (typeof startLive === "function") startLive(views);
}

boot();
