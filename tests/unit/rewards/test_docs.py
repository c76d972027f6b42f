"""What docs/rewards.md and the pages in docs/rewards show is a configuration that loads."""

import re
import textwrap
from pathlib import Path

import pytest
import yaml

from megarl.config.check import check_serve_reward
from megarl.config.load import from_dict
from megarl.config.schema import Config

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "rewards.md"


def examples() -> list[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (PAGE, *sorted((DOCS / "rewards").glob("*.md"))))
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    return [text for block in blocks if (text := textwrap.dedent(block)).startswith("rewards:")]


@pytest.mark.parametrize("text", examples())
def test_examples_load(text: str) -> None:
    config = from_dict(Config, yaml.safe_load(text))
    check_serve_reward(config)
    assert config.rewards != Config().rewards


def test_every_manager_has_an_example() -> None:
    managers = [yaml.safe_load(text)["rewards"].get("manager") for text in examples()]
    assert {"rule", "remote", "hybrid"} <= set(managers)
