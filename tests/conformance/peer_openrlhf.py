"""OpenRLHF's losses and advantages as installed, without the engines that its packages import.

`openrlhf.models.loss` is plain torch, but `openrlhf.models` imports model classes with it, and so DeepSpeed, PEFT and
FlashAttention, which want a GPU. Here packages are entered without their `__init__`, and the two names of missing
engines that a module reads at import, `deepspeed` and `RayActorGroup`, are empty. Nothing of a formula is replaced.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType


def _empty(name: str, folder: Path | None = None) -> ModuleType:
    """A module without content; with `folder`, a package whose modules are there."""
    spec = ModuleSpec(name, loader=None, is_package=folder is not None)
    if folder is not None:
        spec.submodule_search_locations = [str(folder)]
    return module_from_spec(spec)


@contextmanager
def _missing_engines() -> Iterator[None]:
    """Empty modules in place of those that cannot be imported, while OpenRLHF is."""
    launcher = _empty("openrlhf.trainer.ray.launcher")
    launcher.RayActorGroup = object
    engines = [_empty("deepspeed"), _empty("openrlhf.trainer.ray"), launcher]
    sys.modules.update({engine.__name__: engine for engine in engines})
    try:
        yield
    finally:
        for engine in engines:
            del sys.modules[engine.__name__]


def _load(*names: str) -> tuple[ModuleType, ...]:
    spec = find_spec("openrlhf")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("openrlhf is not installed; run these tests with make test-conformance")
    root = Path(spec.submodule_search_locations[0])
    for package in ("models", "utils", "trainer/ppo_utils"):
        name = f"openrlhf.{package.replace('/', '.')}"
        sys.modules[name] = _empty(name, root / package)
    with _missing_engines():
        return tuple(import_module(f"openrlhf.{name}") for name in names)


loss, utils, experience_maker = _load("models.loss", "models.utils", "trainer.ppo_utils.experience_maker")
