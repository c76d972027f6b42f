"""Draws small faults in megarl's numerical rooms by a seed, and counts how many of them the rooms' tests find.

    python tools/mutants.py draw >tools/mutants.json
    python tools/mutants.py run COPY table.json [EARLIER_TABLE.json]

`run` changes the modules of COPY, a checkout that nothing else uses, one fault at a time; what failed in the earlier
table runs first. mutmut and cosmic-ray, which nothing here installs, work through every mutant of a package.
"""

import ast
import copy
import dataclasses
import importlib
import json
import os
import random
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

# Room → the folders of its tests; of the tests over several ranks, those that import the changed module.
TESTS = {
    "megarl/algos": ("tests/unit/algos",),
    "megarl/parallel/head": ("tests/unit/parallel",),
    "megarl/sync/plan": ("tests/unit/sync",),
    "megarl/data": ("tests/unit/data",),
    "megarl/train": ("tests/unit/train",),
}
RANKS = "tests/distributed"
SEED, COUNT = 60, 60
# A mutant that does not end by then counts as found.
LIMIT_S = 1800.0
LIST = Path(__file__).with_suffix(".json")
# Imported before a process forks for each mutant; none of them imports megarl.
PRELOADED = ("torch", "transformers", "hypothesis.strategies", "hypothesis.extra.numpy", "pyarrow.parquet")
PAIRS = ["Lt LtE", "Gt GtE", "Eq NotEq", "Is IsNot", "In NotIn", "Add Sub", "Mult Div", "And Or"]
FLIPS = {getattr(ast, a): getattr(ast, b) for p in PAIRS for a, b in (p.split(), p.split()[::-1])}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault. Its place is told by what stands there, so that it is found again after other lines have moved."""

    file: str
    scope: str
    kind: str
    before: str
    after: str
    occurrence: int


def mutated(node: ast.AST) -> tuple[str, ast.AST] | None:
    """(kind, replacement) of a node that can be changed."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]):
            new.ops = [FLIPS[type(op)]()]
            return "comparison", new
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()) if not isinstance(new.left, ast.Constant):
            new.op = FLIPS[type(new.op)]()
            return "arithmetic", new
        case ast.BoolOp():
            new.op = FLIPS[type(new.op)]()
            return "boolean", new
        case ast.UnaryOp(op=ast.Not()):
            return "boolean", new.operand
        case ast.IfExp():
            new.test = ast.UnaryOp(op=ast.Not(), operand=new.test)
            return "boolean", new
        case ast.Constant(value=bool() | int() | float() as value):
            return "constant", ast.Constant(value=not value if isinstance(value, bool) else value + 1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            return "dropped statement", ast.Pass()
        case ast.Call(args=[first, second, *rest]) if not any(isinstance(a, ast.Starred) for a in new.args):
            new.args = [second, first, *rest]
            return "swapped arguments", new
    return None


def walk(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.AST]]:
    """Every node whose change may change what the code does, with the function around it."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            # The words of an error are not counted as behaviour.
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                inner = f"{scope}.{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else scope
                yield inner, child
                yield from () if isinstance(child, ast.Raise) else walk(child, inner)


def places(tree: Path, file: str) -> Iterator[tuple[Mutant, tuple[int, int]]]:
    """The mutants of a file, each with the bytes it replaces."""
    source = (tree / file).read_bytes() if (tree / file).exists() else b""
    starts = [0, *(m.end() for m in re.finditer(rb"\n", source))]
    seen: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    for scope, node in walk(ast.parse(source), ""):
        change = mutated(node)
        if change is None or not isinstance(node, ast.expr | ast.stmt):
            continue
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        span = starts[node.lineno - 1] + node.col_offset, end
        kind, new = change
        before, after = source[slice(*span)].decode(), ast.unparse(ast.fix_missing_locations(new))
        after = after if isinstance(node, ast.stmt) else f"({after})"
        key = scope.lstrip("."), kind, before
        yield Mutant(file=file, scope=key[0], kind=kind, before=before, after=after, occurrence=seen[key]), span
        seen[key] += 1


def draw(tree: Path) -> list[Mutant]:
    """As many of each room, the kinds evenly."""
    rng, drawn = random.Random(SEED), []
    for room in TESTS:
        kinds: defaultdict[str, list[Mutant]] = defaultdict(list)
        for path in sorted((tree / room).rglob("*.py")):
            for mutant, _ in places(tree, str(path.relative_to(tree))):
                kinds[mutant.kind].append(mutant)
        for index in range(COUNT // len(TESTS)):
            choices = kinds[sorted(kinds)[index % len(kinds)]]
            drawn.append(choices.pop(rng.randrange(len(choices))))
    return drawn


def test_files(tree: Path, file: str, first: str | None) -> list[str]:
    """The mapped tests: `first`, the files that import the module, the rest of the folder."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, name = module.rpartition(".")
    imports = re.compile(rf"(?:from|import) {re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b")
    (folders,) = (folders for room, folders in TESTS.items() if file.startswith(f"{room}/"))
    order = []
    for path in (path for folder in (*folders, RANKS) for path in (tree / folder).rglob("test_*.py")):
        name, found = str(path.relative_to(tree)), imports.search(path.read_text(encoding="utf-8"))
        if found or RANKS not in name:
            order.append((name != first, not found, RANKS in name, name))
    return [name for *_, name in sorted(order)]


def run_tests(tree: Path, files: list[str], log: Path) -> tuple[str, str | None]:
    """(killed, survived or limit; the test that failed) of the tree as it stands."""
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(tree)
        with log.open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        sys.path[:0] = [str(tree)]
        code = pytest.main(["-x", "-q", "-m", "not long and not gpu", "-p", "no:cacheprovider", "--no-header", *files])
        sys.stdout.flush()
        os._exit(int(code))
    end = time.perf_counter() + LIMIT_S
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0 and time.perf_counter() < end:
        time.sleep(0.5)
    if status[0] == 0:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "limit", None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", log.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return ("survived" if status[1] == 0 else "killed"), failed and failed[1]


def run(tree: Path, out: Path, killers: dict[str, str]) -> None:
    """Continue the table in `out`: an interrupted run goes on where it ended."""
    os.environ["PYTHONPATH"] = str(tree)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in PRELOADED:
        importlib.import_module(name)
    table = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    for index, fields in enumerate(json.loads(LIST.read_text(encoding="utf-8"))):
        mutant, key = Mutant(**fields), str(index)
        if key in table:
            continue
        path, result, by = tree / mutant.file, "gone", None
        for start, end in [span for other, span in places(tree, mutant.file) if other == mutant]:
            source, files = path.read_bytes(), test_files(tree, mutant.file, killers.get(key))
            try:
                path.write_bytes(source[:start] + mutant.after.encode() + source[end:])
                result, by = run_tests(tree, files, out.with_suffix(f".{key}.log"))
            finally:
                path.write_bytes(source)
        table[key] = {"file": mutant.file, "result": result, "by": by}
        out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        print(key, table[key], flush=True)


def main() -> None:
    match sys.argv[1:]:
        case ["draw"]:
            print(json.dumps([dataclasses.asdict(m) for m in draw(Path.cwd())], indent=1))
        case ["run", tree, out, *earlier]:
            rows = [row for name in earlier for row in json.loads(Path(name).read_text(encoding="utf-8")).items()]
            killers = {key: row["by"].split("::")[0] for key, row in rows if row.get("by")}
            run(Path(tree).resolve(), Path(out).resolve(), killers)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
