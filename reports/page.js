// In one file: the page carries it inline, and all of it shares the state of the charts.
"use strict";
// Charts are drawn when they come into view; one slider moves all that are drawn.
(() => {
  const payload = JSON.parse(document.getElementById("payload").textContent);
  const root = document.documentElement;
  const drawn = new Map();
  const seen = new Set();
  const numbers = new Map();
  let place = Math.max(payload.slider.length - 1, 0);
  let logSteps = false;
  let relative = Boolean(document.getElementById("relative"));

  // Numbers

  function matrix(name) {
    if (numbers.has(name)) return numbers.get(name);
    const stored = payload.matrices[name];
    const [rows, columns] = stored.shape;
    let flat;
    if ("fill" in stored) flat = new Float32Array(rows * columns).fill(stored.fill ?? NaN);
    else {
      const bytes = Uint8Array.from(atob(stored.f4), (letter) => letter.charCodeAt(0));
      flat = new Float32Array(bytes.buffer);
    }
    const found = { rows, columns, flat, steps: payload.steps[stored.steps] };
    numbers.set(name, found);
    return found;
  }

  const step = () => payload.slider[place];
  const logPlace = (at) => Math.max(at, payload.beforeFirst); // a logarithm has no place for step 0
  // The last row at or before the slider's step; the first where the run begins later.
  function rowAt(steps, wanted) {
    let low = 0, high = steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= wanted) low = middle + 1; else high = middle;
    }
    return Math.max(low - 1, 0);
  }
  const finite = (value) => (Number.isFinite(value) ? value : null);
  function row(name) {
    const { columns, flat, steps } = matrix(name);
    const at = rowAt(steps, step()) * columns;
    return Array.from(flat.subarray(at, at + columns), finite);
  }
  function turned(name, change) {
    const { rows, columns, flat } = matrix(name);
    return Array.from({ length: columns }, (_, column) =>
      Array.from({ length: rows }, (_, at) => finite(change(flat[at * columns + column]))));
  }
  const shown = {
    "row": ([name]) => row(name),
    "pairs": (names) => { const parts = names.map(row); return parts[0].map((_, i) => parts.map((part) => part[i])); },
    "steps": ([name]) => matrix(name).steps,
    "log steps": ([name]) => matrix(name).steps.map(logPlace),
    "map": ([name]) => turned(name, (value) => value),
    "power map": ([name]) => turned(name, (value) => 10 ** value),
    "log map": ([name]) => turned(name, Math.log10),
  };
  const value = (binding) => shown[binding.how](binding.matrices);
  const moves = (binding) => binding.how === "row" || binding.how === "pairs";

  // Charts

  const theme = () => (root.classList.contains("dark") ? "dark" : "light");
  const config = {
    responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    toImageButtonOptions: { format: "svg" },
  };

  function cursor(chart) {
    if (chart.time !== "x" || !payload.slider.length) return [];
    const at = chart.layout.xaxis.type === "log" || logSteps ? logPlace(step()) : step();
    return [{ type: "line", xref: "x", yref: "paper", x0: at, x1: at, y0: 0, y1: 1,
      line: { color: theme() === "dark" ? "#ffffff" : "#11151a", width: 1.2, dash: "dot" } }];
  }
  const shapes = (chart) => [...(chart.layout.shapes || []), ...cursor(chart)];

  function prepare(chart) {
    for (const binding of chart.bindings) chart.data[binding.trace][binding.attribute] = value(binding);
    const depth = relative ? "relative" : "absolute";
    for (const trace of chart.data) if (trace.meta?.[depth]) trace.x = trace.meta[depth];
    const layout = { ...structuredClone(chart.layout), template: payload.templates[theme()], shapes: shapes(chart),
      showlegend: false, autosize: true };
    if (chart.layout.meta?.[depth]) layout.xaxis = chart.layout.meta[depth];
    if (followsScale(chart) && logSteps) layout.xaxis = { ...layout.xaxis, ...stepAxis() };
    return layout;
  }
  const followsScale = (chart) => chart.time === "x" && chart.layout.xaxis.type !== "log";
  const stepAxis = () => (logSteps ? { type: "log", exponentformat: "power" } : { type: "linear", exponentformat: "none" });

  function draw(id) {
    const chart = payload.charts[id];
    if (drawn.has(id)) return;
    const place = document.getElementById(id);
    drawn.set(id, chart);
    const layout = prepare(chart);
    Plotly.newPlot(place, chart.data, layout, config);
    place.classList.add("drawn");
    keys(id, chart);
    note(id, chart);
    if (chart.time === "x") place.on("plotly_click", (event) => goTo(event.points[0].x));
  }

  // The legend, as buttons that a keyboard reaches.
  function keys(id, chart) {
    const holder = document.getElementById(`keys-${id}`);
    holder.replaceChildren();
    const named = chart.data.filter((trace) => trace.name && trace.showlegend !== false);
    if (chart.pick === "group") {
      choices(id, chart, holder, [...new Set(named.map((trace) => trace.legendgroup))], (trace) => trace.legendgroup);
    } else if (chart.pick === "one") {
      choices(id, chart, holder, named.map((trace) => trace.name), (trace) => trace.name);
    }
    if (chart.pick === "one" || named.length < 2) return;
    for (const name of new Set(named.map((trace) => trace.name))) switches(id, chart, holder, name);
  }
  function button(holder, label, pressed) {
    const made = document.createElement("button");
    made.type = "button";
    made.innerHTML = label; // escaped when the page was made
    made.setAttribute("aria-pressed", String(pressed));
    holder.append(made);
    return made;
  }
  // One of several: the kind of layer that is seen.
  function choices(id, chart, holder, names, nameOf) {
    chart.chosen ??= names[0];
    if (names.length < 2) return;
    const row = document.createElement("span");
    row.className = "choices";
    holder.append(row);
    for (const name of names) {
      button(row, name, name === chart.chosen).addEventListener("click", (event) => {
        chart.chosen = name;
        for (const other of row.children) other.setAttribute("aria-pressed", String(other === event.currentTarget));
        show(id, chart, (trace) => nameOf(trace) === name && !chart.off?.has(trace.name));
        const reach = chart.layout.meta?.reaches?.[name];
        if (reach && isLog(id) === (chart.layout.yaxis.type === "log")) {
          Plotly.relayout(document.getElementById(id), Object.fromEntries(Object.entries(reach).map(([key, value]) => [`yaxis.${key}`, value])));
        }
      });
    }
  }
  // Any of several: the curves, or the runs of a comparison, that are seen.
  function switches(id, chart, holder, name) {
    const trace = chart.data.find((one) => one.name === name && one.showlegend !== false);
    chart.off ??= new Set(chart.pick === "many" ? chart.data.filter((one) => one.visible === "legendonly").map((one) => one.name) : []);
    const made = button(holder, name, !chart.off.has(name));
    if (trace === captioned(chart)) chart.key = made;
    made.style.setProperty("--key", trace.line?.color);
    if (trace.line?.dash === "dash") made.style.setProperty("--dash", "dashed");
    made.addEventListener("click", () => {
      if (!chart.off.delete(name)) chart.off.add(name);
      made.setAttribute("aria-pressed", String(!chart.off.has(name)));
      show(id, chart, (one) => chart.pick === "group"
        ? one.legendgroup === chart.chosen && !chart.off.has(one.name)
        : !chart.off.has(one.name ?? one.legendgroup));
    });
  }
  function show(id, chart, isShown) {
    const visible = chart.data.map((trace) => (isShown(trace) ? true : "legendonly"));
    chart.data.forEach((trace, at) => { trace.visible = visible[at]; });
    Plotly.restyle(document.getElementById(id), { visible });
  }

  // The trace whose name in the legend follows the step.
  const captioned = (chart) => (chart.captions.length ? chart.data.at(-1) : null);
  const caption = (chart) => chart.captions[rowAt(chart.noteSteps, step())];

  // Which step the curves are of: rows before the slider's may be the latest there are.
  function stepsShown(chart) {
    const rows = chart.bindings.filter((one) => one.attribute === "y").map((one) => {
      const { steps } = matrix(one.matrices[0]);
      return [chart.data[one.trace].name, steps[rowAt(steps, step())].toLocaleString("en")];
    });
    const each = new Map(rows);
    if (new Set(each.values()).size === 1) return `at step ${rows[0][1]}`;
    return [...each].map(([name, at]) => `${name.split(":")[0]} at step ${at}`).join(", ");
  }
  function note(id, chart) {
    const at = document.getElementById(id).closest("figure").querySelector(".at");
    if (at) at.textContent = stepsShown(chart);
    if (chart.notes.length) {
      document.getElementById(`note-${id}`).textContent = chart.notes[rowAt(chart.noteSteps, step())];
    }
    if (chart.key) chart.key.textContent = caption(chart);
  }

  function move(id) {
    const chart = drawn.get(id);
    const element = document.getElementById(id);
    const moving = chart.bindings.filter(moves);
    for (const attribute of new Set(moving.map((one) => one.attribute))) {
      const bindings = moving.filter((one) => one.attribute === attribute);
      Plotly.restyle(element, { [attribute]: bindings.map(value) }, bindings.map((one) => one.trace));
    }
    if (chart.time === "x") Plotly.relayout(element, { shapes: shapes(chart) });
    note(id, chart);
    renewNumbers(id);
    stale.delete(id);
  }
  const stale = new Set();
  let waiting = false;
  function refresh() {
    for (const id of drawn.keys()) stale.add(id);
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      for (const id of [...stale]) if (seen.has(id)) move(id);
    });
  }

  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) { seen.delete(target.id); continue; }
      seen.add(target.id);
      if (!drawn.has(target.id)) draw(target.id); else if (stale.has(target.id)) move(target.id);
    }
    root.dataset.ready ??= String(Math.round(performance.now())); // milliseconds until usable
  }, { rootMargin: "250px 0px" });

  // Step

  const slider = document.getElementById("step");
  const output = document.getElementById("step-value");
  function goTo(wanted) { setPlace(rowAt(payload.slider, wanted)); }
  function setPlace(next) {
    place = next;
    slider.value = String(next);
    slider.setAttribute("aria-valuetext", `step ${step().toLocaleString("en")}`);
    output.textContent = step().toLocaleString("en");
    refresh();
  }
  let playing = 0;
  function play() {
    const button = document.getElementById("play");
    const stop = () => { clearInterval(playing); playing = 0; button.setAttribute("aria-label", "Play the training"); button.firstElementChild.firstElementChild.setAttribute("d", "M7 5v14l12-7z"); };
    if (playing) return stop();
    if (place === payload.slider.length - 1) setPlace(0);
    button.setAttribute("aria-label", "Pause");
    button.firstElementChild.firstElementChild.setAttribute("d", "M6 5h4v14H6zM14 5h4v14h-4z");
    const stride = Math.max(1, Math.round(payload.slider.length / 80));
    playing = setInterval(() => {
      setPlace(Math.min(place + stride, payload.slider.length - 1));
      if (place === payload.slider.length - 1) stop();
    }, 110);
  }
  if (slider) {
    slider.addEventListener("input", () => setPlace(Number(slider.value)));
    document.getElementById("play").addEventListener("click", play);
  }

  // Axes and theme

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.classList.contains("log")) toggleLog(button);
    if (button.classList.contains("numbers")) toggleNumbers(button);
  });
  function isLog(id) {
    const axis = (document.getElementById(id).layout || payload.charts[id].layout).yaxis;
    return axis.type === "log";
  }
  function toggleLog(button) {
    const id = button.dataset.chart;
    draw(id);
    const chart = payload.charts[id];
    const next = !isLog(id);
    button.setAttribute("aria-pressed", String(next));
    const update = { "yaxis.type": next ? "log" : "linear", "yaxis.autorange": true };
    const array = next && chart.layout.yaxis.tickmode === "array";
    update["yaxis.tickmode"] = array ? "array" : "auto";
    if (array && chart.layout.yaxis.range) { update["yaxis.autorange"] = false; update["yaxis.range"] = [...chart.layout.yaxis.range]; }
    (payload.charts[id].layout.annotations || []).forEach((one, at) => {
      const level = isLog(id) ? 10 ** document.getElementById(id).layout.annotations[at].y : document.getElementById(id).layout.annotations[at].y;
      update[`annotations[${at}].y`] = next ? Math.log10(level) : level;
    });
    Plotly.relayout(document.getElementById(id), update);
  }
  for (const button of document.querySelectorAll("button.log")) button.setAttribute("aria-pressed", String(isLog(button.dataset.chart)));

  const scale = document.getElementById("scale");
  scale.addEventListener("click", () => {
    logSteps = !logSteps;
    scale.setAttribute("aria-pressed", String(logSteps));
    for (const [id, chart] of drawn) {
      if (!followsScale(chart)) continue;
      const axis = stepAxis();
      Plotly.relayout(document.getElementById(id), { "xaxis.type": axis.type, "xaxis.exponentformat": axis.exponentformat, "xaxis.autorange": true, shapes: shapes(chart) });
    }
  });

  function redraw(ids) {
    for (const id of ids) {
      const chart = drawn.get(id);
      Plotly.react(document.getElementById(id), chart.data, prepare(chart), config);
    }
  }
  const relativeButton = document.getElementById("relative");
  relativeButton?.addEventListener("click", () => {
    relative = !relative;
    relativeButton.setAttribute("aria-pressed", String(relative));
    redraw(drawn.keys());
  });

  const dark = matchMedia("(prefers-color-scheme: dark)");
  function setTheme(isDark) {
    if (root.classList.contains("dark") === isDark) return;
    root.classList.toggle("dark", isDark);
    for (const id of drawn.keys()) Plotly.relayout(document.getElementById(id), { template: payload.templates[theme()], shapes: shapes(drawn.get(id)) });
  }
  document.getElementById("theme").addEventListener("click", () => setTheme(!root.classList.contains("dark")));
  dark.addEventListener("change", (event) => setTheme(event.matches));

  // The numbers of a chart as a table, at the slider's step.
  function toggleNumbers(button) {
    const old = button.closest(".card").querySelector(".scroll");
    button.setAttribute("aria-expanded", String(!old));
    if (old) return old.remove();
    const id = button.dataset.chart;
    draw(id);
    button.closest(".card").append(table(id));
  }
  function renewNumbers(id) {
    const old = document.getElementById(id).closest(".card")?.querySelector(".scroll");
    if (old?.parentElement.querySelector(`.numbers[data-chart="${CSS.escape(id)}"]`)) old.replaceWith(table(id));
  }
  function table(id) {
    const { data, layout } = document.getElementById(id);
    const name = (trace) => (trace === captioned(payload.charts[id]) ? caption(payload.charts[id]) : trace.name);
    const traces = data.filter((trace) => trace.type === "scatter" && trace.name && trace.showlegend !== false && trace.visible !== "legendonly");
    const at = (trace, x) => { const found = trace.x.indexOf(x); return found < 0 ? "" : Number(trace.y[found]?.toPrecision(5) ?? NaN); };
    const places = [...new Set(traces.flatMap((trace) => [...trace.x]))].sort((a, b) => a - b);
    const head = [layout.xaxis.title?.text ?? "", ...traces.map(name)];
    const holder = document.createElement("div");
    holder.className = "scroll";
    holder.tabIndex = 0;
    const rows = places.slice(-2000).map((x) => `<tr><th scope="row">${x}</th>${traces.map((trace) => `<td>${at(trace, x)}</td>`).join("")}</tr>`);
    holder.innerHTML = `<table><thead><tr>${head.map((cell) => `<th scope="col">${cell}</th>`).join("")}</tr></thead><tbody>${rows.join("")}</tbody></table>`;
    return holder;
  }

  // Contents

  const links = new Map([...document.querySelectorAll("#contents a")].map((link) => [link.hash.slice(1), link]));
  const reader = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      const link = links.get(target.id);
      link?.setAttribute("aria-current", "true");
      const nav = link?.parentElement;
      nav?.scrollTo({ left: link.offsetLeft - nav.offsetLeft - 80, behavior: "smooth" });
    }
  }, { rootMargin: "-20% 0px -75% 0px" });
  for (const section of document.querySelectorAll("main > section")) reader.observe(section);

  for (const id of Object.keys(payload.charts)) watcher.observe(document.getElementById(id));
  let wasDark = false;
  addEventListener("afterprint", () => setTheme(wasDark));
  addEventListener("beforeprint", () => {
    wasDark = theme() === "dark";
    setTheme(false);
    for (const id of Object.keys(payload.charts)) { draw(id); if (stale.has(id)) move(id); }
  });
})();
