"use strict";
// The list of samples: filters, search, order and pages.

const ROWS = 50; // of a page
const RANGES = ["step", "reward", "length", "advantage"];
const MEASURES = {
  step: "step",
  reward: "reward",
  length: "length",
  advantage: "mean advantage",
  logprob: "mean log-prob",
  mismatch: "largest mismatch",
  signal: "mean signal",
  divergence: "mean divergence",
};

const form = $("filters");
let listed = []; // the samples that pass the filters, in their order
let first = 0; // place in `listed` of the first row shown
let applied = null; // the settings that `listed` is made with

const isFilter = (name) => form.elements[name] !== undefined && name !== "text" && name !== "sort";

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

// Equal samples keep their order, and those without the value come last.
function inOrder(samples, by) {
  if (!by) return samples;
  const sign = by.startsWith("-") ? -1 : 1, column = columns[by.replace("-", "")];
  const key = (i) => (column[i] === null ? Infinity : sign * column[i]);
  return samples.sort((a, b) => key(a) - key(b) || a - b);
}

// List what the form asks for, unless that is listed already.
async function refresh() {
  const wanted = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));
  const asked = wanted.toString();
  if (asked === applied) return;
  applied = asked;
  const filters = new Set([...wanted.keys()].filter(isFilter).map((name) => name.replace(/_m..$/, "")));
  $("active").textContent = filters.size ? `(${filters.size})` : "";
  let samples = passing(wanted);
  if (wanted.has("text")) {
    samples = await searched(samples, wanted.get("text").toLowerCase(), (found, share) => {
      if (asked === applied) $("count").textContent = `Searching: ${found} found in ${Math.round(100 * share)} %`;
      return asked === applied;
    });
  }
  if (asked !== applied) return;
  listed = inOrder(samples, wanted.get("sort"));
  const mean = (name) => samples.reduce((sum, i) => sum + columns[name][i], 0) / samples.length;
  const many = (count) => count.toLocaleString("en");
  const facts = [`${many(listed.length)}${listed.length < size ? ` of ${many(size)}` : ""} samples`];
  if (listed.length) facts.push(`${Math.round(100 * mean("right"))} % right`, `mean reward ${number(mean("reward"))}`);
  $("count").textContent = facts.join(" · ");
  showRows(Math.max(0, listed.indexOf(current)));
}

// Show the page of the list that has this place in it.
function showRows(place) {
  first = place - (place % ROWS);
  const samples = listed.slice(first, first + ROWS);
  $("rows").replaceChildren(...samples.map(rowOf));
  $("rows").scrollTop = 0;
  $("place").textContent = listed.length ? `${first + 1} to ${first + samples.length}` : "none";
  $("back").disabled = first === 0;
  $("on").disabled = first + ROWS >= listed.length;
  markCurrent();
}

function rowOf(sample) {
  const question = make("span", { className: "question" }, index.uids[columns.prompt[sample]]);
  const answer = make("span", { className: "answer" }, "…");
  const facts = factsOf(sample), advantage = columns.advantage[sample];
  if (advantage !== null) facts.push(`adv. ${signed(advantage)}`);
  if (columns.phase[sample]) facts.push(phaseOf(sample));
  const run = index.runs.length > 1 ? [runName(columns.run[sample])] : [];
  const over = make("span", { className: "facts" }, verdict(sample), ...run, facts.join(" · "));
  const link = make("a", { href: linkTo(sample) }, over, question, answer);
  link.dataset.sample = sample;
  textOf(sample).then((text) => {
    question.textContent = pictured(gist(text.prompt));
    answer.textContent = pictured(written(text).replace(/<\|[^|]*\|>/g, " ").trim().slice(-160));
  }, complain);
  return make("li", {}, link);
}

// What is asked: the last part of a prompt between special tokens that is more than the name of a role.
function gist(prompt) {
  const withoutRole = (part) => part.replace(/^\s*(system|user|assistant|tool)\s*(\n|$)/, "").trim();
  const parts = prompt.split(/<\|[^|<>\n]{1,60}\|>/).map(withoutRole).filter((part) => part);
  return (parts.at(-1) ?? prompt).slice(0, 200);
}

function markCurrent() {
  for (const link of $("rows").querySelectorAll("a")) {
    if (+link.dataset.sample === current) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  $("rows").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
}

// The address of a sample, with the settings of the list.
function linkTo(sample) {
  const parts = new URLSearchParams(applied);
  if (index.runs.length > 1) parts.set("run", index.runs[columns.run[sample]]);
  if (columns.phase[sample]) parts.set("phase", phaseOf(sample));
  parts.set("step", columns.step[sample]);
  parts.set("sample", nameOf(sample));
  return `#${parts}`;
}

// The sample of an address; -1 without one, or if it was not recorded.
function sampleOf(parts) {
  if (!parts.has("sample")) return -1;
  const run = parts.get("run") ?? index.runs[0], phase = parts.get("phase") ?? index.phases[0];
  const isIt = (step, i) => step === +parts.get("step") && index.runs[columns.run[i]] === run && phaseOf(i) === phase
    && nameOf(i) === parts.get("sample");
  return columns.step.findIndex(isIt);
}
