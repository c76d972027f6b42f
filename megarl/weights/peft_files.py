"""Read directories of adapters that PEFT wrote, or a trainer that writes as it does, and check that they fit a base."""

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.config.lora import LoraConfig
from megarl.config.torch_later import Tensor, torch
from megarl.errors import ConfigError
from megarl.host.reading import read_object, reading
from megarl.weights.adapters import adapter_spec, peft_config
from megarl.weights.families import ModelSpec, read_model_spec
from megarl.weights.safetensors_map import create_file, map_tensors, same_bytes, weight_specs
from megarl.weights.tables import OUTPUT_HEAD, VALUE_HEAD

# PEFT's names of its files, and its prefix of the names of tensors.
ADAPTER_CONFIG, ADAPTER_FILE, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
_PICKLE = "adapter_model.bin"
_MERGE_ELSEWHERE = "merge the adapters with peft (merge_and_unload), and use the model that it saves"
# PEFT's options with which an adapter is more, or other, than W + s·B·A, and what it is then.
_VARIANTS: Mapping[str, str] = {
    "use_dora": "DoRA also scales the rows of weights",
    "bias": "biases of the base are trained, too",
    "lora_bias": "B has a bias",
    "fan_in_fan_out": "the base keeps its weights transposed",
    "layer_replication": "layers of the base are repeated",
    "target_parameters": "the adapters of all experts are one tensor",
    "trainable_token_indices": "rows of the embedding are trained",
    "alora_invocation_tokens": "adapters act only after certain tokens",
    **dict.fromkeys(
        ("use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"), "A and B are used otherwise"
    ),
}
# Initialisations that leave the base's weights as they are; others take the adapter's first product out of them.
_BEGINNINGS = (None, True, False, "", "gaussian", "eva", "orthogonal")
# The base of adapters must agree in these with that which they were trained on; shapes are compared one by one.
_OF_BASE = (
    *("dims", "rope_theta", "rope_scaling", "norm_eps", "multipliers"),
    *("local_rope", "score_scale", "score_cap", "logit_cap"),
)
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<letter>[AB])(?(kind)(\.default)?|\.weight)")
# Data parallelism, compilation and FSDP put these before the names of the modules that they wrap.
_WRAPPERS = re.compile(r"^module\.|\b(_orig_mod|_fsdp_wrapped_module)\.")
_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankUpdate:
    """The update scale · b · a of a weight [out, in], with a [rank, in] and b [out, rank]."""

    a: Tensor
    b: Tensor
    scale: float

    def rows(self, row: int, num_rows: int) -> Tensor:
        """Compute rows of the update in float32."""
        return self.scale * (self.b[row : row + num_rows].float() @ self.a.float())


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftAdapters:
    """The adapters of a directory, by the name of the base's tensor that they belong to.

    replaced: tensors that stand in the place of the base's. tensors: all of the file, by PEFT's names without prefix.
    """

    path: Path
    options: Mapping[str, Any]
    updates: Mapping[str, LowRankUpdate]
    replaced: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor] = field(repr=False)

    def other_base(self, model: ModelSpec) -> str:
        """Return the base that the options name, "" if path (in the hub: models--OWNER--NAME) or config has it."""
        named = str(self.options.get("base_model_name_or_path") or "").rstrip("/").rpartition("/")[2]
        own = (*model.path.resolve().parts, *str(model.hf_config.get("_name_or_path")).split("/"))
        return "" if named in {"", *(part.rpartition("--")[2] for part in own)} else named


def read_peft(path: Path, base: ModelSpec) -> PeftAdapters:
    """Map the adapters of a directory to memory, checked against the base that they are for; it may have either head.

    Raises:
        ConfigError: there are none, they are more or other than W + s·B·A, or they do not belong to this base.
    """
    options = _read_options(path)
    with reading(path / ADAPTER_CONFIG, "the options of PEFT's adapters", error=ConfigError):
        return _checked(path, options, base)


