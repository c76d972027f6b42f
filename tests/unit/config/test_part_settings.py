"""Parts that plugins register have settings of their own, which are read and checked like megarl's."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.algos.policy_losses import POLICY_LOSSES, PolicyLossInputs
from megarl.config.explain import explain
from megarl.config.load import PACKAGED, dump, load_config, with_overrides
from megarl.config.part_settings import BESIDE, use_plugins_of, value_of
from megarl.config.plugins import activate, active_plugins, registrations
from megarl.config.schema import Config
from megarl.config.setting import differences
from megarl.errors import ConfigError

_PARTS = """
from dataclasses import dataclass
from megarl.algos.aggregation import AGGREGATIONS
from megarl.algos.filters import GROUP_FILTERS
from megarl.algos.policy_losses import POLICY_LOSSES, PolicyLossTerms
from megarl.config.setting import POSITIVE, setting

@dataclass(frozen=True)
class Own:
    width: float = setting(0.2, POSITIVE)  # How far.
    kinds: tuple[str, ...] = ()
    odd: list[float] | None = None

@POLICY_LOSSES.register("wide", settings=Own)
def wide(x, cfg, own):
    return PolicyLossTerms(loss=own.width * x.logprobs, diagnostics={})

@AGGREGATIONS.register("scaled", settings=Own, denominator=max)
def scaled(loss, mask, own):
    return own.width * (loss * mask).sum()

@GROUP_FILTERS.register("picky", settings=Own)
def picky(group, cfg, own):
    return max(group.scores) > own.width
