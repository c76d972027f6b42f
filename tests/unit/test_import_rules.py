"""Which part of the package may import what, read from the source so that lazy imports count too."""

import ast
import functools
import graphlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.helpers.syntax import nodes_of
from tools.rooms import RoomFigures, measure

ROOT = Path(__file__).parents[2]
# Packages of the same distribution that stand alone, and what each imports besides the standard library: the modules of
# programs, and the arrays of those that bring numpy.
ALONE = {
    "megarl_answers": ("latex2sympy2_extended", "math_verify", "sympy"),
    "megarl_sandbox": ("<computed>", "numpy"),
}
# What is built on them; its commands are found by entry points.
LAB = "megarl_lab"
PACKAGES = ("megarl", *ALONE, LAB)
ALGOS_MAY_IMPORT = (
    "torch",
    "numpy",
    "megarl.algos",
    "megarl.config",
    "megarl.errors",
    "megarl.registry",
    "megarl.types",
)
# Only here is the device asked for; the shim is what lets Megatron's CUDA calls run on the CPU platform.
DEVICE_FILES = ("host/device/*.py", "parallel/cpu_shim.py")
# Rooms, and modules outside of one, from the top: what stands here may import its own floor and those below.
FLOORS = (
    ("__main__", "cli"),
    ("migrate", "forecast"),
    ("run", "convert"),
    ("train", "plan"),
    ("report", "launch", "cluster"),
    ("rewards", "record", "rollout", "parallel"),
    ("environments",),
    ("data", "sync", "bisect"),
    ("algos", "weights", "vision"),
    ("types",),
    ("config", "doctor"),
    ("registry", "host"),
    ("errors",),
)
FLOOR_OF = {room: height for height, floor in enumerate(FLOORS) for room in floor}
# What is about other trainers' names, or predictions; only the command line knows these rooms.
SHELL = ("migrate", "forecast")
# The function that prints lines, and what prints texts of its own that are whole: the shell's completion, run files,
# job scripts, and pages with colours.
PRINTS = (
    "host/streams.py",
    "cli.py",
    "migrate/convert_config.py",
    "launch/submit.py",
    "run/evaluation/inspect_hints.py",
)
# Time limits are of the clock of host/clock.py. Here it is shown how long something took, a process ends on its own, or
# there is the standard library only.
OTHER_CLOCKS = (
    "host/activity.py",
    "host/clock.py",
    "sandbox/jail/*.py",
    "migrate/recorder.py",
    "host/janitor.py",
    "host/signals.py",
    "host/directory_lock.py",
    "convert/*.py",
    "record/*.py",
    "rollout/stepping.py",
    "run/*",
    "record/checkpoints.py",
    "sync/transport/flags.py",
)
# Of each room, those that it must do without on any floor.
APART = {
    "cluster": ("doctor",),
    "config": ("parallel",),
    "convert": ("train",),
    "rewards": ("train",),
    "record": ("parallel", "rewards"),
    "data": ("rewards", "algos"),
    "sync": ("cluster",),
}
# The most lines of each room of megarl/, of each other package and of all together; further figures of tools/rooms.py.
# They only go down: a room that needs more takes them from what it has, or its commit says why the limit rises.
MOST_LINES = {
    "__init__": 50,
    "__main__": 50,
    # Ten off-policy methods with their statistics of whole batches, score centering and DPPO over recorded
    # heads, for which config, rollout, train and types rose by 165 lines, and parallel by 70. 100 for what the policy
    # learns of its environments' replies, and ln Z of groups.
    "algos": 7910,
    # What `megarl bisect` compares, computes and names, 130 for gradients that are compared, 190 for experts.
    "bisect": 1340,
    # 12 for names of commands in other trainers.
    "cli": 340,
    # 50 for clusters that are joined and end, 90 for environments on nodes of their own, 15 for streams
    # that go on in another call, 20 for conversations that end with their run.
    "cluster": 4260,
    # 40 for names of models, which were of weights, and 25 for given settings, of forecast.
    # 195 for targets of plans and the table of what works on them, 13 for `recompute: auto`, 34 for
    # devices of targets. 90 for images, towers that train, and what overlaps by default.
    "config": 6500,
    "convert": 2130,
    # 400 for images: the forms of their column, marks in prompts, ids by the model's processor; 75 for those of pairs
    # and demonstrations; 170 for turns in channels, as gpt-oss has them.
    "data": 4310,
    # 58 for networks, locked memory and caches of nodes.
    "doctor": 810,
    # 560 came with the dialects of agents (messages and responses beside chat completions) and parsers of calls,
    # 240 with programs such as Claude Code in workspaces of their own, 45 for sessions of tools that are late, 250 for
    # images in replies and requests, stop texts and histories that are read once, 380 for environments of
    # packages, 470 for sandboxes, 70 for requests of which only what is new is read. 20 for clients'
    # variables, with 10 of host, and 10 for containers of dead processes, as many of host.
    "environments": 4890,
    "errors": 80,
    # Stages of several chunks in the search.
    "forecast": 1000,
    # 50 for ranges of profiles, proxies and closed streams; 100 for the activity of a process, which was the record's.
    "host": 4100,
    # 60 for metrics that a watched run goes on from, 60 for jobs with a component of nodes for environments.
    "launch": 1450,
    "migrate": 1830,
    # The log-prob head also answers sums of squared probabilities, and what is measured beside the whole
    # distribution of the policy at the start of a step. 259 for vision towers: their features in packs, positions with
    # three axes. 110 for how far a step moves each layer. 285 for images that attend within themselves, small ones
    # that are read together, and weights of earlier versions. 30 for what a graph lets go after backward.
    "parallel": 9440,
    # The choice of what backward recomputes, of which the share of a pass came from forecast.
    "plan": 2200,
    # 350 for what grows in processes, and for metrics that Prometheus fetches; 220 for metrics by columns,
    # timelines that rotate and spans of samples, 40 for scores of several measures, 6 for TensorBoard of long runs.
    "record": 3430,
    "registry": 240,
    # With learning curves: the fit, its words, picture and command.
    # 560 for what explains a step, and for runs of 100,000 steps.
    "report": 3040,
    # 120 for truths that look like numbers, indices of choices, and what functions written for TRL log.
    "rewards": 5670,
    # 185 for images in requests, and for what environments replied.
    # 320 for requests of agents at once, the canary and hooks on engines.
    "rollout": 3610,
    # Starts look at their machine, and resumes at their settings, before libraries load.
    # 350 for megarl bisect, explain-step and addresses that are tried before models load; 200 for compare-gradients.
    "run": 3020,
    "sync": 3030,
    # 270 for the canary after syncs, 15 for the end of runs that have collapsed.
    "train": 5050,
    # 124 for images of rows, 126 for towers by their files' headers.
    "types": 2470,
    # 12 for transparent images, deep ones, and processors that bring code.
    "vision": 280,
    "weights": 4330,
    "megarl_answers": 2960,
    # 280 for the soak of runs.
    # 600 for the soak of long runs, squares to count, and the speed of an update.
    "megarl_lab": 6290,
    "megarl_sandbox": 3230,
}
MOST_LINES_TOGETHER = 99_160
MOST_ARROWS = 155
MOST_ANY_PER_1000 = 4.2
MOST_TAKERS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A module of a package; `path` is relative to the package, `num_lines` that of its file."""

    path: Path
    text: str
    num_lines: int = 0
    root: str = "megarl"

    @property
    def package(self) -> tuple[str, ...]:
        return (self.root, *self.path.parent.parts)

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        return nodes_of(self.text)


@functools.cache
def read_sources(root: str = "megarl") -> list[Source]:
    texts = {path.relative_to(ROOT / root): path.read_text("utf-8") for path in sorted((ROOT / root).rglob("*.py"))}
    return [Source(path=path, text=text, num_lines=len(text.splitlines()), root=root) for path, text in texts.items()]


@functools.cache
def imported_names(source: Source) -> tuple[str, ...]:
    """Absolute dotted names of everything imported anywhere in the module, also inside functions."""
    return tuple(_imported_names(source))


def _imported_names(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = source.package[: len(source.package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called_name(node) in ("import_module", "__import__"):
            argument = node.args[0] if node.args else None
            literal = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            yield ast.literal_eval(argument) if argument is not None and literal else "<computed>"


def called_name(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def algos_are_pure(source: Source) -> list[str]:
    if source.path.parts[0] != "algos":
        return []
    return [
        name
        for name in imported_names(source)
        if not _is_within(name, ALGOS_MAY_IMPORT) and name.split(".")[0] not in sys.stdlib_module_names
    ]


def megatron_only_in_parallel(source: Source) -> list[str]:
    return [n for n in imported_names(source) if _is_within(n, ("megatron",)) and source.path.parts[0] != "parallel"]


def vllm_only_in_rollout(source: Source) -> list[str]:
    return [n for n in imported_names(source) if _is_within(n, ("vllm",)) and source.path.parts[0] != "rollout"]


def device_only_in_platform(source: Source) -> list[str]:
    if any(fnmatch(source.path.as_posix(), pattern) for pattern in DEVICE_FILES):
        return []
    attributes = (node.attr for node in source.nodes if isinstance(node, ast.Attribute))
    asked = [f".{name}" for name in attributes if name in ("cuda", "is_available", "accelerator")]
    return asked + [n for n in imported_names(source) if _is_within(n, ("torch.cuda", "torch.accelerator"))]


def rooms_apart(source: Source) -> list[str]:
    forbidden = tuple(f"megarl.{room}" for room in APART.get(source.path.parts[0], ()))
    return [name for name in imported_names(source) if _is_within(name, forbidden)]


def limits_have_one_clock(source: Source) -> list[str]:
    if any(fnmatch(source.path.as_posix(), pattern) for pattern in OTHER_CLOCKS):
        return []
    return [
        f"time.{node.attr}"
        for node in source.nodes
        if isinstance(node, ast.Attribute) and node.attr in ("monotonic", "monotonic_ns")
    ]


def waits_for_ray_have_limits_of_one_module(source: Source) -> list[str]:
    """Its limits leave out the time for which the process is stopped."""
    calls = [n for n in source.nodes if isinstance(n, ast.Call) and called_name(n) in ("get", "wait")]
    waits = [ast.unparse(n) for n in calls if ast.unparse(n.func) in ("ray.get", "ray.wait")]
    limited = [each for each in waits if "timeout=" in each and "timeout=0)" not in each]
    return [] if source.path.as_posix() == "cluster/remotes.py" else limited


def modules_start_safely(source: Source) -> list[str]:
    """`python_module` alone starts `python -m`, so that no file of the current directory is taken for a module."""
    words = [n for n in source.nodes if isinstance(n, ast.Constant) and n.value == "-m"]
    return ["-m" for _ in words if source.path.as_posix() != "host/child_environment.py"]


def nothing_imports_upward(source: Source) -> list[str]:
    own = FLOOR_OF.get(source.path.parts[0].removesuffix(".py"))
    if own is None:
        return [] if source.path.name == "__init__.py" else [f"no floor for {source.path.parts[0]}"]
    names = [name.split(".") for name in imported_names(source)]
    # What is not on a floor belongs to the package itself, as its version.
    return [".".join(n) for n in names if n[0] == "megarl" and len(n) > 1 and FLOOR_OF.get(n[1], own) < own]


def core_knows_no_shell(source: Source) -> list[str]:
    if source.path.parts[0] in (*SHELL, "cli.py"):
        return []
    return [name for name in imported_names(source) if _is_within(name, tuple(f"megarl.{room}" for room in SHELL))]


def nothing_imports_the_lab(source: Source) -> list[str]:
    return [name for name in imported_names(source) if source.root != LAB and _is_within(name, (LAB,))]


def prints_texts_by_one_function(source: Source) -> list[str]:
    """`print_lines` keeps texts in their lines; `PRINTS` has what is made to be printed whole."""
    if source.path.as_posix() in PRINTS:
        return []
    calls = [node for node in source.nodes if isinstance(node, ast.Call)]
    printed = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
    named = [called_name(a) if isinstance(a, ast.Call) else "" for node in printed for a in node.args]
    return ["print"] if any(not name.endswith(("dumps", "to_json")) for name in named) else []


RULES: list[Callable[[Source], list[str]]] = [
    algos_are_pure,
    megatron_only_in_parallel,
    vllm_only_in_rollout,
    device_only_in_platform,
    rooms_apart,
    nothing_imports_upward,
    core_knows_no_shell,
    nothing_imports_the_lab,
    limits_have_one_clock,
    waits_for_ray_have_limits_of_one_module,
    modules_start_safely,
    prints_texts_by_one_function,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_follows_the_rule(rule: Callable[[Source], list[str]]) -> None:
    sources = read_sources()
    # The walk finds the code that the rules are about.
    assert {"algos", "parallel", "rollout"} <= {source.path.parts[0] for source in sources}
    violations = {str(source.path): found for source in sources if (found := rule(source))}
    assert violations == {}


@pytest.mark.parametrize(
    ("rule", "path", "code", "found"),
    [
        (algos_are_pure, "algos/x.py", "import ray", ["ray"]),
        (
            algos_are_pure,
            "algos/x.py",
            "def f():\n    from megarl.parallel import layout",
            ["megarl.parallel.layout"],
        ),
        (algos_are_pure, "algos/x.py", "from ..rewards import math", ["megarl.rewards.math"]),
        (algos_are_pure, "algos/x.py", "from megarl.train import loop", ["megarl.train.loop"]),
        (algos_are_pure, "algos/x.py", "import importlib as i\ni.import_module(name)", ["<computed>"]),
        (algos_are_pure, "algos/x.py", "from . import kl\nfrom ..types import Row\nimport math, torch", []),
        (algos_are_pure, "algos/x.py", "from megarl import types\nfrom megarl.config import Config", []),
        (algos_are_pure, "data/x.py", "import ray", []),
        (megatron_only_in_parallel, "trainer.py", "from megatron.core import mpu", ["megatron.core.mpu"]),
        (megatron_only_in_parallel, "rollout/x.py", "__import__('megatron')", ["megatron"]),
        (megatron_only_in_parallel, "parallel/moe/x.py", "import megatron.core", []),
        (megatron_only_in_parallel, "host/device/x.py", "def f():\n    import megatron.core", ["megatron.core"]),
        (vllm_only_in_rollout, "parallel/x.py", "def f():\n    import vllm.config", ["vllm.config"]),
        (
            vllm_only_in_rollout,
            "cli.py",
            "from importlib import util, import_module\nimport_module('vllm')",
            ["vllm"],
        ),
        (vllm_only_in_rollout, "rollout/x.py", "import vllm", []),
        (device_only_in_platform, "parallel/x.py", "import torch\ntorch.cuda.synchronize()", [".cuda"]),
        (device_only_in_platform, "trainer.py", "from torch.cuda import Event", ["torch.cuda.Event"]),
        (device_only_in_platform, "trainer.py", "from torch import cuda", ["torch.cuda"]),
        (device_only_in_platform, "algos/x.py", "x.cuda()", [".cuda"]),
        (device_only_in_platform, "host/device/x.py", "torch.cuda.is_available()", []),
        (device_only_in_platform, "parallel/layout.py", "device = platform.device()", []),
        (
            rooms_apart,
            "config/x.py",
            "def f():\n    from megarl.parallel import layout",
            ["megarl.parallel.layout"],
        ),
        (rooms_apart, "config/x.py", "from megarl.host.device.platform import platform", []),
        (rooms_apart, "rewards/code/x.py", "from megarl.train.loop import run", ["megarl.train.loop.run"]),
        (rooms_apart, "rewards/x.py", "from megarl.data import chat", []),
        (rooms_apart, "data/hints/x.py", "from ...rewards.score import score", ["megarl.rewards.score.score"]),
        (rooms_apart, "data/x.py", "from megarl.config.schema import Config", []),
        (rooms_apart, "sync/x.py", "import megarl.cluster.actors", ["megarl.cluster.actors"]),
        (rooms_apart, "sync/x.py", "import megarl.weights.boxes", []),
        (
            nothing_imports_upward,
            "host/device/platform.py",
            "import megarl.parallel.modules",
            ["megarl.parallel.modules"],
        ),
        (nothing_imports_upward, "errors.py", "from megarl import registry", ["megarl.registry"]),
        (nothing_imports_upward, "doctor/x.py", "def f():\n    from ..cli import main", ["megarl.cli.main"]),
        (nothing_imports_upward, "parallel/x.py", "import megarl.rollout.engine, torch\nfrom megarl import types", []),
        (nothing_imports_upward, "doctor/x.py", "import megarl\nfrom megarl import __version__", []),
        (core_knows_no_shell, "run/x.py", "def f():\n    from megarl import forecast", ["megarl.forecast"]),
        (core_knows_no_shell, "config/x.py", "import megarl.migrate.aliases", ["megarl.migrate.aliases"]),
        (core_knows_no_shell, "forecast/x.py", "import megarl.forecast.costs, megarl.plan", []),
        (nothing_imports_the_lab, "cli.py", "def f():\n    import megarl_lab.recipes", ["megarl_lab.recipes"]),
        (nothing_imports_the_lab, "cli.py", "import megarl.host", []),
        (limits_have_one_clock, "cluster/x.py", "import time\nend = time.monotonic() + 1", ["time.monotonic"]),
        (
            waits_for_ray_have_limits_of_one_module,
            "cluster/x.py",
            "ray.get(a)\nray.wait(b, timeout=0)\nray.get(c, timeout=9)",
            ["ray.get(c, timeout=9)"],
        ),
        (modules_start_safely, "cluster/x.py", "command = [sys.executable, '-m', 'megarl.cli']", ["-m"]),
        (nothing_imports_upward, "attic/x.py", "import math", ["no floor for attic"]),
    ],
)
def test_rule_on_a_snippet(rule: Callable[[Source], list[str]], path: str, code: str, found: list[str]) -> None:
    assert rule(Source(path=Path(path), text=code)) == found


@pytest.fixture(scope="module")
def figures() -> RoomFigures:
    return measure()


def test_rooms_stay_small(figures: RoomFigures) -> None:
    grown = {room: number for room, number in figures.lines.items() if number > MOST_LINES.get(room, 0)}
    assert grown == {}, "these rooms have more lines than MOST_LINES; delete as many, or say why the limit rises"
    assert figures.lines.keys() == MOST_LINES.keys()
    assert sum(figures.lines.values()) <= MOST_LINES_TOGETHER


def test_rooms_stay_apart(figures: RoomFigures) -> None:
    assert len(figures.arrows) <= MOST_ARROWS
    assert figures.circle == ()
    assert figures.any_per_1000 <= MOST_ANY_PER_1000
    assert len(figures.takers) <= MOST_TAKERS


def test_figures_of_a_small_tree(tmp_path: Path) -> None:
    """Counted by hand: imports in functions count, and those that begin with dots; config/ may take the whole."""
    modules = {
        "megarl/config/schema.py": "class Config: ...\ndef f(config: Config) -> None: ...\n",
        "megarl/run/start.py": "from ..config import schema\nfrom typing import Any\ndef f(config: 'Config') -> Any:\n"
        "    import megarl.plan.build\n",
        "megarl/plan/build.py": "import megarl.run.start\nx: Any = 1\n",
        "megarl_lab/bench.py": "from megarl.plan import build\n",
    }
    for name, text in modules.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    figures = measure(tmp_path)
    assert figures.lines == {"config": 2, "run": 4, "plan": 2, "megarl_lab": 1}
    assert figures.arrows == {("run", "config"), ("run", "plan"), ("plan", "run")}
    assert set(figures.circle) == {"run", "plan"}
    assert figures.any_per_1000 == 1000 * 2 / 8
    assert figures.takers == ("megarl/run/start.py",)


@pytest.mark.parametrize("package", ALONE)
def test_a_package_stands_alone(package: str) -> None:
    allowed = {package, *sys.stdlib_module_names, *ALONE[package]}
    found = {name.split(".")[0] for source in read_sources(package) for name in imported_names(source)}
    assert package in found
    assert found <= allowed


def circles(imports: Mapping[str, Collection[str]]) -> list[str]:
    """The first circle of modules that import one another, if there is one."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_one_another() -> None:
    """Not for their types, and not inside functions either."""
    modules = {
        ".".join((*source.package, source.path.stem)).removesuffix(".__init__"): source
        for package in PACKAGES
        for source in read_sources(package)
    }
    imports = {
        module: {
            found
            for name in imported_names(source)
            for found in (name, name.rpartition(".")[0])
            # A package's own face imports what is in it.
            if found in modules and found != module and modules[found].path.name != "__init__.py"
        }
        for module, source in modules.items()
    }
    assert sum(map(len, imports.values())) > 1000
    assert circles(imports) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": []}) == []
    assert set(circles({"a": ["b"], "b": ["c"], "c": ["a"]})) == {"a", "b", "c"}


def test_files_and_functions_stay_short() -> None:
    """And few: what is used once and short stands in its caller."""
    sources = [source for package in PACKAGES for source in read_sources(package)]
    functions = [
        (source.path, node)
        for source in sources
        for node in source.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = {Path(source.root, source.path): source.num_lines for source in sources}
    assert [path for path, length in lengths.items() if length > 350] == []
    assert [(path, node.name) for path, node in functions if (node.end_lineno or 0) - node.lineno + 1 > 60] == []
    assert 1000 * len(functions) / sum(lengths.values()) <= 55
