"use strict";
// How texts, tokens and numbers are shown. What models wrote only ever becomes text nodes.

// What a token can be coloured by: the share of the full colour, from the values of the response's tokens. Kinds with
// `both` have a colour for either sign, the others one, for shares above 0; `ends` are the words beside its ramp.
const COLORS = {
  none: { label: "none", share: () => 0 },
  logprob: {
    label: "log-prob",
    ends: ["sure", "unlikely, 4 nats"],
    share: (t, i) => Math.sqrt(Math.max(0, -t.logprob[i]) / 4), // the root, so that slight doubts are seen too
  },
  mismatch: {
    label: "mismatch",
    ends: ["10⁻⁴ nats", "1 nat, logarithmic"],
    share: (t, i) => (t.mismatch[i] ? 1 + Math.log10(Math.abs(t.mismatch[i])) / 4 : 0),
  },
  advantage: { label: "advantage", both: true, share: (t, i) => t.advantage[i] / index.fullAdvantage },
  signal: { label: "signal", both: true, share: (t, i) => t.signal[i] / 2 },
  divergence: { label: "divergence", both: true, share: (t, i) => t.divergence[i] / 2 },
};
const IMAGE = /<image ([0-9a-f]{64})>/;
const SPECIAL = /(<\|[^|<>\n]{1,60}\|>|<\/?[A-Za-z_][A-Za-z0-9_]{0,30}>)/;

const $ = (id) => document.getElementById(id);

function make(tag, { attributes = {}, ...properties } = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.map((child) => (typeof child === "string" ? pictured(child) : child)));
  return element;
}

function number(value, digits = 3) {
  const isTiny = value !== 0 && Math.abs(value) < 1e-3;
  return (isTiny ? value.toExponential(digits - 1) : String(+value.toPrecision(digits))).replaceAll("-", "−");
}

const signed = (value) => (value > 0 ? "+" : "") + number(value);

function complain(error) {
  $("problem").textContent = pictured(error.message);
  $("problem").hidden = false;
}

// Control characters become pictures of themselves, and others that are hidden (such as those that turn the direction
// of writing) escapes, by the rule of `megarl.report.html.shown`.
function pictured(text) {
  const picture = (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    if (code === 0x7f) return "␡";
    const [letter, digits] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
    return `\\${letter}${code.toString(16).padStart(digits, "0")}`;
  };
  return text.replace(/(?![\t\n\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, picture);
}

// Tokens such as <|im_end|>, and tags, are set apart. `images` are pictures of those that the text shows, by digest.
function visible(text, images = {}) {
  const nodes = document.createDocumentFragment();
  const mark = (part) => make("span", { className: "special" }, part);
  const picture = (digest) => make("img", { src: images[digest], alt: `image ${digest.slice(0, 8)}`, title: digest });
  text.split(IMAGE).forEach((plain, i) => {
    if (i % 2) return nodes.append(Object.hasOwn(images, plain) ? picture(plain) : mark(`<image ${plain}>`));
    plain.split(SPECIAL).forEach((part, place) => nodes.append(place % 2 ? mark(part) : pictured(part)));
  });
  return nodes;
}

function colored(tokens, start, end, kind) {
  const { share, both } = COLORS[kind], values = tokens[kind] ?? [];
  return tokens.text.slice(start, end).map((text, place) => {
    const i = start + place, span = make("span", { className: "t" }, text.replaceAll("\n", "↵\n"));
    span.dataset.i = i;
    const value = values[i] === null || values[i] === undefined ? 0 : share(tokens, i);
    const percent = Math.round(100 * Math.min(1, both ? Math.abs(value) : Math.max(0, value)));
    const tone = both ? (value > 0 ? "up" : "down") : "deep";
    if (percent) span.style.background = `color-mix(in srgb, var(--${tone}) ${percent}%, transparent)`;
    return span;
  });
}

// Show the numbers of a token at the foot of the page.
function tell(span) {
  document.querySelector(".t.pointed")?.classList.remove("pointed");
  span.classList.add("pointed");
  const tokens = span.parentElement.tokens, at = (name) => tokens[name]?.[+span.dataset.i] ?? null;
  const facts = [`token ${JSON.stringify(at("text"))}`], logprob = at("logprob");
  if (logprob !== null) facts.push(`log-prob ${number(logprob)} (${number(100 * Math.exp(logprob))} %)`);
  else if (tokens.logprob) facts.push("not sampled by an engine");
  if (at("mismatch") !== null) facts.push(`engine − trainer ${signed(at("mismatch"))} nats`);
  const before = at("base") === null ? "" : `${signed(at("base"))} → `;
  if (at("advantage") !== null) facts.push(`advantage ${before}${signed(at("advantage"))}`);
  if (at("signal") !== null) facts.push(`signal ${signed(at("signal"))} nats`);
  if (at("divergence") !== null) facts.push(`divergence from the teacher ${signed(at("divergence"))} nats`);
  $("token").textContent = pictured(facts.join(" · "));
}

function verdict(sample) {
  const word = columns.right[sample] ? "right" : "wrong";
  const named = { className: `verdict ${word}`, title: word, attributes: { role: "img", "aria-label": word } };
  return make("span", named, columns.right[sample] ? "✓" : "✗");
}

function runName(run) {
  const swatch = make("span", { className: "swatch" });
  swatch.style.background = `var(--series-${run % 8})`;
  return make("span", { className: "run" }, ...(index.runs.length > 1 ? [swatch] : []), index.runs[run]);
}

function factsOf(sample) {
  const { reward, step, length, demonstrated } = columns, given = demonstrated[sample];
  const mark = given === length[sample] ? "demonstration" : `${given} of them demonstrated`;
  const facts = [`reward ${number(reward[sample])}`, `step ${step[sample]}`, `${length[sample]} tokens`];
  return given ? [...facts, mark] : facts;
}
