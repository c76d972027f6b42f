"""Tell what works on CPUs and on CUDA, with Transformer Engine and without: what checks refuse, and what has been run.

`support.yaml` lists features by their settings, of which the checks of `megarl train` are asked for each target.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from megarl.config.check import check_train
from megarl.config.load import from_dict, with_overrides
from megarl.config.schema import Config
from megarl.config.target import Target, checked_for, pinned_packages
from megarl.errors import ConfigError

PAGE = Path("docs/cuda.md")
_LIST = Path(__file__).with_name("support.yaml")
# By the names of support.yaml, the columns of the table.
TARGETS = {"cpu": "CPU", "engine": "CUDA, Transformer Engine", "cuda": "CUDA without it"}
REFUSED, NEVER, WORKS = "refused", "never run", "works"
_BASE = {"model": {"path": "model"}, "data": {"train": ["train.parquet"]}, "rollout": {"engine": {"num_engines": 1}}}
# Between these lines of the page.
_BEGIN, _END = "<!-- from megarl/config/support.yaml -->\n", "<!-- end -->\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A feature as `support.yaml` describes it."""

    name: str
    settings: tuple[str, ...]
    run: tuple[str, ...]
    beside: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    slower: Mapping[str, str] = field(default_factory=dict)
    words: str | None = None

    def refusal(self, target: Target) -> str | None:
        """Return why the checks of `megarl train` refuse the feature on a target; None if they do not."""
        config = with_overrides(from_dict(Config, _BASE), [*self.beside, *self.settings])
        try:
            with checked_for(replace(target, packages={**(target.packages or {}), **self.packages})):
                check_train(config)
        except ConfigError as error:
            return str(error)
        return None


def features() -> list[Feature]:
    """Read the list."""
    return [from_dict(Feature, each) for each in yaml.safe_load(_LIST.read_text(encoding="utf-8"))]


def targets() -> dict[str, Target]:
    """Return the targets by name; on CUDA, packages are those that containers/install.sh installs."""
    pins = pinned_packages()
    without = {name: version for name, version in pins.items() if not name.startswith("transformer-engine")}
    kinds = {"cpu": ("cpu", without), "engine": ("cuda", pins), "cuda": ("cuda", without)}
    return {name: Target(platform=platform, packages=packages) for name, (platform, packages) in kinds.items()}


def cell(feature: Feature, name: str, target: Target) -> str:
    """Return what the table says of a feature on a target: refused, never run, works, or slower and than what."""
    if feature.refusal(target) is not None:
        return REFUSED
    if name not in feature.run:
        return NEVER
    return f"slower {feature.slower[name]}" if name in feature.slower else WORKS


def render() -> str:
    """Return the table as Markdown."""
    lines, there = [f"| feature | {' | '.join(TARGETS.values())} |", "|---" * (len(TARGETS) + 1) + "|"], targets()
    for each in features():
        first = ": ".join(filter(None, [each.name, " ".join(f"`{setting}`" for setting in each.settings)]))
        lines.append(f"| {first} | {' | '.join(cell(each, *target) for target in there.items())} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """Return the text of the page with the table in its place."""
    return re.sub(f"{_BEGIN}.*{_END}", lambda _: f"{_BEGIN}\n{render()}\n{_END}", page, flags=re.DOTALL)
