"use strict";
// One sample: its prompt, and the responses of all runs to that prompt side by side.

const HELP = "Point at a token for its numbers. Keys: j, k next, previous sample; / search; ← → tokens of a response.";

let current = -1; // the sample that is open
let shown = []; // of each run, the sample that is shown; -1: it has none of this prompt
let color = "logprob";

// Of each run, the sample of the same prompt that is nearest to this one: of its phase, then its step, then its number.
function besides(sample) {
  const near = index.runs.map(() => ({ sample: -1, distance: [Infinity] }));
  const isNearer = (a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2];
  const { phase, step, sample: which } = columns;
  columns.prompt.forEach((prompt, i) => {
    if (prompt !== columns.prompt[sample]) return;
    const apart = (values) => Math.abs(values[i] - values[sample]);
    const distance = [+(apart(phase) > 0), apart(step), apart(which)];
    if (isNearer(distance, near[columns.run[i]].distance) < 0) near[columns.run[i]] = { sample: i, distance };
  });
  return near.map((each) => each.sample);
}

function openSample(sample, { inHash = true } = {}) {
  current = sample;
  shown = besides(sample);
  const place = listed.indexOf(sample);
  if (place >= 0 && (place < first || place >= first + ROWS)) showRows(place);
  else markCurrent();
  if (inHash) history.replaceState(null, "", linkTo(sample));
  showSample();
}

async function showSample() {
  const samples = [...shown], parts = [];
  try {
    for (const one of samples) parts.push(one < 0 ? null : { text: await textOf(one), tokens: await tokensOf(one) });
  } catch (error) {
    return complain(error);
  }
  if (samples.some((one, run) => one !== shown[run])) return; // another was opened meanwhile
  const kinds = Object.keys(COLORS).filter((kind) => kind === "none" || parts.some((part) => part?.tokens?.[kind]));
  const kind = kinds.includes(color) ? color : kinds[1] ?? "none";
  const read = parts[columns.run[current]].text;
  const leave = () => document.body.classList.remove("reading");
  const prompt = { className: "prompt", tabIndex: 0, attributes: { role: "group", "aria-label": "prompt" } };
  $("sample").replaceChildren(
    make("div", { className: "over" },
      make("button", { type: "button", className: "leave", onclick: leave }, "‹ Samples"),
      make("h2", {}, nameOf(current)),
      make("span", { className: "note" }, index.sources[columns.source[current]])),
    make("h3", {}, "Prompt"),
    make("pre", prompt, visible(read.prompt, read.images)),
    ...(kinds.length > 1 ? [chooser(kinds, kind)] : []),
    make("div", { className: "columns" }, ...samples.map((one, run) => column(one, run, parts[run], kind))));
  $("token").textContent = HELP;
  $("sample").scrollTop = 0;
}

function chooser(kinds, kind) {
  const choice = (each) => {
    const choose = () => { color = each; showSample(); };
    const radio = { type: "radio", name: "color", value: each, checked: each === kind, onchange: choose };
    return make("label", {}, make("input", radio), make("span", {}, COLORS[each].label));
  };
  const { both, ends } = COLORS[kind];
  const full = kind === "advantage" ? number(index.fullAdvantage, 2) : "2 nats";
  const [low, high] = both ? [`−${full}`, `+${full}`] : ends ?? [];
  const ramp = make("span", { className: both ? "ramp both" : "ramp" });
  return make("fieldset", { className: "colors" },
    make("legend", {}, "Colour of tokens"),
    make("span", { className: "choices" }, ...kinds.map(choice)),
    ...(kind === "none" ? [] : [make("span", { className: "legend" }, low, ramp, high)]));
}