def _checked(path: Path, options: Mapping[str, Any], base: ModelSpec) -> PeftAdapters:
    tensors = {
        _WRAPPERS.sub("", name).removeprefix(PREFIX).replace(".default.weight", ".weight"): tensor
        for name, tensor in map_tensors(path / ADAPTER_FILE).items()
    }
    pairs: dict[str, dict[str, Tensor]] = {}
    replaced: dict[str, Tensor] = {}
    tied: set[str] = set()
    for name, tensor in tensors.items():
        if (found := _TENSOR.fullmatch(name)) is None:
            replaced[name.replace(".base_layer.", ".")] = tensor
        else:
            # An embedding [tokens, width] is added to as A.T · B.T.
            letter = {"A": "B", "B": "A"}[found["letter"]] if found["kind"] else found["letter"]
            pairs.setdefault(found["module"], {})[letter] = tensor.T if found["kind"] else tensor
    for head, embedding in base.copies().items():
        # Trained as one (`ensure_weight_tying`), and saved twice.
        if {head, embedding} <= replaced.keys() and same_bytes(replaced[head], replaced[embedding]):
            tied.add(head)
            del replaced[head]
    updates = {f"{module}.weight": _update(path, options, module, pair) for module, pair in pairs.items()}
    adapters = PeftAdapters(path=path, options=options, updates=updates, replaced=replaced, tensors=tensors)
    _check_base(adapters, base, tied)
    return adapters


def _read_options(path: Path) -> dict[str, Any]:
    file = path / ADAPTER_CONFIG
    if not file.is_file():
        also = "; it is a whole model, which needs no adapters" if (path / "config.json").is_file() else ""
        raise ConfigError(f"{path}: has no {ADAPTER_CONFIG}, expected a directory of adapters as PEFT writes it{also}")
    options = read_object(file, remedy="export the adapters again", error=ConfigError)
    if options.get("peft_type", "LORA") != "LORA":
        raise ConfigError(f"{file}: peft_type: got {options['peft_type']!r}, expected 'LORA'; {_MERGE_ELSEWHERE}")
    for key, meaning in _VARIANTS.items():
        if (value := options.get(key)) not in (None, False, "none", [], {}):
            raise ConfigError(f"{file}: {key}: got {value!r}, but {meaning}; {_MERGE_ELSEWHERE}")
    if (begun := options.get("init_lora_weights")) not in _BEGINNINGS:
        raise ConfigError(
            f"{file}: init_lora_weights: got {begun!r}, with which the base's weights are changed before training; "
            "convert the adapters with peft (path_initial_model_for_weight_conversion)"
        )
    for key, kind in (("r", int), ("lora_alpha", int | float)):
        if not isinstance(options.get(key), kind) or isinstance(options[key], bool) or options[key] <= 0:
            raise ConfigError(f"{file}: {key}: got {options.get(key)!r}, expected a positive number; export it again")
    if not (path / ADAPTER_FILE).is_file():
        pickled = f"; it has {_PICKLE}, a pickle, which can run code: load it with peft where you trust its author, and"
        remedy = f"{pickled} save it as safetensors" if (path / _PICKLE).is_file() else "; copy the directory again"
        raise ConfigError(f"{path}: has no {ADAPTER_FILE}{remedy}")
    return options


def _update(path: Path, options: Mapping[str, Any], module: str, pair: Mapping[str, Tensor]) -> LowRankUpdate:
    """Make a module's update of its A and B, with the rank and alpha that PEFT's patterns give it."""

    def own(key: str, default: Any) -> Any:
        patterns = options.get(key) or {}
        return next((patterns[each] for each in patterns if re.match(rf"(.*\.)?({each})$", module)), default)

    if missing := {"A", "B"} - pair.keys():
        raise ConfigError(f"{path}: {module} has no lora_{missing.pop()}; export the adapters again")
    rank, alpha = own("rank_pattern", options["r"]), own("alpha_pattern", options["lora_alpha"])
    a, b = pair["A"], pair["B"]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise ConfigError(
            f"{path}: {module}: A has shape {tuple(a.shape)} and B {tuple(b.shape)}, but {ADAPTER_CONFIG} gives it "
            f"rank {rank}; export the adapters again"
        )
    return LowRankUpdate(a=a, b=b, scale=alpha / rank**0.5 if options.get("use_rslora") else alpha / rank)


