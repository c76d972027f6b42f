"use strict";
// What a run recorded: an index of columns, which stays in memory, and pieces of texts and of tokens, which are loaded
// when they are looked at. Each is a script that calls `rollouts.receive`, because a page that is opened from a disk
// may load scripts and nothing else.

// How many pieces of a kind stay in memory.
const KEPT = { index: 1, texts: 48, tokens: 8 };

const pieces = new Map(); // name → data, the longest unused first
const loading = new Map(); // name → { promise, resolve, reject }
let version;
let index, columns, size; // of all samples; `start` sets them

const rollouts = {
  pieces,
  receive(itsVersion, name, json) {
    version ??= itsVersion;
    if (version === itsVersion) loading.get(name).resolve(JSON.parse(json));
    else loading.get(name).reject(new Error("The report was written anew since this page was opened; reload it."));
  },
};

async function load(kind, which) {
  const name = which === undefined ? kind : `${kind}_${String(which).padStart(5, "0")}`;
  let data = pieces.get(name);
  if (data === undefined) {
    if (!loading.has(name)) request(name);
    data = await loading.get(name).promise;
  }
  pieces.delete(name);
  pieces.set(name, data);
  const same = [...pieces.keys()].filter((other) => other.startsWith(kind));
  if (same.length > KEPT[kind]) pieces.delete(same[0]);
  return data;
}

function request(name) {
  const script = document.createElement("script");
  const promise = new Promise((resolve, reject) => loading.set(name, { resolve, reject }));
  loading.get(name).promise = promise.finally(() => {
    loading.delete(name);
    script.remove();
  });
  script.onerror = () => loading.get(name).reject(new Error(
    `${name}.js is missing: it belongs beside this page; write the report again.`));
  script.src = `${name}.js`;
  document.head.append(script);
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
  return { ...text, prompt: piece.prompts[text.prompt], images: piece.images };
}

async function tokensOf(sample) {
  const which = pieceOf(sample);
  return (await load("tokens", which))[sample - index.starts[which]];
}

// The whole response: of a conversation, what all of its authors wrote.
const written = (text) => (text.turns ? text.turns.map((turn) => turn[1]).join("") : text.response);

const phaseOf = (sample) => index.phases[columns.phase[sample]];
const nameOf = (sample) => `${index.uids[columns.prompt[sample]]}/${columns.sample[sample]}`;

// Those of `samples` whose prompt, response or expected answer contains the text, in lower case. `tell` hears now and
// then how many were found in which share of all; it returns whether to go on.
async function searched(samples, text, tell) {
  const found = [];
  let which = -1, piece, prompts, told = performance.now();
  for (const sample of samples) {
    if (pieceOf(sample) !== which) {
      which = pieceOf(sample);
      piece = await load("texts", which);
      prompts = piece.prompts.map((prompt) => prompt.toLowerCase().includes(text));
      if (performance.now() - told > 200) {
        told = performance.now();
        if (!tell(found.length, sample / size)) break;
      }
    }
    const one = piece.samples[sample - index.starts[which]];
    const has = (part) => part.toLowerCase().includes(text);
    if (prompts[one.prompt] || has(written(one)) || has(one.truth)) found.push(sample);
  }
  return found;
}
