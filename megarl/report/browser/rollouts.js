"use strict";
// The rollout browser: an index of columns in memory, texts and tokens loaded in pieces by script tags, because a page
// that is opened from a disk may load scripts and nothing else. What models wrote only ever becomes text nodes.
const rollouts = (() => {
  const ROWS = 50; // of a page of the list
  // Of each kind of piece, how many stay in memory.
  const KEPT = { index: 1, texts: 48, tokens: 8 };
  // The smallest and the largest value that a colour shows, and what it says of a token. `both` has a colour for either sign.
  const COLORS = {
    none: { label: "none" },
    logprob: { label: "log-prob", ends: ["sure", "unlikely, 4 nats"], share: (t, i) => -t.logprob[i] / 4 },
    mismatch: {
      label: "mismatch",
      ends: ["10⁻⁴ nats", "1 nat, logarithmic"],
      share: (t, i) => (t.mismatch[i] ? 1 + Math.log10(Math.abs(t.mismatch[i])) / 4 : 0),
    },
    advantage: { label: "advantage", both: true, share: (t, i) => t.advantage[i] / index.fullAdvantage },
    signal: { label: "signal", both: true, share: (t, i) => t.signal[i] / 2 },
  };
  const MEASURES = {
    step: "step", reward: "reward", length: "length", advantage: "advantage", logprob: "mean log-prob",
    mismatch: "largest mismatch", signal: "mean signal",
  };
  const RANGES = ["step", "reward", "length", "advantage"];

  const $ = (id) => document.getElementById(id);
  const form = $("filters");
  let version, index, columns, size;
  let listed = []; // the samples that pass the filters, sorted
  let first = 0; // place in `listed` of the first row shown
  let current = -1; // the sample that is open
  let shown = []; // the sample of each run that stands beside it
  let color = "logprob";
  let applied = null; // the filters that `listed` is made with

  function make(tag, { attributes = {}, ...properties } = {}, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }
  const number = (value, digits = 3) => (value === null || value === undefined ? "–" : String(+value.toPrecision(digits)).replace("-", "−"));
  const signed = (value) => (value > 0 ? "+" : "") + number(value);

  // Pieces ------------------------------------------------------------------------------------------------------------

  const pieces = new Map(); // name → promise, the longest unused first
  const waiting = new Map();

  function load(kind, which) {
    const name = which === undefined ? kind : `${kind}_${String(which).padStart(5, "0")}`;
    const known = pieces.get(name) ?? new Promise((resolve, reject) => {
      const script = make("script", { src: `${name}.js` });
      waiting.set(name, { resolve, reject });
      script.onload = () => script.remove();
      script.onerror = () => {
        script.remove();
        pieces.delete(name);
        reject(new Error(`${name}.js is missing: it belongs beside this page; write the report again.`));
      };
      document.head.append(script);
    });
    pieces.delete(name);
    pieces.set(name, known);
    const same = [...pieces.keys()].filter((other) => other.startsWith(kind));
    if (same.length > KEPT[kind]) pieces.delete(same[0]);
    return known;
  }

  function receive(itsVersion, name, data) {
    const { resolve, reject } = waiting.get(name);
    waiting.delete(name);
    version ??= itsVersion;
    if (version === itsVersion) resolve(data);
    else reject(new Error("The report was written anew since this page was opened; reload it."));
  }

  function complain(error) {
    $("problem").textContent = error.message;
    $("problem").hidden = false;
  }

  function pieceOf(sample) {
    let low = 0, high = index.starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (index.starts[middle] <= sample) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  async function textOf(sample) {
    const which = pieceOf(sample), piece = await load("texts", which);
    const text = piece.samples[sample - index.starts[which]];
    return { ...text, prompt: piece.prompts[text.prompt] };
  }

  async function tokensOf(sample) {
    const which = pieceOf(sample);
    return (await load("tokens", which))[sample - index.starts[which]];
  }

  const written = (text) => (text.turns ? text.turns.map((turn) => turn[1]).join("") : text.response);

  // The list ----------------------------------------------------------------------------------------------------------

  const settings = () => new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));

  function passing(wanted) {
    const checks = [];
    const equal = (column, value) => checks.push((i) => columns[column][i] === value);
    if (wanted.has("in_run")) equal("run", index.runs.indexOf(wanted.get("in_run")));
    if (wanted.has("in_phase")) equal("phase", index.phases.indexOf(wanted.get("in_phase")));
    if (wanted.has("source")) equal("source", index.sources.indexOf(wanted.get("source")));
    if (wanted.has("verdict")) equal("right", wanted.get("verdict") === "right" ? 1 : 0);
    for (const name of RANGES) {
      const column = columns[name], low = wanted.get(`${name}_min`), high = wanted.get(`${name}_max`);
      if (low !== null) checks.push((i) => column[i] !== null && column[i] >= +low);
      if (high !== null) checks.push((i) => column[i] !== null && column[i] <= +high);
    }
    const found = [];
    for (let i = 0; i < size; i++) if (checks.every((check) => check(i))) found.push(i);
    return found;
  }

  function sorted(samples, by) {
    if (!by) return samples;
    const sign = by.startsWith("-") ? -1 : 1, column = columns[by.replace("-", "")];
    const key = (i) => (column[i] === null ? Infinity : sign * column[i]);
    return samples.sort((a, b) => key(a) - key(b) || a - b);
  }

  async function searched(samples, text, isCurrent) {
    const found = [];
    let which = -1, piece, prompts, told = performance.now();
    for (const sample of samples) {
      if (pieceOf(sample) !== which) {
        which = pieceOf(sample);
        piece = await load("texts", which);
        if (!isCurrent()) return null;
        prompts = piece.prompts.map((prompt) => prompt.toLowerCase().includes(text));
        if (performance.now() - told > 200) {
          told = performance.now();
          $("count").textContent = `Searching: ${found.length} found in ${Math.round((100 * sample) / size)} %`;
        }
      }
      const one = piece.samples[sample - index.starts[which]];
      if (prompts[one.prompt] || [written(one), one.truth].some((part) => part.toLowerCase().includes(text))) found.push(sample);
    }
    return found;
  }

  async function refresh() {
    const wanted = settings();
    if (wanted.toString() === applied) return;
    applied = wanted.toString();
    const isCurrent = () => applied === wanted.toString();
    const names = new Set([...wanted.keys()].filter((name) => name !== "text" && name !== "sort").map((name) => name.replace(/_m..$/, "")));
    $("active").textContent = names.size ? `(${names.size})` : "";
    let samples = passing(wanted);
    if (wanted.has("text")) samples = await searched(samples, wanted.get("text").toLowerCase(), isCurrent);
    if (!isCurrent()) return;
    const right = samples.reduce((sum, i) => sum + columns.right[i], 0);
    const reward = samples.reduce((sum, i) => sum + columns.reward[i], 0);
    const of = samples.length < size ? ` of ${size.toLocaleString("en")}` : "";
    $("count").textContent = `${samples.length.toLocaleString("en")}${of} samples`
      + (samples.length ? ` · ${Math.round((100 * right) / samples.length)} % right · mean reward ${number(reward / samples.length)}` : "");
    listed = sorted(samples, wanted.get("sort"));
    showRows(Math.max(0, listed.indexOf(current)));
  }

  function showRows(place) {
    first = place - (place % ROWS);
    const samples = listed.slice(first, first + ROWS);
    $("rows").replaceChildren(...samples.map(row));
    $("rows").scrollTop = 0;
    $("place").textContent = listed.length ? `${first + 1} to ${first + samples.length}` : "none";
    $("back").disabled = first === 0;
    $("on").disabled = first + ROWS >= listed.length;
    mark();
  }

  function row(sample) {
    const question = make("span", { className: "question" }, index.uids[columns.prompt[sample]]);
    const answer = make("span", { className: "answer" }, "…");
    const facts = [`reward ${number(columns.reward[sample])}`, `step ${columns.step[sample]}`, `${columns.length[sample]} tokens`];
    if (columns.advantage[sample] !== null) facts.push(`adv. ${signed(columns.advantage[sample])}`);
    if (columns.phase[sample]) facts.push(index.phases[columns.phase[sample]]);
    const link = make("a", { href: linkTo(sample) },
      make("span", { className: "facts" }, verdict(sample), ...runMark(sample), facts.join(" · ")), question, answer);
    link.dataset.sample = sample;
    textOf(sample).then((text) => {
      question.textContent = gist(text.prompt);
      answer.textContent = written(text).replace(/<\|[^|]*\|>/g, " ").trim().slice(-160);
    }, complain);
    return make("li", {}, link);
  }

  // What is asked: the last part of a prompt between special tokens that is more than the name of a role.
  function gist(prompt) {
    const parts = prompt.split(/<\|[^|<>\n]{1,60}\|>/).map((part) => part.replace(/^\s*(system|user|assistant|tool)\s*\n/, "").trim());
    return (parts.filter((part) => part && part !== "assistant").at(-1) ?? prompt).slice(0, 200);
  }

  function verdict(sample) {
    const word = columns.right[sample] ? "right" : "wrong";
    return make("span", { className: `verdict ${word}`, title: word, attributes: { role: "img", "aria-label": word } }, columns.right[sample] ? "✓" : "✗");
  }

  function runMark(sample) {
    if (index.runs.length === 1) return [];
    const run = columns.run[sample];
    return [make("span", { className: "run" }, swatch(run), index.runs[run])];
  }

  function swatch(run) {
    const mark = make("span", { className: "swatch" });
    mark.style.background = `var(--series-${run % 8})`;
    return mark;
  }

  function mark() {
    for (const link of $("rows").querySelectorAll("a")) {
      if (+link.dataset.sample === current) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
    $("rows").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
  }

  // One sample --------------------------------------------------------------------------------------------------------

  const nameOf = (sample) => `${index.uids[columns.prompt[sample]]}/${columns.sample[sample]}`;

  function linkTo(sample) {
    const parts = new URLSearchParams(applied ?? "");
    if (index.runs.length > 1) parts.set("run", index.runs[columns.run[sample]]);
    if (columns.phase[sample]) parts.set("phase", index.phases[columns.phase[sample]]);
    parts.set("step", columns.step[sample]);
    parts.set("sample", nameOf(sample));
    return `#${parts}`;
  }

  function linked(parts) {
    if (!parts.has("sample")) return -1;
    const run = Math.max(0, index.runs.indexOf(parts.get("run"))), phase = Math.max(0, index.phases.indexOf(parts.get("phase")));
    for (let i = 0; i < size; i++) {
      if (columns.step[i] === +parts.get("step") && columns.run[i] === run && columns.phase[i] === phase && nameOf(i) === parts.get("sample")) return i;
    }
    return -1;
  }

  // In each run, the sample of the same prompt that is nearest to this one.
  function besides(sample) {
    const near = index.runs.map(() => ({ sample: -1, far: Infinity }));
    for (let i = 0; i < size; i++) {
      if (columns.prompt[i] !== columns.prompt[sample]) continue;
      const far = (columns.phase[i] !== columns.phase[sample]) * 1e9 + Math.abs(columns.step[i] - columns.step[sample]) * 1e3
        + Math.abs(columns.sample[i] - columns.sample[sample]);
      if (far < near[columns.run[i]].far) near[columns.run[i]] = { sample: i, far };
    }
    near[columns.run[sample]].sample = sample;
    return near.map((each) => each.sample);
  }

  function open(sample, { inHash = true } = {}) {
    current = sample;
    shown = besides(sample);
    const place = listed.indexOf(sample);
    if (place >= 0 && (place < first || place >= first + ROWS)) showRows(place);
    else mark();
    if (inHash) history.replaceState(null, "", linkTo(sample));
    showSample().catch(complain);
  }

  async function showSample() {
    const sample = current, samples = [...shown];
    const [asked, ...parts] = await Promise.all([
      textOf(sample),
      ...samples.map(async (one) => (one < 0 ? null : { text: await textOf(one), tokens: await tokensOf(one) })),
    ]);
    if (sample !== current || samples.some((one, run) => one !== shown[run])) return;
    const kinds = Object.keys(COLORS).filter((kind) => kind === "none" || parts.some((part) => part?.tokens?.[kind]));
    const kind = kinds.includes(color) ? color : kinds.length > 1 ? kinds[1] : "none";
    const columnsShown = samples.map((one, run) => column(one, run, parts[run], kind));
    $("sample").replaceChildren(
      make("div", { className: "over" },
        make("button", { type: "button", className: "leave", onclick: () => document.body.classList.remove("reading") }, "‹ Samples"),
        make("h2", {}, nameOf(sample)), make("span", { className: "note" }, index.sources[columns.source[sample]])),
      make("h3", {}, "Prompt"), make("pre", { className: "prompt", tabIndex: 0, attributes: { role: "group", "aria-label": "prompt" } }, visible(asked.prompt)),
      ...(kinds.length > 1 ? [palette(kinds, kind)] : []),
      make("div", { className: "columns" }, ...columnsShown));
    $("token").textContent = "Point at a token for its numbers. Keys: j and k next and previous sample, / search, ← → tokens of a chosen response.";
    $("sample").scrollTop = 0;
  }

  function palette(kinds, kind) {
    const choices = kinds.map((each) => make("label", {},
      make("input", { type: "radio", name: "color", value: each, checked: each === kind, onchange: () => { color = each; showSample().catch(complain); } }),
      make("span", {}, COLORS[each].label)));
    const { both, ends } = COLORS[kind];
    const full = number(kind === "advantage" ? index.fullAdvantage : 2, 2);
    const [low, high] = both ? [`−${full}`, `+${full}${kind === "signal" ? " nats" : ""}`] : ends ?? ["", ""];
    const legend = kind === "none" ? [] : [make("span", { className: "legend" }, low, make("span", { className: both ? "ramp both" : "ramp" }), high)];
    return make("fieldset", { className: "colors" }, make("legend", {}, "Colour of tokens"), make("span", { className: "choices" }, ...choices), ...legend);
  }

  function column(sample, run, part, kind) {
    const title = index.runs.length > 1 ? [make("h3", {}, swatch(run), index.runs[run])] : [];
    if (!part) return make("article", {}, ...title, make("p", { className: "empty" }, "No sample of this prompt was recorded."));
    const { text, tokens } = part;
    const facts = [`reward ${number(columns.reward[sample])}`, `step ${columns.step[sample]}`, `${columns.length[sample]} tokens`,
      ...(text.calls === undefined ? [] : [`${text.calls} tool call${text.calls === 1 ? "" : "s"}`]), `finish: ${text.finish}`];
    for (const name of ["advantage", "logprob", "mismatch", "signal"]) {
      const value = columns[name][sample];
      if (value !== null) facts.push(`${MEASURES[name]} ${name === "mismatch" ? number(value) : signed(value)}`);
    }
    const details = Object.entries(text.details ?? {});
    return make("article", { className: columns.right[sample] ? "right" : "wrong" }, ...title,
      make("p", { className: "facts" }, verdict(sample), make("b", {}, columns.right[sample] ? "right" : "wrong"), ` · ${facts.join(" · ")}`),
      siblings(sample, run), ...response(text, tokens, kind),
      ...(text.truth ? [make("p", { className: "note" }, "expected ", make("code", {}, text.truth))] : []),
      ...(details.length ? [make("p", { className: "note" }, details.map(([name, value]) => `${name}: ${typeof value === "number" ? number(value) : value}`).join(" · "))] : []));
  }

  // The run's samples of the same prompt, by step.
  function siblings(sample, run) {
    const steps = new Map();
    for (let i = 0; i < size; i++) {
      if (columns.prompt[i] !== columns.prompt[sample] || columns.run[i] !== run) continue;
      const name = `${columns.phase[i] ? `${index.phases[columns.phase[i]]}, ` : ""}step ${columns.step[i]}`;
      steps.set(name, [...(steps.get(name) ?? []), i]);
    }
    const groups = [...steps].map(([name, samples]) => make("span", { className: "group" }, make("span", { className: "note" }, name),
      ...samples.map((one) => {
        const word = columns.right[one] ? "right" : "wrong";
        const label = `${name}, sample ${columns.sample[one]}: ${word}, reward ${number(columns.reward[one])}`;
        const choose = () => (run === columns.run[current] ? open(one) : ((shown[run] = one), showSample().catch(complain)));
        return make("button", { type: "button", className: word, title: label, onclick: choose,
          attributes: { "aria-label": label, "aria-pressed": String(one === sample) } }, columns.right[one] ? "✓" : "✗");
      })));
    return make("nav", { className: "siblings", attributes: { "aria-label": "Samples of this prompt" } }, ...groups);
  }

  function response(text, tokens, kind) {
    const turns = text.turns ?? [["response", text.response, 0, tokens?.text.length ?? 0]];
    let end = 0, turn = 0;
    return turns.flatMap(([author, said, reward, count]) => {
      const start = end;
      end += count;
      const isRead = author === "environment";
      turn += author === "policy";
      let label = isRead ? "environment: read, not trained on" : author === "policy" ? `policy, turn ${turn}` : author;
      if (reward) label += `, reward ${signed(reward)}`;
      const pre = make("pre", { className: isRead ? "read" : "response", tabIndex: 0, attributes: { role: "group", "aria-label": label } });
      if (isRead || !tokens || !count) pre.append(visible(isRead ? said.replace(/^\n+|\n+$/g, "") : said));
      else pre.append(...colored(tokens, start, end, kind));
      pre.tokens = tokens;
      return [make("span", { className: "note" }, label), pre];
    });
  }

  function colored(tokens, start, end, kind) {
    const { share, both } = COLORS[kind];
    const spans = [];
    for (let i = start; i < end; i++) {
      const span = make("span", { className: "t" }, pictured(tokens.text[i]).replaceAll("\n", "↵\n"));
      span.dataset.i = i;
      const known = share && tokens[kind] && tokens[kind][i] !== null && tokens[kind][i] !== undefined ? share(tokens, i) : 0;
      const percent = Math.round(100 * Math.min(1, both ? Math.abs(known) : Math.max(0, known)));
      if (percent) span.style.background = `color-mix(in srgb, var(--${both ? (known > 0 ? "up" : "down") : "deep"}) ${percent}%, transparent)`;
      spans.push(span);
    }
    return spans;
  }

  // Control characters become pictures of them, and tokens such as <|im_end|> are set apart.
  const pictured = (text) => text.replace(/[\x00-\x08\x0b-\x1f\x7f]/g, (c) => String.fromCharCode(c === "\x7f" ? 0x2421 : 0x2400 + c.charCodeAt(0)));
  function visible(text) {
    const nodes = document.createDocumentFragment();
    pictured(text).split(/(<\|[^|<>\n]{1,60}\|>|<\/?[A-Za-z_][A-Za-z0-9_]{0,30}>)/).forEach((part, place) =>
      nodes.append(place % 2 ? make("span", { className: "special" }, part) : part));
    return nodes;
  }

  function tell(span) {
    document.querySelector(".t.pointed")?.classList.remove("pointed");
    const tokens = span.parentElement.tokens, i = +span.dataset.i;
    span.classList.add("pointed");
    const facts = [`token ${JSON.stringify(tokens.text[i])}`];
    if (tokens.logprob) facts.push(tokens.logprob[i] === null ? "not sampled by an engine" : `log-prob ${number(tokens.logprob[i])} (${number(100 * Math.exp(tokens.logprob[i]))} %)`);
    if (tokens.mismatch?.[i] != null) facts.push(`engine − trainer ${signed(tokens.mismatch[i])} nats`);
    if (tokens.advantage) facts.push(`advantage ${tokens.base ? `${signed(tokens.base[i])} → ` : ""}${signed(tokens.advantage[i])}`);
    if (tokens.signal) facts.push(`signal ${signed(tokens.signal[i])} nats`);
    $("token").textContent = facts.join(" · ");
  }

  // Start, keys and links ---------------------------------------------------------------------------------------------

  function follow() {
    const parts = new URLSearchParams(location.hash.slice(1));
    for (const field of form.elements) if (field.name) field.value = parts.get(field.name) ?? "";
    if ([...parts.keys()].some((name) => form.elements[name] && name !== "text" && name !== "sort")) $("more").open = innerWidth > 800;
    const sample = linked(parts);
    if (parts.has("sample") && sample < 0) complain(new Error(`No recorded sample is step ${parts.get("step")}, ${parts.get("sample")}.`));
    document.body.classList.toggle("reading", sample >= 0);
    refresh().then(() => (sample >= 0 ? open(sample, { inHash: false }) : listed.length && open(listed[0], { inHash: false }))).catch(complain);
  }

  function step(by) {
    const place = listed.indexOf(current), to = place < 0 ? 0 : place + by;
    if (to >= 0 && to < listed.length) open(listed[to]);
  }

  function key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const { target } = event, isField = target.matches("input:not([type=radio]), select, textarea");
    if (event.key === "Escape") {
      target.blur();
      document.body.classList.remove("reading");
    } else if (isField) return;
    else if (event.key === "j" || event.key === "k") step(event.key === "j" ? 1 : -1);
    else if (event.key === "/") {
      event.preventDefault();
      document.body.classList.remove("reading");
      form.elements.text.focus();
    } else if (target.tokens && (event.key === "ArrowRight" || event.key === "ArrowLeft")) {
      event.preventDefault();
      const spans = [...target.querySelectorAll(".t")], at = spans.findIndex((span) => span.classList.contains("pointed"));
      const next = spans[Math.min(Math.max(at + (event.key === "ArrowRight" ? 1 : -1), 0), spans.length - 1)];
      if (next) tell(next);
    }
  }

  function theme(change) {
    const names = { "light dark": "auto", light: "light", dark: "dark" }, schemes = Object.keys(names);
    let scheme = "light dark";
    // Where pages on disks have no storage, the choice lasts as long as the page.
    try { scheme = localStorage.getItem("megarl-scheme") ?? scheme; } catch {}
    if (change) scheme = schemes[(schemes.indexOf(document.documentElement.style.colorScheme || scheme) + 1) % 3];
    try { localStorage.setItem("megarl-scheme", scheme); } catch {}
    document.documentElement.style.colorScheme = scheme;
    $("theme").textContent = `Theme: ${names[scheme]}`;
  }

  function start(data) {
    index = data;
    columns = index.columns;
    size = columns.run.length;
    index.fullAdvantage = columns.advantage.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0) || 1;
    document.title = `Rollouts · ${index.runs.join(", ")}`;
    $("runs").append(...index.runs.map((name, run) => make("span", { className: "run" }, ...(index.runs.length > 1 ? [swatch(run)] : []), name)));
    const fill = (name, values) => {
      form.elements[name].append(make("option", { value: "" }, "any"), ...values.map((value) => make("option", { value }, value)));
      form.elements[name].parentElement.hidden = values.length < 2;
    };
    fill("in_run", index.runs);
    fill("in_phase", index.phases.filter((_, phase) => columns.phase.includes(phase)));
    fill("source", index.sources);
    form.querySelectorAll("fieldset").forEach((set, place) => {
      const field = (end, words) => make("input", { type: "number", step: "any", name: `${RANGES[place]}_${end}`, placeholder: words,
        attributes: { "aria-label": `${RANGES[place]}, ${words}` } });
      set.append(field("min", "from"), "–", field("max", "to"));
    });
    const measures = Object.entries(MEASURES).filter(([name]) => columns[name].some((value) => value !== null));
    form.elements.sort.append(make("option", { value: "" }, "order of recording"), ...measures.flatMap(([name, words]) => [
      make("option", { value: `-${name}` }, `${words}, highest first`), make("option", { value: name }, `${words}, lowest first`)]));
    let timer;
    const changed = () => {
      clearTimeout(timer);
      timer = setTimeout(() => refresh().then(() => history.replaceState(null, "", `#${applied}`)).catch(complain), 150);
    };
    form.addEventListener("input", changed);
    form.addEventListener("reset", changed);
    form.addEventListener("submit", (event) => event.preventDefault());
    // A click on the sample that is open does not change the address.
    $("rows").addEventListener("click", () => document.body.classList.add("reading"));
    $("back").onclick = () => showRows(first - ROWS);
    $("on").onclick = () => showRows(first + ROWS);
    for (const kind of ["mouseover", "click"]) $("sample").addEventListener(kind, (event) => event.target.matches(".t") && tell(event.target));
    addEventListener("keydown", key);
    addEventListener("hashchange", follow);
    follow();
  }

  theme(false);
  $("theme").onclick = () => theme(true);
  load("index").then(start).catch(complain);
  return { receive, pieces };
})();
