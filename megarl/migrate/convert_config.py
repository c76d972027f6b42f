"""Turn the options of a training run of verl, OpenRLHF or LUFFY into a run file (`megarl convert-config`).

A shell script or a YAML file has the options. `aliases` maps each to a megarl key and translates its value. This module
adds the defaults of the other framework, which a run uses without naming them, and the megarl settings that follow from
other settings.
"""

import re
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from megarl.config.load import merge, read_yaml
from megarl.config.parse import Tree, from_dict
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.host.masking import masked_text
from megarl.host.streams import print_lines
from megarl.host.unicode import visible
from megarl.migrate.aliases import ALIASES, DEFAULTS, SAME, Alias, find_alias, leaves
from megarl.migrate.hydra_values import option_value
from megarl.migrate.peer_scripts import Open, ScriptOptions, option_name, read_script
from megarl.migrate.rules import UNSET, Options, elsewhere

_INTERPOLATION = re.compile(r"\$\{(?:oc\.select:)?([A-Za-z_]\w*(?:\.\w+)+)(?:,([^${}]*))?\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """The options of one training run of another framework, under the names that `aliases` uses.

    `unreadable`: options whose value the file does not tell, as written there, each with the reason. `undecided`: the
    names of these. `assumed`: what the values rest on.
    """

    framework: str
    options: Mapping[str, object]
    unreadable: Mapping[str, str]
    undecided: frozenset[str] = field(default_factory=frozenset)
    assumed: tuple[str, ...] = ()


def read_peer_file(
    path: Path, given: Sequence[str] = (), command: int | None = None, *, run_anyway: bool = False
) -> PeerOptions:
    """Read the options from a YAML file, or from the command in a shell script that starts training.

    given: what a script is run with: variables of the environment as NAME=VALUE, and arguments. command: which of
    several commands that start training, from 1. run_anyway: run a script also where there is no sandbox for it.
    """
    if path.suffix in (".yaml", ".yml"):
        if given or command:
            raise ConfigError(f"{path}: {' '.join(given) or '--command'} is for shell scripts, and this is a YAML file")
        tree = read_yaml(path)
        is_verl = any(section in tree for section in ("actor_rollout_ref", "algorithm", "trainer"))
        framework = "verl" if is_verl else "OpenRLHF"
        found = {
            option_name(name, framework): _number(value) if isinstance(value, str) else value
            for name, value in leaves("", tree)
        }
        script = ScriptOptions(framework=framework, options=found)
    else:
        script = read_script(path, given, command, run_anyway=run_anyway)
    framework = script.framework
    if framework == "verl" and any(name in ALIASES and ALIASES[name].framework == "LUFFY" for name in script.options):
        framework = "LUFFY"
    resolved = {name: _resolve(value, script.options) for name, value in script.options.items()}
    undecided = {name: value for name, value in resolved.items() if isinstance(value, Open)}
    undecided |= {
        name: Open(value, "the file does not say what it stands for")
        for name, value in resolved.items()
        if isinstance(value, str) and "${" in value
    }
    return PeerOptions(
        framework=framework,
        options={name: value for name, value in resolved.items() if name not in undecided},
        unreadable={**{f"{name}={value.text}": value.why for name, value in undecided.items()}, **script.unreadable},
        undecided=frozenset(undecided),
        assumed=script.assumed,
    )


def _number(text: str) -> str | float:
    """Read 1e-6 as a number, as OmegaConf does in YAML files."""
    return float(text) if re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", text) else text


def _resolve(value: object, options: Mapping[str, object]) -> object:
    """Replace references such as ${data.max_prompt_length} to options of the same file, where those are known."""
    for _ in range(len(options)):
        if not isinstance(value, str) or (found := _INTERPOLATION.search(value)) is None:
            return value
        if found[1] not in options and found[2] is None:
            return value
        target = options.get(found[1], option_value(found[2] or ""))
        if isinstance(target, Open):
            return Open(value, f"{found[1]}: {target.why}")
        value = target if found[0] == value else value.replace(found[0], str(target))
    return value


# Settings that only act with others: what a key starts with, the key that decides, and its values (empty: any).
_ONLY_WITH: tuple[tuple[str, str, frozenset[str]], ...] = (
    ("critic.", "algo.advantage.estimator", frozenset({"gae"})),
    ("algo.advantage.gamma", "algo.advantage.estimator", frozenset({"gae", "reinforce_plus_plus"})),
    ("algo.advantage.lam", "algo.advantage.estimator", frozenset({"gae"})),
    (
        "algo.advantage.norm_by_std",
        "algo.advantage.estimator",
        frozenset({"grpo", "grpo_split", "gdpo", "passk_best", "reinforce_baseline", "reinforce_plus_plus"}),
    ),
    ("algo.policy_loss.clip_", "algo.policy_loss.name", frozenset({"ppo_clip", "cispo", "clip_cov", "gspo", "gmpo"})),
    ("algo.policy_loss.cov_kl_coef", "algo.policy_loss.name", frozenset({"kl_cov"})),
    ("algo.policy_loss.cov_low", "algo.policy_loss.name", frozenset({"clip_cov"})),
    ("algo.policy_loss.cov_high", "algo.policy_loss.name", frozenset({"clip_cov"})),
    ("algo.policy_loss.tau_", "algo.policy_loss.name", frozenset({"sapo"})),
    ("algo.advantage.components", "algo.advantage.estimator", frozenset({"gdpo"})),
    ("algo.kl.", "algo.kl.where", frozenset({"loss", "reward", "both"})),
    ("reference.", "algo.kl.where", frozenset({"loss", "reward", "both"})),
    ("reward_model.", "rewards.manager", frozenset({"model"})),
    ("algo.filter.", "algo.filter.mean_score", frozenset()),
    ("algo.reward.overlong_factor", "algo.reward.overlong_buffer_tokens", frozenset()),
    ("algo.correction.", "algo.correction.name", frozenset()),
    ("placement.offload", "placement.mode", frozenset({"colocated"})),
    ("algo.entropy.", "algo.entropy.controller", frozenset({"learned", "proportional"})),
    ("algo.off_policy.reshape_weight", "algo.off_policy.reshape", frozenset({"logp", "p_logp"})),
    ("algo.off_policy.reshape_exponent", "algo.off_policy.reshape", frozenset({"pow"})),
)
# Values of an option that asks for nothing, and options that switch off all others of their section by such a value.
_OFF: tuple[object, ...] = (False, None, 0, "", [], {}, -1)
_SWITCHES = ("enable", "enabled", "rank", "lora_rank")


@dataclass(kw_only=True)
class Converted:
    """The run file that a conversion builds: megarl settings by dotted key, and what became of each given option.

    differs: options carried over whose meaning is not quite the same. needless: options without an effect here. lost:
    options that could not be carried over. Each of these maps an option, as it was given, to a note for the user.
    assumed: what the values rest on.
    """

    framework: str
    settings: dict[str, object] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)
    needless: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()


def convert_config(
    path: Path, out: Path | None, given: Sequence[str], command: int | None, *, run_anyway: bool
) -> None:
    """Convert a script or YAML file, and write the run file to `out`, or print it.

    given, command, run_anyway: see `read_peer_file`. The standard error also lists what the file does not tell.
    """
    if out is not None and out.exists():
        raise ConfigError(f"--out: {out} exists; choose another name or delete it")
    peer = read_peer_file(path, given, command, run_anyway=run_anyway)
    converted = convert(peer)
    for written, why in peer.unreadable.items():
        print_lines(f"{path}: not known, so not in the run file: {written} ({why})", file=sys.stderr)
    text = to_run_file(converted, str(path))
    if out is None:
        print(text, end="")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    counts = f"{len(converted.settings)} settings, {len(converted.lost)} options not carried over"
    print_lines(f"{out}: {counts}", *_report(converted))


def convert(peer: PeerOptions) -> Converted:
    """Return the settings for a run's options and the defaults it relies on, and what could not be carried over."""
    converted = Converted(framework=peer.framework, lost=dict(peer.unreadable), assumed=peer.assumed)
    options = _Options({**DEFAULTS[peer.framework], **peer.options}, peer.undecided)
    # Defaults first, so that an option given for the same key wins.
    for name, value in options.items():
        given = f"{name}={value}" if name in peer.options else f"{name}={value} (default)"
        found = find_alias(name)
        if name in SAME:
            converted.settings[name] = value
        elif found is None:
            converted.lost[given] = f"{peer.framework} has no option of this name that is known here"
        elif not found[1].key:
            section = name.rpartition(".")[0]
            switches = [options[f"{section}.{each}"] for each in _SWITCHES if f"{section}.{each}" in options]
            is_lost = found[1].unsupported and value not in _OFF and not any(switch in _OFF for switch in switches)
            (converted.lost if is_lost else converted.needless)[given] = found[1].note
        else:
            try:
                settings = translated(found[1], value, options)
                from_dict(Config, _nested(settings))
            except ConfigError as error:
                keys, reason = found[1].key.split(), str(error)
                converted.lost[given] = reason if reason.startswith(tuple(keys)) else f"{' and '.join(keys)}: {reason}"
                continue
            except (ArithmeticError, LookupError, TypeError, ValueError):
                converted.lost[given] = "its value, or that of an option it depends on, is not of the expected kind"
                continue
            converted.settings.update(settings)
            if not settings and name in peer.options and found[1].rule is not elsewhere:
                converted.needless[given] = f"{found[1].key}: not set by this value with the other options"
            if settings and found[1].note and name in peer.options:
                shown = ", ".join(f"{key}={ours}" for key, ours in settings.items())
                converted.differs[given] = f"{shown} ({found[1].note})"
    undecided = {key for name in peer.undecided for key in _keys(name)}
    converted.settings = _complete(converted.settings, undecided, converted.lost)
    return converted


class _Options(dict[str, Any]):
    """The options of a run. Those that are not decided are absent, and nothing is to take a default for them."""

    def __init__(self, known: Options, undecided: Set[str]) -> None:
        super().__init__({name: value for name, value in known.items() if name not in undecided})
        self.undecided = undecided

    def __missing__(self, name: str) -> Any:
        if name in self.undecided:
            raise ConfigError(f"it depends on {name}, whose value is not known")
        raise KeyError(name)

    def get(self, name: str, default: object = None) -> Any:
        return self[name] if name in self or name in self.undecided else default


def _keys(name: str) -> list[str]:
    """Return the megarl keys that an option sets."""
    found = find_alias(name)
    return [name] if name in SAME else found[1].key.split() if found else []


def translated(alias: Alias, value: object, options: Options) -> dict[str, object]:
    """Translate an option's value to megarl settings, by key; raise ConfigError if the value has no counterpart."""
    keys = alias.key.split()
    result = alias.rule(value, options) if alias.rule else value
    if alias.rule is None and value is None:
        return {}
    values = [result] * len(keys)
    if len(keys) > 1 and isinstance(result, tuple | list) and len(result) == len(keys):
        values = [*result]
    return {key: ours for key, ours in zip(keys, values, strict=True) if ours is not UNSET}


def _complete(settings: Mapping[str, object], undecided: Set[str], lost: dict[str, str]) -> dict[str, object]:
    """Add settings that follow from others (layouts, engines, sizes), and drop settings that would have no effect.

    Settings that would follow from one of the `undecided` keys are added to `lost` instead.
    """
    known: dict[str, Any] = {"placement.mode": "colocated", "algo.policy_loss.name": "ppo_clip", **settings}
    for start, decides, values in _ONLY_WITH:
        decided = known.get(decides)
        if decides not in undecided and (decided is None or (values and decided not in values)):
            known = {key: value for key, value in known.items() if key == decides or not key.startswith(start)}
    if "trainer.total_steps" in known:
        known.pop("trainer.total_epochs", None)

    def follows(key: str, *sources: str) -> bool:
        unknown = [source for source in sources if source in undecided]
        if unknown:
            known.pop(key, None)
            lost[key] = f"it follows from {' and '.join(unknown)}, whose value is not known"
        return not unknown

    counts = ("placement.trainer.num_nodes", "placement.trainer.devices_per_node")
    devices = known.get(counts[0], 1) * known.get(counts[1], 1)
    actor = {key: value for key, value in known.items() if key.startswith("actor.layout.")}
    for role in ("reference", "critic", "reward_model"):
        own = {key: value for key, value in known.items() if key.startswith(f"{role}.layout.")}
        # The actor's own layout is null here: the role then runs in the actor's processes.
        if all(actor.get(key.replace(role, "actor", 1), 1) == value for key, value in own.items()):
            known = {key: value for key, value in known.items() if key not in own}
    for role in ("actor", "reference", "critic", "reward_model"):
        keys = [f"{role}.layout.{size}" for size in ("tp", "pp", "cp")]
        sizes = [known.get(key) for key in keys]
        if (role == "actor" or any(sizes)) and follows(f"{role}.layout.dp", *counts, *keys):
            ranks = reduce(lambda product, size: product * (size or 1), sizes, 1)
            known[f"{role}.layout.dp"] = max(devices // ranks, 1)
    engines, per_engine = "rollout.engine.num_engines", "rollout.engine.tp"
    if known["placement.mode"] == "colocated" and engines not in known and follows(engines, *counts, per_engine):
        known[engines] = max(devices // known.get(per_engine, 1), 1)
    lengths = ("data.max_prompt_tokens", "rollout.max_response_tokens")
    longest = known.get(lengths[0], 1024) + known.get(lengths[1], 1024)
    for role in ("actor", "reference", "critic", "reward_model"):
        key = f"{role}.micro_batch_tokens"
        tokens = known.get(key, 16384 if role == "actor" else longest)
        if (tokens < longest or role == "actor") and key not in undecided and follows(key, *lengths):
            known[key] = max(tokens, longest)
    if follows("algo.name", "algo.policy_loss.name", "algo.advantage.estimator"):
        loss, estimator = known["algo.policy_loss.name"], known.get("algo.advantage.estimator", "grpo")
        known["algo.name"] = estimator if loss in ("ppo_clip", "reinforce") else loss
    return {key: value for key, value in known.items() if key not in undecided}


def to_run_file(converted: Converted, source: str) -> str:
    """Return the text of a run file, whose comments say what could not be carried over."""
    head = [f"Converted from {source} of {converted.framework} by megarl convert-config; check it with --dry-run.", ""]
    # Options of the peer may have texts with line feeds, which would end the comment.
    comments = "\n".join(f"# {visible(line)}".rstrip() for line in [*head, *_report(converted)])
    return f"{comments}\n{yaml.safe_dump(_nested(converted.settings), sort_keys=False, allow_unicode=True)}"


def _nested(settings: Options) -> Tree:
    """Turn settings by dotted key into nested mappings, sorted, as a run file has them."""
    tree: Tree = {}
    for dotted, value in sorted(settings.items()):
        tree = merge(tree, reduce(lambda nested, key: {key: nested}, reversed(dotted.split(".")), value))
    return tree


def _report(converted: Converted) -> list[str]:
    parts: tuple[tuple[str, Mapping[str, str]], ...] = (
        ("Not carried over:", converted.lost),
        ("Carried over, but check the difference:", converted.differs),
        ("Without a counterpart, and without need of one:", converted.needless),
    )
    listed = [
        masked_text(line)
        for title, entries in parts
        if entries
        for line in (title, *(f"  {k}: {v}" for k, v in entries.items()))
    ]
    return [*listed, *(["Assumed:", *(f"  {each}" for each in converted.assumed)] if converted.assumed else [])]
