"""Write the tables of other trainers' options: `python -m tools.peer_tables`."""

from collections.abc import Iterator, Mapping
from itertools import groupby

from megarl.migrate.aliases import ABSENT, ALIASES, RENAMED, RENAMED_AS_HERE, Alias

_FRAMEWORKS: Mapping[str, str] = {
    "verl": "`+` before a name, and its first sections, may be left out where that is unambiguous.",
    "LUFFY": "In addition to verl's names.",
    "CPO": "Options of CPO's fork of verl.",
    "PPO_critic": "Options of PPO_critic's fork of verl.",
    "OpenRLHF": "The names since OpenRLHF 0.11 follow in a table of their own.",
    "PEFT": "Options of adapters, also where they stand within actor.lora, and TRL's names for them.",
    "TRL": "Options of GKD and of the other trainers that distil.",
    "ms-swift": "Options of adapters and distillation that are not called as OpenRLHF's or TRL's.",
    "NeMo-RL": "Options of adapters and distillation.",
    "SkyRL": "Options of adapters.",
    "miles": "Options of adapters that are not called as OpenRLHF's, and of distillation; also slime's.",
    "prime-rl": "Options of distillation.",
    "tinker": "Options of tinker-cookbook's distillation; its teacher_model is ms-swift's.",
    "vLLM": "Engine arguments, set as keys of rollout.engine.",
}


def render_peers() -> str:
    """Return a table per framework, for the page migrating.md of the site."""
    parts = []
    for framework, remark in _FRAMEWORKS.items():
        named = [(name, alias) for name, alias in ALIASES.items() if alias.framework == framework]
        own = [(name, alias) for name, alias in named if alias.key and name not in RENAMED]
        parts.append(f"## {framework}\n\n{remark}\n")
        parts.append(_table(("option", "here", "note"), (_row(name, alias) for name, alias in own)))
        if framework == "OpenRLHF":
            renamed = sorted({**RENAMED, **RENAMED_AS_HERE}.items())
            parts.append(_table(("since 0.11", "before"), (f"| `{new}` | `{old}` |" for new, old in renamed)))
        for title, unsupported in (("Not supported", True), ("Without need of a setting", False)):
            absent = [
                *((name, alias) for name, alias in named if not (alias.key or unsupported or name in RENAMED)),
                *((name, alias) for name, alias in ABSENT.items() if alias.framework == framework),
            ]
            rows = list(_by_note([each for each in absent if each[1].unsupported == unsupported]))
            if rows:
                parts.append(f"### {title}: {framework}\n\n" + _table(("options", "why, and what to do"), rows))
    return "\n".join(parts)


def _row(name: str, alias: Alias) -> str:
    keys = ", ".join(f"`{key}`" for key in alias.key.split())
    return f"| `{name}` | {keys} | {alias.note} |"


def _by_note(entries: list[tuple[str, Alias]]) -> Iterator[str]:
    """Yield one table row for each note, with all options to which the note applies."""
    for note, group in groupby(sorted(entries, key=lambda entry: entry[1].note), key=lambda entry: entry[1].note):
        yield f"| {', '.join(f'`{name}`' for name, _ in group)} | {note} |"


def _table(titles: tuple[str, ...], rows: Iterator[str] | list[str]) -> str:
    return "\n".join([f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *rows]) + "\n"


if __name__ == "__main__":
    print(render_peers())
