"""Users' files that register parts of algorithms: what is in force when, and what is said of mistakes."""

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.algos.build import build_algorithm
from megarl.algos.policy_losses import POLICY_LOSSES, PolicyLossInputs, policy_loss
from megarl.config.algo import AlgoConfig, PolicyLossConfig
from megarl.config.plugins import activate, active_plugins, read_plugin, use_plugins
from megarl.errors import ConfigError

LOSS = '''"""A loss of a user."""

from megarl.algos.policy_losses import POLICY_LOSSES, PolicyLossInputs, PolicyLossTerms


@POLICY_LOSSES.register("scaled", options=("clip_low",))
def scaled(x, cfg):
    return PolicyLossTerms(loss=-cfg.clip_low * x.advantages * x.log_ratio, diagnostics={})
'''


@pytest.fixture(autouse=True)
def _no_plugins_afterwards() -> Iterator[None]:
    yield
    activate([])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_losses.py"
    path.write_text(LOSS)
    return path


def test_the_parts_of_a_file_are_in_force_until_another_configuration_is(file: Path) -> None:
    before = list(POLICY_LOSSES)
    use_plugins([str(file)])
    assert set(POLICY_LOSSES) - set(before) == {"scaled"}
    one = torch.tensor([[1.0]])
    x = PolicyLossInputs(logprobs=3 * one, old_logprobs=one, advantages=one, loss_mask=one.bool())
    # −0.2 · 1 · (3 − 1)
    assert policy_loss(x, PolicyLossConfig(name="scaled")).loss.item() == pytest.approx(-0.4)
    first = POLICY_LOSSES.get("scaled")
    use_plugins([])
    assert list(POLICY_LOSSES) == before
    use_plugins([str(file)])
    assert POLICY_LOSSES.get("scaled") is first


def test_a_file_that_has_changed_is_run_again(file: Path) -> None:
    use_plugins([str(file)])
    file.write_text(LOSS.replace('"scaled"', '"renamed"'))
    use_plugins([str(file)])
    assert "renamed" in POLICY_LOSSES
    assert "scaled" not in POLICY_LOSSES


def test_other_processes_get_the_text_that_the_driver_has_read(file: Path) -> None:
    use_plugins([str(file)])
    sent = pickle.dumps(active_plugins())
    activate([])
    file.unlink()
    activate(pickle.loads(sent))
    assert POLICY_LOSSES.get("scaled").options == ("clip_low",)
    (plugin,) = active_plugins()
    assert (plugin.path, plugin.title) == (str(file), "my_losses.py")


def test_a_module_by_its_dotted_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_package_of_losses"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "losses.py").write_text(LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    name = "my_package_of_losses.losses"
    use_plugins([name])
    assert "scaled" in POLICY_LOSSES
    activate([])
    assert "scaled" not in POLICY_LOSSES
    plugin = read_plugin(name)
    (package / "losses.py").write_text(LOSS + "\n# another host's\n")
    with pytest.raises(ConfigError, match=r"losses\.py: has the SHA-256 .*install the same my_package_of_losses\.loss"):
        activate([type(plugin)(name=name, path=plugin.path, source=plugin.source + b"#")])
    use_plugins([name])
    assert "scaled" in POLICY_LOSSES
    del sys.modules[name]


def test_an_algorithm_says_of_a_users_loss_what_it_declares(file: Path) -> None:
    declared = 'options=(), reads=("old_logprobs", "ref_logprobs", "rollout_logprobs", "entropy"), token_local=False'
    file.write_text(LOSS.replace('options=("clip_low",)', declared))
    use_plugins([str(file)])
    cfg = AlgoConfig(policy_loss=PolicyLossConfig(name="scaled"), plugins=(str(file),))
    algorithm = build_algorithm(cfg, max_response_tokens=4)
    assert algorithm.requires() == {"ref_logprobs"}
    assert algorithm.reads >= {"advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs"}
    assert (algorithm.token_local, algorithm.entropy_needs_grad) == (False, True)
    clipped = AlgoConfig(policy_loss=PolicyLossConfig(name="scaled", clip_low=0.1))
    with pytest.raises(ConfigError, match=r"algo\.policy_loss\.clip_low: got 0\.1, which is not read with algo\.polic"):
        build_algorithm(clipped, max_response_tokens=4)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def scaled(x, cfg):", "def scaled(x, cfg)", r":7: not Python: .*; correct it"),
        ("PolicyLossTerms\n", "Nothing\n", r":3: ImportError: cannot import name 'Nothing' .*; correct it"),
        ('"scaled"', '"ppo_clip"', r":6: policy loss 'ppo_clip' is already registered; choose another name"),
        (
            "(x, cfg)",
            "(x)",
            r":6: policy loss 'scaled': got scaled\(x\), expected a function that takes \(x, cfg\); change its param",
        ),
        (
            "options=",
            "local=",
            r":6: policy loss 'scaled': declares 'local', expected names among options, reads, token_local, .*;",
        ),
        (
            '"clip_low"',
            '"clip"',
            r":6: policy loss 'scaled': options: got 'clip', expected names among name, clip_low, .*; correct it",
        ),
        (
            "options=",
            'reads=("logits",), options=',
            r":6: policy loss 'scaled': reads: got 'logits', expected names among old_logprobs, ref_logprobs",
        ),
        (
            "options=",
            "row_ratio=True, options=",
            r":6: policy loss 'scaled': token_local: got true with row_ratio, .*declare token_local=False",
        ),
    ],
)
def test_a_mistake_in_the_file_is_one_line_with_its_place(file: Path, old: str, new: str, message: str) -> None:
    before = list(POLICY_LOSSES)
    file.write_text(LOSS.replace(old, new))
    with pytest.raises(ConfigError, match=rf"^{file}{message}") as info:
        use_plugins([str(file)])
    assert "\n" not in str(info.value)
    assert list(POLICY_LOSSES) == before
    assert active_plugins() == ()


def test_what_a_failing_file_had_registered_is_taken_back(file: Path) -> None:
    file.write_text(LOSS + "\nraise RuntimeError('halfway')\n")
    with pytest.raises(ConfigError, match=r"my_losses\.py:10: RuntimeError: halfway; correct it"):
        use_plugins([str(file)])
    assert "scaled" not in POLICY_LOSSES


def test_two_files_that_each_work_alone(file: Path) -> None:
    other = file.with_name("other.py")
    other.write_text(LOSS)
    use_plugins([str(other)])
    use_plugins([str(file)])
    with pytest.raises(ConfigError, match=r"other\.py: policy loss 'scaled' is already registered"):
        use_plugins([str(file), str(other)])
    use_plugins([str(other)])
    assert "scaled" in POLICY_LOSSES


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["losses"],
            r"algo\.plugins: there is no module losses in Python; install it, or add its directory to PYTHONP",
        ),
        (["no_package.losses"], r"algo\.plugins: there is no module no_package\.losses in Python"),
        (
            ["my losses"],
            r"algo\.plugins: got 'my losses', expected the path of a Python file, its name ending in \.py, or",
        ),
        (
            ["none.py"],
            r"none\.py: no such file in /.*, expected a Python file that registers parts of an algorithm; set algo\.pl",
        ),
        (
            ["a/x.py", "b/x.py"],
            r"algo\.plugins: got \['a/x\.py', 'b/x\.py'\], of which two are called x\.py; rename one",
        ),
    ],
)
def test_what_is_no_plugin(names: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory in ("a", "b"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "x.py").write_text(LOSS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        use_plugins(names)