def _check_base(adapters: PeftAdapters, base: ModelSpec, tied: Collection[str]) -> None:
    """Raise ConfigError unless a base has all tensors of the adapters, and these are all that the adapters declare.

    tied: heads that the adapters change as they change the embedding.
    """
    path, options = adapters.path, adapters.options
    # Linear layers may be parts of tensors.
    low = adapter_spec(base, LoraConfig(rank=1, expert_rank=1)).expected_tensors()
    shapes: dict[str, tuple[int, ...]] = {
        name.replace(".lora_B.", "."): (shape[0], low[name.replace(".lora_B.", ".lora_A.")][1])
        for name, shape in low.items()
        if ".lora_B." in name
    }
    shapes |= base.expected_tensors() | base.expected_tensors(scalar_head=True)
    named = str(options.get("base_model_name_or_path"))
    is_same = Path(named).is_dir() and Path(named).samefile(base.path)
    # Without one here, or one that megarl reads, only shapes are compared.
    trained_on = base
    with suppress(ConfigError):
        trained_on = read_model_spec(named, quantized=("bitsandbytes", "fp8", "gptq", "awq", "mxfp4"))
    if fields := [each for each in _OF_BASE if getattr(trained_on, each) != getattr(base, each)]:
        raise ConfigError(
            f"{path}: was trained on {named!r}, whose config.json has other {', '.join(fields)} than that of "
            f"{base.path}; name that base"
        )
    remedy = _MERGE_ELSEWHERE if is_same else f"name the base that they were trained on, {named!r}"
    found: dict[str, tuple[int, ...]] = {
        name: (update.b.shape[0], update.a.shape[1]) for name, update in adapters.updates.items()
    }
    found |= {name: tuple(tensor.shape) for name, tensor in adapters.replaced.items()}
    if unknown := sorted(found.keys() - shapes.keys()):
        if base.dims.tied and OUTPUT_HEAD in unknown:
            remedy = f"{OUTPUT_HEAD} is also the embedding there, which the adapters would change; {_MERGE_ELSEWHERE}"
        raise ConfigError(
            f"{path}: has adapters or tensors of {unknown[:_NAMED]} ({len(unknown)} in all), which {base.path} lacks; "
            f"{remedy}"
        )
    for head, embedding in base.copies().items():
        if embedding in found and not (options.get("ensure_weight_tying") or head in tied):
            raise ConfigError(
                f"{path}: changes {embedding}, which {base.path} ties to {head} (tie_word_embeddings), but the head "
                f"was left as it was in training (ensure_weight_tying is not set); {_MERGE_ELSEWHERE}, with "
                "tie_word_embeddings=false in its config.json"
            )
    for name, shape in found.items():
        if shape != shapes[name]:
            raise ConfigError(f"{path}: {name}: has shape {shape}, that of {base.path} has {shapes[name]}; {remedy}")
    saved = ("embed_tokens", "lm_head", *(module.rpartition(".")[2] for module in options.get("modules_to_save") or ()))
    if other := [name for name in adapters.replaced if name.removesuffix(".weight").rpartition(".")[2] not in saved]:
        raise ConfigError(f"{path}: has the unexpected tensors {other[:_NAMED]}; {_MERGE_ELSEWHERE}")
    matrices = (name for name, shape in shapes.items() if len(shape) == 2)
    targeted = [name for name in matrices if _is_targeted(name.removesuffix(".weight"), options)]
    if missing := [name for name in targeted if name not in adapters.updates]:
        raise ConfigError(
            f"{path}: has no adapters of {missing[:_NAMED]} ({len(missing)} in all), which target_modules in "
            f"{ADAPTER_CONFIG} names; copy the directory or export the adapters again"
        )