"""
_WIDE = "algo.policy_loss.name=wide"


@pytest.fixture(autouse=True)
def _no_plugins_afterwards() -> Iterator[None]:
    yield
    activate([])


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    (tmp_path / "parts.py").write_text(_PARTS)
    return f"algo.plugins=['{tmp_path / 'parts.py'}']"


def _widths() -> dict[str, float]:
    return {each.names[0]: each.own.value.width for each in registrations() if each.own}


@pytest.mark.parametrize(
    ("overrides", "widths"),
    [
        ([_WIDE], {}),
        ([_WIDE, "algo.policy_loss.width=0.3"], {"wide": 0.3}),
        ([_WIDE, "algo.policy_loss={width: 1e-1, clip_high: 0.2}"], {"wide": 0.1}),
        (["algo.settings.wide.width=3", _WIDE], {"wide": 3.0}),
        (["algo.aggregation=scaled", "algo.settings.scaled.width=4"], {"scaled": 4.0}),
        (["algo.filter.names=[picky]", "algo.settings={picky: {width: 5}}"], {"picky": 5.0}),
    ],
)
def test_the_settings_of_a_part_reach_it_in_every_process(
    plugin: str, overrides: list[str], widths: dict[str, float], tmp_path: Path
) -> None:
    config = with_overrides(Config(), [plugin, *overrides])
    use_plugins_of(config)
    expected = {"wide": 0.2, "scaled": 0.2, "picky": 0.2} | widths
    assert _widths() == expected
    loss = POLICY_LOSSES.get("wide").compute(_inputs(), config.algo.policy_loss).loss
    assert loss.item() == pytest.approx(-expected["wide"])

    # As in a rank, to which the plugins are sent.
    sent = pickle.dumps(active_plugins())
    use_plugins_of(with_overrides(Config(), [plugin]))
    assert set(_widths().values()) == {0.2}
    activate(pickle.loads(sent))
    assert _widths() == expected

    # A run's record has them, and loads back.
    saved = tmp_path / "config.yaml"
    saved.write_text(dump(config))
    assert load_config(saved) == config


def _inputs() -> PolicyLossInputs:
    one = torch.ones(1, 1)
    return PolicyLossInputs(logprobs=-one, old_logprobs=-one, advantages=one, loss_mask=one > 0)


def test_a_run_file_has_them_beside_the_name_and_an_override_wins(plugin: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"algo: {{{plugin[5:].replace('=', ': ')}, policy_loss: {{name: wide, width: 0.3}}}}")
    before, now = load_config(file), load_config(file, ["algo.policy_loss.width=0.4"])
    use_plugins_of(now)
    assert _widths()["wide"] == 0.4
    # Which a resumed run and a study compare.
    assert [key for key, *_ in differences(before, now)] == ["algo.settings"]
    assert with_overrides(before, ["algo.policy_loss.width=0.4"]) == now


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([_WIDE, "algo.policy_loss.widht=1"], r"unknown key 'algo.policy_loss.widht'; did you mean '.*loss.width'"),
        ([_WIDE, "algo.policy_loss.clip_hihg=1"], r"did you mean 'algo.policy_loss.clip_high'"),
        ([_WIDE, "algo.policy_loss.zzz=1"], r"algo.policy_loss has: width, kinds, odd, name, clip_low"),
        (
            [_WIDE, "algo.policy_loss.width=wide"],
            r"loss.width: got 'wide' \(str\), expected a finite float",
        ),
        ([_WIDE, "algo.policy_loss.width=0"], r"algo.policy_loss.width: got 0.0, expected > 0"),
        ([_WIDE, "algo.policy_loss.odd=[1]"], r"algo.policy_loss.odd: is declared as list\[float\]"),
        ([_WIDE, "algo.policy_loss.width=1", "algo.settings.wide.width=2"], r"is 2; set one"),
        (["algo.settings.wide.width=1"], r"is not read, as nothing chooses wide; remove it, or set algo.policy"),
        (["algo.settings.wied.width=1"], r"did you mean 'wide'\?"),
        (["algo.policy_loss.width=1"], r"unknown key 'algo.policy_loss.width'; algo.policy_loss has: name, clip_low"),
        (["algo.settings=3", _WIDE, "algo.policy_loss.width=1"], r"unknown key 'algo.policy_loss.width'"),
        (["algo.policy_loss.name=[wide]", "algo.policy_loss.width=1"], r"algo.policy_loss.name: got \['wide'\]"),
        (["algo.aggregation=scaled", "algo.settings.scaled.width=-1"], r"algo.settings.scaled.width: got -1.0, exp"),
    ],
)
def test_wrong_settings_are_refused_as_megarls_own(plugin: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        use_plugins_of(with_overrides(Config(), [plugin, *overrides]))


def test_without_plugins_an_unknown_key_is_refused_where_it_stands() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'algo.policy_loss.width'"):
        load_config(PACKAGED / "run" / "sums-rl.yaml", ["algo.policy_loss.width=1"])


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ("dict", r"parts.py:\d+.*policy loss 'odd': settings: got <class 'dict'>, expected a class under @dataclass"),
        ("dataclass(type('A', (), {}))", "frozen=True"),
        ("make_dataclass('A', ['a'], frozen=True)", "give every field a default"),
        ("make_dataclass('A', [], frozen=True)", r"expected a function that takes \(x, cfg, settings\)"),
    ],
)
def test_wrong_declarations_are_refused(declared: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(
        "from dataclasses import dataclass, make_dataclass\n"
        "from megarl.algos.policy_losses import POLICY_LOSSES\n"
        f"POLICY_LOSSES.register('odd', settings={declared})(lambda x, cfg: x)\n"
    )
    with pytest.raises(ConfigError, match=message):
        use_plugins_of(with_overrides(Config(), [f"algo.plugins=['{tmp_path / 'parts.py'}']"]))


def test_two_parts_with_settings_do_not_share_a_name(plugin: str, tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(_PARTS.replace("scaled", "wide"))
    with pytest.raises(ConfigError, match="two parts with settings are called 'wide'; rename one"):
        use_plugins_of(with_overrides(Config(), [plugin]))


def test_settings_may_stand_beside_what_chooses_a_part() -> None:
    assert all(isinstance(value_of(Config(), key), str) for key in BESIDE)


def test_explain_says_what_a_part_declares(plugin: str) -> None:
    """Beside its name and below `algo.settings`, with the comment above or beside it."""
    config = with_overrides(Config(), [plugin, _WIDE, "algo.policy_loss.width=0.5"])
    said = ["  How far.", "  expects  a finite float; > 0", "  default  0.2", "  here     0.5"]
    assert explain("algo.policy_loss.width", config).splitlines() == ["algo.policy_loss.width", *said]
    assert explain("algo.settings.wide.width", config).splitlines()[1:] == said
    assert explain("algo.settings.picky.width", config).endswith("here     0.2")
    assert ["algo.policy_loss.width", "How", "far."] in [
        *map(str.split, explain("algo.policy_loss", config).splitlines())
    ]
    with pytest.raises(ConfigError, match=r"unknown key 'algo\.policy_loss\.width'"):
        explain("algo.policy_loss.width", Config())
