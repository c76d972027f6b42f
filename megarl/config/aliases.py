"""Map option names of verl, OpenRLHF, LUFFY and vLLM to megarl's keys, for error messages and for convert-config."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from megarl.config.aliases_absent import UNSUPPORTED
from megarl.config.aliases_algo import CPO, LUFFY, OPENRLHF_ALGO, PPO_CRITIC, VERL_ALGO
from megarl.config.aliases_needless import NEEDLESS
from megarl.config.aliases_openrlhf import OPENRLHF, RENAMED
from megarl.config.aliases_roles import OPENRLHF_REWARDS, OPENRLHF_ROLES, VERL_REWARDS, VERL_ROLES
from megarl.config.aliases_verl import VERL
from megarl.config.translate import Rule


@dataclass(frozen=True, slots=True)
class Alias:
    """An option of another framework, with the megarl keys that correspond to it.

    `key`: these keys, separated by spaces; empty if nothing is to be set. `note`: what differs, or why nothing is to be
    set. `rule`: translates the option's values (see `translate`); None keeps them. `unsupported`: the option asks for
    something that megarl does not have.
    """

    framework: str
    key: str
    note: str = ""
    rule: Rule | None = field(default=None, compare=False)
    unsupported: bool = False

    @property
    def advice(self) -> str:
        """Return the text that an error message puts after the name of the unknown key."""
        if self.unsupported:
            return f"of {self.framework}, asks for what is not supported here: {self.note}"
        name = " and ".join(repr(key) for key in self.key.split())
        here = f"{self.framework}'s name for {name}" if name else f"of {self.framework}"
        return f"{here}{f' ({self.note})' if self.note else ''}"


# Names of vLLM's engine arguments, for users who set them as `rollout.engine.*`.
_VLLM = {
    "rollout.engine.data_parallel_size": ("rollout.engine.num_engines",),
    "rollout.engine.enable_prefix_caching": ("rollout.engine.prefix_caching",),
    "rollout.engine.enable_sleep_mode": ("placement.offload",),
    "rollout.engine.kv_cache_memory_bytes": ("rollout.engine.kv_cache_mib", "MiB"),
    "rollout.engine.max_model_len": ("rollout.engine.max_model_tokens",),
    "rollout.engine.tensor_parallel_size": ("rollout.engine.tp",),
}

_EARLIER = {"sync.transport": ("", "the bridge is the only one; leave this out")}

_FLAT: Mapping[str, Alias] = {
    name: Alias(framework, *entry)
    for framework, tables in (
        ("verl", (VERL, VERL_ROLES, VERL_ALGO, VERL_REWARDS)),
        ("PPO_critic", (PPO_CRITIC,)),
        ("CPO", (CPO,)),
        ("LUFFY", (LUFFY,)),
        ("OpenRLHF", (OPENRLHF, OPENRLHF_ROLES, OPENRLHF_ALGO, OPENRLHF_REWARDS)),
        ("vLLM", (_VLLM,)),
        ("earlier versions", (_EARLIER,)),
    )
    for table in tables
    for name, entry in table.items()
}
ALIASES: Mapping[str, Alias] = {**_FLAT, **{new: _FLAT[name] for new, name in RENAMED.items()}}

# Options without a key here, by pattern; features that do not exist precede what merely needs no setting.
ABSENT: Mapping[str, Alias] = {
    pattern: Alias(framework, "", note, unsupported=unsupported)
    for unsupported, tables in ((True, UNSUPPORTED), (False, NEEDLESS))
    for framework, table in tables.items()
    for pattern, note in table.items()
}


def find_alias(path: str, value: object = None) -> tuple[str, Alias] | None:
    """Look up an unknown dotted key among other frameworks' options; return the option's name and `Alias`, or None.

    If `value` is a mapping, all keys in it are looked up. The first sections of a name may be missing if the rest has
    only one meaning: `rollout.n` is found as verl's `actor_rollout_ref.rollout.n`. Hydra's `+` before a name is
    ignored. An alias for one value, such as `algorithm.adv_estimator=cpo`, has priority over the alias for the key;
    patterns of options without a megarl key come last.
    """
    for leaf, item in leaves(path.lstrip("+"), value):
        for name in (f"{leaf}={item}", leaf):
            if name in ALIASES:
                return name, ALIASES[name]
            found = {alias for known, alias in ALIASES.items() if "." in leaf and known.endswith(f".{name}")}
            if len(found) == 1:
                return name, found.pop()
        for pattern, alias in ABSENT.items():
            if fnmatchcase(leaf, pattern):
                return leaf, alias
    return None


def unknown_options(arguments: list[str]) -> str:
    """Return the message for command-line options that do not exist, such as `--micro_train_batch_size 4`."""
    names = [argument.lstrip("-").partition("=")[0] for argument in arguments if argument.startswith("-")]
    hints = [f"--{name} is {found[1].advice}" for name in names if (found := find_alias(name.replace("-", "_")))]
    advice = f"; {'; '.join(hints)}" if hints else ""
    return f"unrecognized arguments: {' '.join(arguments)}{advice}; settings are given as key=value"


def leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the dotted name and the value of every leaf of a nested mapping; an empty mapping is a leaf too."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(f"{path}.{key}" if path else str(key), item)
    else:
        yield path, value