function column(sample, run, part, kind) {
  const title = index.runs.length > 1 ? [make("h3", {}, runName(run))] : [];
  const empty = "No sample of this prompt was recorded.";
  if (!part) return make("article", {}, ...title, make("p", { className: "empty" }, empty));
  const { text, tokens } = part, word = columns.right[sample] ? "right" : "wrong";
  const facts = factsOf(sample), turns = turnsOf(text, tokens), branches = branchesOf(turns);
  if (branches.length > 1) facts.push(`${branches.length} branches`);
  const isTalk = text.turns && (!columns.demonstrated[sample] || turns.some((turn) => turn.author === "environment"));
  if (isTalk) facts.push(`${text.calls} tool call${text.calls === 1 ? "" : "s"}`);
  facts.push(`finish: ${text.finish}`);
  for (const name of ["advantage", "logprob", "mismatch", "signal", "divergence"]) {
    const value = columns[name][sample];
    if (value !== null) facts.push(`${MEASURES[name]} ${name === "mismatch" ? number(value) : signed(value)}`);
  }
  const said = ([name, value]) => `${name}: ${typeof value === "number" ? number(value) : JSON.stringify(value)}`;
  const details = Object.entries(text.details ?? {}).map(said);
  return make("article", { className: word }, ...title,
    make("p", { className: "facts" }, verdict(sample), make("b", {}, word),
      ...facts.flatMap((fact) => [" · ", make("span", { className: "fact" }, fact)])),
    siblings(sample, run),
    ...(branches.length > 1
      ? shownTree(sample, branches, tokens, kind)
      : turns.flatMap((turn) => shownTurn(turn, tokens, kind))),
    ...(text.truth ? [make("p", { className: "note" }, "expected ", make("code", {}, text.truth))] : []),
    ...(details.length ? [make("p", { className: "note" }, details.join(" · "))] : []));
}

// All samples of the run for the same prompt, by step, to choose from.
function siblings(sample, run) {
  const groups = new Map();
  const choice = (one, name) => {
    const word = columns.right[one] ? "right" : "wrong";
    const label = `${name}, sample ${columns.sample[one]}: ${word}, reward ${number(columns.reward[one])}`;
    const choose = () => {
      if (run === columns.run[current]) return openSample(one);
      shown[run] = one;
      showSample();
    };
    const attributes = { "aria-label": label, "aria-pressed": String(one === sample) };
    const button = { type: "button", className: word, title: label, onclick: choose, attributes };
    return make("button", button, columns.right[one] ? "✓" : "✗");
  };
  columns.prompt.forEach((prompt, one) => {
    if (prompt !== columns.prompt[sample] || columns.run[one] !== run) return;
    const name = `${columns.phase[one] ? `${phaseOf(one)}, ` : ""}step ${columns.step[one]}`;
    const title = make("span", { className: "note" }, name);
    if (!groups.has(name)) groups.set(name, make("span", { className: "group" }, title));
    groups.get(name).append(choice(one, name));
  });
  const attributes = { "aria-label": "Samples of this prompt" };
  return make("nav", { className: "siblings", attributes }, ...groups.values());
}

// The turns of a response, each with its author: of a conversation several, of which the policy only read some. `start`
// and `end` are their tokens, `number` counts the policy's turns, `parent` and `kept` say where a branch begins.
function turnsOf(text, tokens) {
  const turns = text.turns ?? [["response", text.response, 0, tokens?.text.length ?? 0]];
  let end = 0, number = 0;
  return turns.map(([author, said, reward, count, parent, kept]) => {
    const start = end;
    end += count;
    number += author === "policy";
    return { author, said, reward, start, end, number, parent, kept, images: text.images };
  });
}

function nameOfTurn(turn) {
  if (turn.author === "environment") return "environment: read, not trained on";
  return turn.author === "policy" ? `policy, turn ${turn.number}` : `${turn.author}: trained on, not sampled`;
}

// A turn, or only the tokens up to `end` of it. `marks` are elements by the token before which they stand.
function shownTurn(turn, tokens, kind, { end = turn.end, marks = new Map() } = {}) {
  if (end === turn.start && !turn.said) return [];
  const isRead = turn.author === "environment", isWhole = end === turn.end;
  let label = nameOfTurn(turn);
  if (!isWhole) label += `, ${end - turn.start} of ${turn.end - turn.start} tokens`;
  else if (turn.reward) label += `, reward ${signed(turn.reward)}`;
  const attributes = { role: "group", "aria-label": label };
  const pre = make("pre", { className: isRead ? "read" : "response", tabIndex: 0, attributes });
  const said = isWhole || !tokens ? turn.said : tokens.text.slice(turn.start, end).join("");
  const after = [];
  if (isRead || !tokens || end === turn.start) {
    pre.append(visible(isRead ? said.replace(/^\n+|\n+$/g, "") : said, turn.images));
    after.push(...marks.values());
  } else {
    const spans = colored(tokens, turn.start, end, kind);
    pre.append(...spans.flatMap((span, place) => [...(marks.get(turn.start + place) ?? []), span]));
    pre.append(...(marks.get(end) ?? []));
  }
  pre.tokens = tokens;
  return [make("span", { className: "note" }, label, ...after.flat()), pre];
}
