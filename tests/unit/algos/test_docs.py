"""docs/algorithms.md and docs/algorithms/*.md against the code they describe."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import megarl.algos
from megarl.algos.advantages import ADVANTAGE_ESTIMATORS
from megarl.algos.aggregation import AGGREGATIONS
from megarl.algos.corrections import CORRECTIONS
from megarl.algos.cpo.difficulty import DIFFICULTIES
from megarl.algos.cpo.formulas import NEG_SCOPES
from megarl.algos.cpo.information import MI_ESTIMATORS
from megarl.algos.cpo.methods import CPO_METHODS
from megarl.algos.entropy import ENTROPY_CONTROLLERS
from megarl.algos.filters import GROUP_FILTERS
from megarl.algos.kl import KL_CONTROLLERS, KL_ESTIMATORS
from megarl.algos.policy_losses import POLICY_LOSSES
from megarl.algos.preference import PREFERENCE_LOSSES
from megarl.algos.prefixes import PREFIX_STRATEGIES
from megarl.algos.reshape import DEMONSTRATION_RESHAPES, RATIO_RESHAPES
from megarl.algos.shaping import ADVANTAGE_SHAPERS
from megarl.config.explain import metric_sections
from megarl.config.schema import Config
from megarl.registry import FunctionRegistry

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs" / "algo"
INDEX = ROOT / "docs" / "algorithms.md"
DETAILS = [*sorted((ROOT / "docs" / "algorithms").glob("*.md")), ROOT / "docs" / "sft.md"]
PAGES = [INDEX, *DETAILS]

REGISTRIES: list[tuple[str, FunctionRegistry[Any, Any]]] = [
    ("algo.advantage.estimator", ADVANTAGE_ESTIMATORS),
    ("algo.policy_loss.name", POLICY_LOSSES),
    ("algo.filter.names", GROUP_FILTERS),
    ("algo.shapers", ADVANTAGE_SHAPERS),
    ("algo.correction.name", CORRECTIONS),
    ("algo.kl.estimator", KL_ESTIMATORS),
    ("algo.kl.controller", KL_CONTROLLERS),
    ("algo.aggregation", AGGREGATIONS),
    ("algo.entropy.controller", ENTROPY_CONTROLLERS),
    ("algo.cpo.method", CPO_METHODS),
    ("algo.cpo.mi_estimator", MI_ESTIMATORS),
    ("algo.cpo.difficulty", DIFFICULTIES),
    ("algo.cpo.neg_scope", NEG_SCOPES),
    ("algo.demonstrations.strategy", PREFIX_STRATEGIES),
    ("train_preference.objective", PREFERENCE_LOSSES),
    # One table has both columns.
    ("algo.off_policy.reshape", DEMONSTRATION_RESHAPES),
    ("algo.off_policy.reshape", RATIO_RESHAPES),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells of a table; `setting` is the text of its first header cell."""

    header: list[str]
    rows: list[list[str]]

    @property
    def setting(self) -> str:
        return self.header[0].strip("`")

    def column(self, name: str) -> list[str]:
        place = self.header.index(name)
        return [row[place] for row in self.rows]


def tables(page: Path) -> Iterator[Table]:
    for block in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        header, _, *rows = ([c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines())
        yield Table(header=header, rows=rows)


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def detail_tables(setting: str) -> list[Table]:
    return [table for page in DETAILS for table in tables(page) if table.setting == setting]


def names_of(registry: FunctionRegistry[Any, Any]) -> list[str]:
    """All names, but for those with a suffix that changes nothing."""
    suffix = "_qwen3"
    plain = [name for name in registry if not name.endswith(suffix)]
    return [n for n in registry if n in plain or registry.get(n) is not registry.get(n.removesuffix(suffix))]


def words() -> list[str]:
    """All that is quoted on the pages, outside code blocks."""
    texts = (re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S) for page in PAGES)
    return [word for text in texts for word in quoted(text)]


# --- registries


def test_all_registries_are_compared() -> None:
    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(megarl.algos.__path__, "megarl.algos.")]
    found = {id(value) for module in modules for value in vars(module).values() if isinstance(value, FunctionRegistry)}
    assert found == {id(registry) for _, registry in REGISTRIES}


every_registry = pytest.mark.parametrize(("setting", "registry"), REGISTRIES)


@every_registry
def test_every_name_has_its_row(setting: str, registry: FunctionRegistry[Any, Any]) -> None:
    documented = [name for table in detail_tables(setting) for row in table.rows for name in quoted(row[0])]
    assert sorted(documented) == names_of(registry)