def _is_targeted(module: str, options: Mapping[str, Any]) -> bool:
    """Return whether PEFT's options name a module. Which layers `all-linear` names, only PEFT knows."""

    def named(key: str) -> bool:
        if isinstance(value := options.get(key), str):
            return value != "all-linear" and re.fullmatch(value, module) is not None
        return any(module == each or module.endswith(f".{each}") for each in value or ())

    if not named("target_modules") or named("exclude_modules"):
        return False
    layers, place = options.get("layers_to_transform"), re.match(r".*?\.[^.]*\.(\d+)\.", module)
    if layers in (None, []) or isinstance(options["target_modules"], str):
        return True
    return place is not None and int(place[1]) in ([layers] if isinstance(layers, int) else layers)


def read_adapters(base: ModelSpec, config: LoraConfig, *, scalar_head: bool = False) -> dict[str, Tensor]:
    """Map the adapters in `config.path` to memory, by the names in `adapter_spec`; a scalar head may be among them.

    Raises:
        ConfigError: they have another rank, scale or targets than `config` says, or `read_peft` refuses them.
    """
    assert config.path is not None
    adapters, spec = read_peft(Path(config.path), base), adapter_spec(base, config)
    remedy = "or merge them into the base (megarl convert merge), and train new ones"
    if other := adapters.replaced.keys() - ({VALUE_HEAD} if scalar_head else set()):
        raise ConfigError(f"{config.path}: has {min(other)} as a whole, which this role does not train; {remedy}")
    expected = {
        name.replace(".lora_A.", "."): shape[0] for name, shape in spec.expected_tensors().items() if ".lora_A." in name
    }
    if wrong := sorted(expected.keys() ^ adapters.updates.keys()):
        kind = "has no adapters" if wrong[0] in expected else "has adapters"
        raise ConfigError(
            f"{config.path}: {kind} of {wrong[0]} ({len(wrong)} such in all), but lora.targets="
            f"{list(config.targets)}; set lora.targets to the layers that have adapters, {remedy}"
        )
    scale = config.alpha / config.rank
    for name, update in adapters.updates.items():
        if (rank := update.a.shape[0]) != expected[name]:
            key = "expert_rank" if expected[name] != config.rank else "rank"
            raise ConfigError(
                f"{config.path}: the adapters of {name} have rank {rank}, but lora says {expected[name]}; set "
                f"lora.{key}={rank}, {remedy}"
            )
        if not math.isclose(update.scale, scale):
            raise ConfigError(
                f"{config.path}: the adapters of {name} are scaled by {update.scale:g}, but lora.alpha / lora.rank "
                f"is {scale:g}; set lora.alpha={update.scale * config.rank:g}, {remedy}"
            )
    return dict(adapters.tensors)


def create_adapter_files(
    directory: Path, base: ModelSpec, config: LoraConfig, dtype: str, *, scalar_head: bool = False
) -> Path:
    """Write a directory for a model's adapters as PEFT reads it; its tensors, which it returns the file of, are 0."""
    directory.mkdir(parents=True, exist_ok=True)
    specs = weight_specs(adapter_spec(base, config), dtype, scalar_head=scalar_head)
    create_file(directory / ADAPTER_FILE, {f"{PREFIX}{name}": spec for name, spec in specs.items()})
    text = json.dumps(peft_config(base, config, scalar_head=scalar_head), indent=2) + "\n"
    (directory / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
    return directory / ADAPTER_FILE


def initial_tensor(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return an adapter's tensor before training, [float32]: B is 0, A uniform within ±1/√in.

    A depends on the seed and its name alone, so that all layouts begin with the same.
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    return (2 * torch.rand(shape, generator=generator) - 1) / shape[1] ** 0.5
