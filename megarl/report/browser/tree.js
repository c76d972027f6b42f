"use strict";
// Conversations that fork: their branches one below the other with lines between them, or one path alone.

const MANY = 8; // more branches than these are folded at first
const paths = new Map(); // by sample, the number of the branch to whose end a path is shown; absent: all branches

// The branches of turns, in the order of writing: each goes on from the first `kept` tokens of the turn `parent`, which
// is in the branch `from`; −1 stands for the prompt, and the first one has all of it.
function branchesOf(turns) {
  const branches = [], homes = [];
  for (const turn of turns) {
    const begins = turn.parent !== undefined;
    if (begins || !branches.length) {
      const { parent, kept } = begins ? turn : { parent: -1, kept: null }, number = branches.length + 1;
      branches.push({ number, turns: [], parent: turns[parent] ?? null, kept, from: homes[parent] ?? -1 });
    }
    homes.push(branches.length - 1);
    branches.at(-1).turns.push(turn);
  }
  return branches;
}

function origin({ parent, kept, from }) {
  if (kept === 0) return "with a prompt of its own";
  if (!parent) return kept === null ? "after the prompt" : `after ${kept} tokens of the prompt`;
  const size = parent.end - parent.start, part = kept < size ? `${kept} of ${size} tokens of ` : "";
  return `after ${part}${parent.author === "policy" ? `turn ${parent.number}` : "a reply"}, branch ${from + 1}`;
}

// Turns and parts of turns that the policy read and wrote up to the end of a branch, from the first on.
function pathTo(branches, branch) {
  const parts = branch.turns.map((turn) => [turn, turn.end]);
  let root = branch;
  while (root.from >= 0) {
    const { parent, kept, from } = root, turns = branches[from].turns;
    const before = turns.slice(0, turns.indexOf(parent)).map((turn) => [turn, turn.end]);
    parts.unshift(...before, [parent, parent.start + kept]);
    root = branches[from];
  }
  return { root, parts };
}

// Lanes for lines between branches, as in a graph of commits: the last branch that leaves another takes over its lane,
// the others lie to its right.
// Each row has its lane, that of its parent (null: none), and the lanes that pass by or go on below it.
function laneRows(branches) {
  const parents = [null, ...branches.map((branch) => (branch.kept === 0 ? null : branch.from + 1))];
  const left = parents.map((_, row) => parents.filter((parent) => parent === row).length);
  const lanes = [], owners = []; // of each row, and of each lane the row whose branches are still to come
  return parents.map((parent, row) => {
    if (parent !== null) left[parent] -= 1;
    const isLast = parent !== null && !left[parent];
    const isFree = (owner, which) => owner === null && (parent === null || which > lanes[parent]);
    let lane = isLast ? lanes[parent] : owners.findIndex(isFree);
    if (lane < 0) lane = owners.length;
    lanes.push(lane);
    owners[lane] = null;
    const passing = owners.flatMap((owner, which) => (owner === null ? [] : [which]));
    owners[lane] = left[row] ? row : null;
    return { lane, from: parent === null ? null : lanes[parent], passing, goesOn: left[row] > 0 };
  });
}

function gutter({ lane, from, passing, goesOn }, width, gap) {
  const draw = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const at = (which) => 7 + which * gap, dot = 14;
  const line = (which, y1, y2) => draw("line", { x1: at(which), x2: at(which), y1, y2 });
  const svg = draw("svg", { class: "lanes", width, "aria-hidden": "true" });
  svg.append(...passing.map((which) => line(which, 0, "100%")));
  const bend = `M${at(from)} 0 C${at(from)} ${dot} ${at(from)} ${dot} ${at(lane)} ${dot}`;
  if (from === lane) svg.append(line(lane, 0, dot));
  else if (from !== null) svg.append(draw("path", { d: bend }));
  if (goesOn) svg.append(line(lane, dot, "100%"));
  svg.append(draw("circle", { cx: at(lane), cy: dot, r: 4 }));
  return svg;
}

// Buttons that lead to the branches which leave a turn, by the token before which they stand.
function marksIn(turn, branches) {
  const marks = new Map();
  for (const { number, parent, kept } of branches) {
    if (parent !== turn) continue;
    const lead = (event) => {
      const target = event.target.closest("article").querySelector(`[data-branch="${number}"]`);
      target.open = true;
      target.scrollIntoView({ block: "start", behavior: "smooth" });
    };
    const title = `branch ${number} goes on from here`, attributes = { "aria-label": `to branch ${number}` };
    const look = { type: "button", className: "leaf", title, onclick: lead, attributes };
    const place = turn.start + kept;
    marks.set(place, [...(marks.get(place) ?? []), make("button", look, `↳ ${number}`)]);
  }
  return marks;
}

function shownTree(sample, branches, tokens, kind) {
  const chosen = paths.get(sample), show = (path) => { paths.set(sample, path); showSample(); };
  const choice = (path, words) => {
    const radio = { type: "radio", name: `path${sample}`, checked: path === chosen, onchange: () => show(path) };
    return make("label", {}, make("input", radio), make("span", {}, words));
  };
  const attributes = { role: "group", "aria-label": "paths" };
  const note = (words) => make("span", { className: "note" }, words);
  const choices = (...each) => make("span", { className: "choices" }, ...each);
  const chooser = make("div", { className: "colors paths", attributes },
    note("Show"), choices(choice(undefined, "all branches")),
    note("or the path to"), choices(...branches.map(({ number }) => choice(number, `${number}`))));
  if (chosen === undefined) return [chooser, ...allBranches(branches, tokens, kind)];
  return [chooser, ...onePath(branches, branches[chosen - 1], tokens, kind)];
}

function onePath(branches, branch, tokens, kind) {
  const { root, parts } = pathTo(branches, branch);
  const note = `What the policy read and wrote up to the end of branch ${branch.number}, ${origin(root)}:`;
  return [
    make("p", { className: "note" }, note),
    ...parts.flatMap(([turn, end]) => shownTurn(turn, tokens, kind, { end })),
  ];
}

function allBranches(branches, tokens, kind) {
  const rows = laneRows(branches), count = Math.max(...rows.map(({ lane }) => lane)) + 1;
  const gap = Math.min(18, 160 / count), width = Math.ceil(14 + (count - 1) * gap);
  const row = (lanes, content) => {
    content.style.marginLeft = `${width + 8}px`;
    return make("div", { className: "branch" }, gutter(lanes, width, gap), content);
  };
  return [
    row(rows[0], make("p", { className: "note" }, "prompt")),
    ...branches.map((branch, place) => {
      const { number, turns } = branch, sum = (value) => turns.reduce((total, turn) => total + value(turn), 0);
      const facts = [`${sum((turn) => turn.end - turn.start)} tokens`], reward = sum((turn) => turn.reward);
      if (reward) facts.push(`reward ${signed(reward)}`);
      const open = branches.length <= MANY || place === branches.length - 1;
      const details = make("details", { open, attributes: { "data-branch": `${number}` } },
        make("summary", {}, make("span", { className: "name" }, `Branch ${number}`), " ",
          make("span", { className: "facts" }, [origin(branch), ...facts].join(" · "))),
        ...turns.flatMap((turn) => shownTurn(turn, tokens, kind, { marks: marksIn(turn, branches) })));
      return row(rows[place + 1], details);
    }),
  ];
}