def test_every_formula_of_a_cpo_method_has_its_cell() -> None:
    """An empty cell of `fix` is a formula of the other columns."""
    (table,) = detail_tables("algo.cpo.method")
    for name, *cells in table.rows:
        formulas = dict(CPO_METHODS.get(name.strip("`")).formulas)
        if formulas["fix"] in [formula for key, formula in formulas.items() if key != "fix"]:
            del formulas["fix"]
        columns = [column.strip("`") for column in table.header[1:]]
        assert {column for column, cell in zip(columns, cells, strict=True) if cell} == formulas.keys(), name


# --- files


def test_every_file_of_configs_says_when_to_use_it() -> None:
    section = INDEX.read_text(encoding="utf-8").split("\n## Which should I use\n")[1].split("\n## ")[0]
    items = re.findall(r"^- (`[^:]+`): \S", section, re.MULTILINE)
    assert sorted(name for item in items for name in quoted(item)) == sorted(
        path.stem for path in CONFIGS.glob("*.yaml")
    )


def test_every_test_and_module_named_exists() -> None:
    named = {word for word in words() if re.fullmatch(r"[\w/]+\.py", word)}
    places = {
        name: ROOT / name
        if name.startswith("tests/")
        else ROOT / "tests" / "unit" / "algos" / name
        if Path(name).name.startswith("test_")
        else ROOT / "megarl" / name
        for name in named
    }
    assert [name for name, path in sorted(places.items()) if not path.is_file()] == []


def test_every_setting_named_exists() -> None:
    named = {m[0] for word in words() if (m := re.match(r"algo(\.\w+)+", word))}
    assert len(named) > 40
    assert [name for name in sorted(named) if not _is_field(name)] == []


def _is_field(name: str) -> bool:
    node: Any = Config()
    for part in name.split("."):
        if not is_dataclass(node) or part not in {field.name for field in fields(node)}:
            return False
        node = getattr(node, part)
    return True


# --- metrics

METRIC = re.compile(r"[a-z_]+/[a-z0-9_]+(?:/[a-z0-9_]+)?")
# Besides algos/, whose metrics are all listed.
LOGGED_IN = (
    "record/recorder.py",
    "cluster/supervisor.py",
    "train/collect.py",
    "data/hints.py",
    "parallel/moe/routing.py",
    "cluster/bridge.py",
    "train/loop.py",
    "train/validate.py",
    "data/packing.py",
    "train/supervised.py",
    "record/performance.py",
    "record/timeline.py",
    "record/growth.py",
    "train/canary.py",
    "parallel/movement.py",
)


def metric_patterns() -> Mapping[str, re.Pattern[str]]:
    """The metrics that the code names, as patterns: a name may go on (`summary`) or have parts that vary."""
    package = ROOT / "megarl"
    spaces = {name.split("/")[0] for name in documented_metrics()}
    patterns: dict[str, re.Pattern[str]] = {}
    for path in [*(package / "algos").rglob("*.py"), *(package / name for name in LOGGED_IN)]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and METRIC.fullmatch(node.value):
                if path.is_relative_to(package / "algos") or node.value.split("/")[0] in spaces:
                    patterns[node.value] = re.compile(re.escape(node.value) + r"(/\w+)?")
            elif isinstance(node, ast.JoinedStr) and _begins_like_a_metric(node, spaces):
                parts = (re.escape(str(p.value)) if isinstance(p, ast.Constant) else r"\w+" for p in node.values)
                patterns[ast.unparse(node)] = re.compile("".join(parts))
    return patterns


def _begins_like_a_metric(node: ast.JoinedStr, spaces: set[str]) -> bool:
    first, *others = node.values
    if isinstance(first, ast.FormattedValue) and others and isinstance(others[0], ast.Constant):
        # Of each role.
        return re.match(r"/[a-z_]+/", str(others[0].value)) is not None
    return isinstance(first, ast.Constant) and str(first.value).partition("/")[0] in spaces and "/" in str(first.value)


def documented_metrics() -> set[str]:
    cells = [names for _, section in metric_sections() for names in section["metrics"]]
    return {name for cell in cells for word in re.split(r", (?![^{]*\})", cell) for name in expanded(word)}


def expanded(word: str) -> list[str]:
    """`a/{b,c}/{d,e}` as four names."""
    braces = re.search(r"\{([^}]+)\}", word)
    if braces is None:
        return [word]
    return [n for part in braces[1].split(",") for n in expanded(word[: braces.start()] + part + word[braces.end() :])]


def test_every_metric_is_documented() -> None:
    names, patterns = documented_metrics(), metric_patterns()
    assert len(patterns) > 60
    assert [p for p, pattern in sorted(patterns.items()) if not any(map(pattern.fullmatch, names))] == []


def test_every_documented_metric_is_in_the_code() -> None:
    patterns = metric_patterns().values()
    assert [n for n in sorted(documented_metrics()) if not any(pattern.fullmatch(n) for pattern in patterns)] == []
