"use strict";
// The page: its form, keys, links and theme; it starts with the index.

// Follow the address: set the form, list, and open a sample.
async function follow() {
  const parts = new URLSearchParams(location.hash.slice(1));
  for (const field of form.elements) if (field.name) field.value = parts.get(field.name) ?? "";
  if ([...parts.keys()].some(isFilter)) $("more").open = innerWidth > 800;
  const sample = sampleOf(parts);
  document.body.classList.toggle("reading", sample >= 0);
  try {
    await refresh();
    if (sample >= 0) openSample(sample, { inHash: false });
    else if (listed.length) openSample(listed[0], { inHash: false });
    if (sample >= 0 || !parts.has("sample")) return;
    complain(new Error(`No recorded sample is step ${parts.get("step")}, ${parts.get("sample")}.`));
  } catch (error) {
    complain(error);
  }
}

function move(by) {
  const place = listed.indexOf(current), to = place < 0 ? 0 : place + by;
  if (to >= 0 && to < listed.length) openSample(listed[to]);
}

function pointNext(pre, by) {
  const spans = [...pre.querySelectorAll(".t")], at = spans.findIndex((span) => span.classList.contains("pointed"));
  const next = spans[Math.min(Math.max(at + by, 0), spans.length - 1)];
  if (next) tell(next);
}

function onKey(event) {
  const { key, target } = event;
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (key === "Escape") {
    target.blur();
    document.body.classList.remove("reading");
  } else if (target.matches("input:not([type=radio]), select")) return;
  else if (key === "j" || key === "k") move(key === "j" ? 1 : -1);
  else if (key === "/") {
    event.preventDefault();
    document.body.classList.remove("reading");
    form.elements.text.focus();
  } else if (target.tokens && (key === "ArrowRight" || key === "ArrowLeft")) {
    event.preventDefault();
    pointNext(target, key === "ArrowRight" ? 1 : -1);
  }
}

function setTheme(scheme) {
  const names = { "light dark": "auto", light: "light", dark: "dark" }, schemes = Object.keys(names);
  document.documentElement.style.colorScheme = scheme;
  $("theme").textContent = `Theme: ${names[scheme]}`;
  $("theme").onclick = () => setTheme(schemes[(schemes.indexOf(scheme) + 1) % 3]);
  // Where a page on a disk has no storage, the choice lasts as long as the page.
  try { localStorage.setItem("megarl-theme", scheme); } catch {}
}

function fillForm() {
  for (const [name, values] of [
    ["in_run", index.runs],
    ["in_phase", index.phases.filter((_, phase) => columns.phase.includes(phase))],
    ["source", index.sources],
  ]) {
    const options = [make("option", { value: "" }, "any"), ...values.map((value) => make("option", { value }, value))];
    form.elements[name].append(...options);
    form.elements[name].parentElement.hidden = values.length < 2;
  }
  form.querySelectorAll("fieldset").forEach((set, place) => {
    const field = (end, words) => make("input", { type: "number", step: "any", name: `${RANGES[place]}_${end}`,
      placeholder: words, attributes: { "aria-label": `${RANGES[place]}, ${words}` } });
    set.append(field("min", "from"), "–", field("max", "to"));
  });
  form.elements.sort.append(make("option", { value: "" }, "order of recording"));
  for (const [name, words] of Object.entries(MEASURES)) {
    if (columns[name].every((value) => value === null)) continue;
    form.elements.sort.append(make("option", { value: `-${name}` }, `${words}, highest first`));
    form.elements.sort.append(make("option", { value: name }, `${words}, lowest first`));
  }
}

function start(data) {
  index = data;
  columns = index.columns;
  size = columns.run.length;
  index.fullAdvantage = columns.advantage.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
  document.title = pictured(`Rollouts · ${index.runs.join(", ")}`);
  $("runs").append(...index.runs.map((_, run) => runName(run)));
  fillForm();
  let timer;
  const relist = async () => {
    await refresh();
    history.replaceState(null, "", `#${applied}`);
    if (listed.length && !listed.includes(current)) openSample(listed[0], { inHash: false });
  };
  const changed = () => {
    clearTimeout(timer);
    timer = setTimeout(() => relist().catch(complain), 150);
  };
  form.addEventListener("input", changed);
  form.addEventListener("reset", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  // A click on the sample that is open does not change the address.
  $("rows").addEventListener("click", () => document.body.classList.add("reading"));
  $("back").addEventListener("click", () => showRows(first - ROWS));
  $("on").addEventListener("click", () => showRows(first + ROWS));
  for (const kind of ["mouseover", "click"]) {
    $("sample").addEventListener(kind, (event) => event.target.matches(".t") && tell(event.target));
  }
  addEventListener("keydown", onKey);
  addEventListener("hashchange", follow);
  follow();
}

let stored;
try { stored = localStorage.getItem("megarl-theme"); } catch {}
setTheme(stored ?? "light dark");
load("index").then(start).catch(complain);
