"""Read a model directory: determine its family (`*_families.py`), its sizes, and other settings that Megatron needs."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import megarl.weights.dense_families
import megarl.weights.expert_families  # noqa: F401
from megarl.config.vision import TowerPart
from megarl.errors import ConfigError
from megarl.host.reading import MODEL_REMEDY, read_object, require_file
from megarl.weights.attention import (
    AttentionOptions,
    check_layer_lists,
    read_local_layers,
    read_rotary_fraction,
    read_windows,
)
from megarl.weights.dims import Dims, Experts, read_dims
from megarl.weights.rope import (
    LATENT_ROPE_TYPES,
    ROPE_TYPES,
    LocalRope,
    PlainYarnRope,
    RopeScaling,
    YarnRope,
    read_rope_scaling,
    split_rope,
)
from megarl.weights.rules import MULTIPLIER_KEYS, Multipliers, read_multipliers
from megarl.weights.tables import FAMILIES, OUTPUT_HEAD, REFUSED, VALUE_HEAD, Family, Layers, WeightRule
from megarl.weights.towers import Tower, read_tower
from megarl.weights.twins import check_twins

__all__ = ["Dims", "Experts", "ModelSpec", "PlacedRule", "find_family", "read_hf_config", "read_model_spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRule:
    """A weight rule for a given layer and expert. `layer` or `expert` is None if the rule has no such index."""

    rule: WeightRule
    layer: int | None = None
    expert: int | None = None

    def name(self, pattern: str) -> str:
        """Fill `{layer}` and `{expert}` in one of the rule's names with the numbers of this layer and expert."""
        return pattern.format(layer=self.layer, expert=self.expert)


# The remedy for quantised weights, by `quant_method`.
_DEQUANTIZED = {"mxfp4": "write them in bfloat16 with `megarl convert dequantize {directory} --out DIR`, and use DIR"}
_EXTRA_PREDICTION = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The description of a model, read from its directory: family, sizes, and other settings that Megatron needs.

    score_scale: the factor of attention scores without what their rope adds, if not that of the heads' width.
    tower: what its images are read with; None: it reads texts alone.
    score_cap, logit_cap: c if attention scores, and the model's logits, are capped from x to c·tanh(x/c).
    """

    path: Path
    family: Family
    dims: Dims
    rope_theta: float
    rope_scaling: RopeScaling | YarnRope
    norm_eps: float
    multipliers: Multipliers = field(default_factory=Multipliers)
    max_positions: int
    hf_config: Mapping[str, Any]
    local_rope: LocalRope | None = None
    score_scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    tower: Tower | None = None

    def with_tower(self, part: TowerPart | None) -> "ModelSpec":
        """Return the spec of the model that reads images. part: what is trained of its tower; None: it reads none."""
        return self if part is None else replace(self, tower=read_tower(self.path, self.family, self.hf_config, part))

    @property
    def weights(self) -> tuple[WeightRule, ...]:
        """Return the weight rules of all parts that are trained."""
        return self.family.weights if self.tower is None else (*self.family.weights, *self.tower.trained)

    @property
    def sees_whole_images(self) -> bool:
        """Return whether the model reads images, and tokens of an image attend to each other, also to later ones."""
        return self.tower is not None and self.family.sees_whole_images

    @property
    def softmax_scale(self) -> float | None:
        """Return the factor of attention scores, or None where it is that of the heads' width.

        In layers with local rope, which is not scaled, it is `score_scale`.
        """
        factor = self.score_scale if self.multipliers.attention is None else self.multipliers.attention
        if isinstance(self.rope_scaling, PlainYarnRope):
            factor = (self.dims.head_dim**-0.5 if factor is None else factor) * self.rope_scaling.score_factor
        return factor

    def expected_tensors(self, *, scalar_head: bool = False, by_expert: bool = False) -> dict[str, tuple[int, ...]]:
        """Return name → full shape of every Hugging Face tensor of this model, layer by layer in table order.

        scalar_head: whether the model has a scalar head (critic, reward model) instead of the output embedding.
        by_expert: whether tensors of all experts of a layer are one for each expert, as a weight sync sends them.
        """
        absent, dim = OUTPUT_HEAD if scalar_head else VALUE_HEAD, self.dims.dim
        # There may be tens of thousands of tensors, but only a few distinct shapes, so compute each once.
        shapes = dict[str, tuple[int, ...]]()
        for rule in self.weights:
            rows = Counter[str]()
            for tensor in rule.tensors:
                name = tensor.sent_name if by_expert else tensor.name
                rows[name] += dim(tensor.shape[0])
                shape = (rows[name], *map(dim, tensor.shape[1:]))
                if tensor.of_expert and not by_expert:
                    shape = (dim("experts"), *(reversed(shape) if tensor.is_transposed else shape))
                shapes[name] = shape
        return {
            placed.name(name): shapes[name]
            for placed in self.rules()
            if not self.is_copy(placed.rule)
            for tensor in placed.rule.tensors
            if (name := tensor.sent_name if by_expert else tensor.name) != absent
        }

    def float32_tensors(self) -> frozenset[str]:
        """Return the names of tensors that are always float32, even if the model is in bfloat16."""
        rules = (placed for placed in self.rules() if placed.rule.is_float32)
        return frozenset(placed.name(tensor.name) for placed in rules for tensor in placed.rule.tensors)

    def ignored_tensors(self) -> tuple[str, ...]:
        """Return the names of tensors that are allowed in a checkpoint of this model but not trained; those that end in
        a dot are how names begin.
        """
        names = [name.format(layer=layer) for name in self.family.ignored for layer in range(self.dims.num_layers)]
        return (*self.copies(), *names, *self.untrained())

    def untrained(self) -> tuple[str, ...]:
        """Return the names of tensors that exports have as the model's files do; those that end in a dot are how names
        begin.
        """
        kept = set(self.family.untrained)
        if self.tower is not None and self.tower.trained:
            trained = {tensor.name for rule in self.tower.trained for tensor in rule.tensors}
            kept = (kept - self.family.vision.keys()) | (self.tower.names.keys() - trained)
        return (*self._extra_prediction_tensors(), *sorted(kept))

    def copies(self) -> dict[str, str]:
        """Return the name of each tensor that a checkpoint may contain although it copies another → that one's."""
        copied = [rule for rule in self.family.weights if self.is_copy(rule)]
        return {tensor.name: rule.tied_to for rule in copied for tensor in rule.tensors if rule.tied_to is not None}

    def _extra_prediction_tensors(self) -> Iterator[str]:
        """Yield the tensor names of multi-token-prediction layers. These follow the last layer, and megarl does not
        train them.
        """
        # Transformers 5 may write the second name.
        names, num_layers = ("num_nextn_predict_layers", "num_mtp_layers"), self.dims.num_layers
        count = next((self.hf_config[name] for name in names if self.hf_config.get(name)), 0)
        for layer in range(num_layers, num_layers + count):
            last = (placed for placed in self.rules() if placed.layer == num_layers - 1)
            yield from (
                replace(placed, layer=layer).name(tensor.name) for placed in last for tensor in placed.rule.tensors
            )
            yield from (f"model.layers.{layer}.{name}.weight" for name in _EXTRA_PREDICTION)

    def has(self, rule: WeightRule) -> bool:
        """Return whether the model has a rule's parameter: no size in its shape is 0."""
        return all(self.dims.dim(symbol) for tensor in rule.tensors for symbol in tensor.shape)

    def attention_of(self, layer: int) -> AttentionOptions:
        """Return the options of a layer's softmax attention."""
        return AttentionOptions(
            window=self.dims.windows[layer] if self.dims.windows else None,
            sinks=self.family.sinks,
            score_cap=self.score_cap,
            local_rope=None if self.local_rope is None else self.local_rope.layers[layer],
            softmax_scale=self.score_scale,
            wide_norms=self.family.wide_qk_norm,
            whole_images=self.sees_whole_images,
        )

    def is_copy(self, rule: WeightRule) -> bool:
        """Return whether a rule's parameter copies another tensor because this model's embeddings are tied."""
        return self.dims.tied and rule.tied_to is not None

    def rules(self, experts: range | None = None) -> Iterator[PlacedRule]:
        """Yield the weight rule of every parameter, for each layer and for each expert in `experts` (None: all)."""
        table = [rule for rule in self.weights if self.has(rule)]
        yield from (PlacedRule(rule=rule) for rule in table if "{layer}" not in rule.names[0])
        experts = range(self.dims.dim("experts")) if experts is None else experts
        for layer in range(self.dims.num_layers):
            kinds = (Layers.ALL, *self.dims.kinds_of(layer))
            for rule in (rule for rule in table if "{layer}" in rule.names[0] and rule.layers in kinds):
                numbers = experts if "{expert}" in rule.names[0] else (None,)
                yield from (PlacedRule(rule=rule, layer=layer, expert=expert) for expert in numbers)

    def parameter_rules(self, experts: range | None = None) -> dict[str, PlacedRule]:
        """Return Megatron parameter name → weight rule. Layer numbers in names are global, also with pipelining.

        experts: the experts of each layer that a rank holds (None: all); parameter names number them from 0.
        """
        first = experts.start if experts else 0
        return {
            name.format(layer=placed.layer, expert=None if placed.expert is None else placed.expert - first): placed
            for placed in self.rules(experts)
            for name in placed.rule.names
        }


def find_family(architectures: object, language: object = None) -> Family:
    """Return the family of a config's `architectures`. Raise ConfigError if none of them is known.

    language: the `model_type` of its language model, if that is a section.
    """
    names = tuple(architectures) if isinstance(architectures, list | tuple) else ()
    families = FAMILIES.entries().values()
    found = [each for each in families if {*names} & {*each.architectures, *each.value_architectures}]
    if len(found) > 1 and all(each.language for each in found):
        languages = {each.language: each for each in found}
        if language not in languages:
            raise ConfigError(
                f"config.json: text_config: model_type: got {language!r}, and {found[0].architectures[0]} is supported "
                f"with one of {', '.join(map(str, languages))}"
            )
        return languages[str(language)]
    if len(found) > 1:
        raise ConfigError(
            f"config.json: architectures: got {list(names)}, of {len(found)} families; keep the one of the weights"
        )
    if found:
        return found[0]
    for name in names:
        if name in REFUSED:
            raise ConfigError(f"model architecture {list(names)} is not supported: {REFUSED[name]}")
    known = sorted(a for family in families for a in family.architectures)
    raise ConfigError(
        f"model architecture {list(names)} is not supported; known: {known} "
        f"(a family is a table in megarl/weights/*_families.py)"
    )


def read_hf_config(directory: Path, key: str = "model.path") -> dict[str, Any]:
    """Read a model directory's config.json. Raises ConfigError; it names the setting `key` if the file is missing."""
    file = directory / "config.json"
    if (adapters := directory / "adapter_config.json").is_file() and not file.exists():
        raise ConfigError(
            f"{key}: {directory} holds adapters ({adapters.name}) and no model; set {key} to the model that they were "
            "trained on, and actor.lora.path to this directory"
        )
    expected, remedy = "the configuration of a Hugging Face model", f"correct {key}"
    require_file(file, expected, remedy=remedy, error=lambda text: ConfigError(f"{key}: {text}"))
    return read_object(file, remedy=MODEL_REMEDY, error=ConfigError)


def read_model_spec(
    path: str | Path,
    key: str = "model.path",
    *,
    quantized: Collection[str] = (),
    tower: TowerPart | None = None,
) -> ModelSpec:
    """Read and check a model directory's config.json. Errors name it or `key`, which configured the directory.

    quantized: the values of `quant_method` with which the weights may be quantised. tower: as in `with_tower`.
    """
    directory = Path(path)
    file, config = directory / "config.json", read_hf_config(directory, key)
    section = config.get("text_config")
    family = find_family(config.get("architectures"), section.get("model_type") if isinstance(section, dict) else None)
    try:
        check_twins(file, family, config)
        if family.section in config:
            # Where both have a value, such as whether embeddings are tied, the larger model's counts.
            config = {**config[family.section], **config}
        config = {**family.defaults, **config}
        check_layer_lists(file, family, config)
        _require_described(file, family, config, quantized)
        rope = {"rope_theta": config.get("rope_theta", 10000.0)}
        rope |= config.get("rope_parameters") or config.get("rope_scaling") or {}
        if family.ignored_rope:
            # The type named mrope is the default one, by positions with several axes, which texts do not have.
            rope = {key: each for key, each in rope.items() if key not in family.ignored_rope and each != "mrope"}
        dims, local_rope = read_dims(family, config), None
        if family.local_rope:
            rope, local_theta = split_rope(rope, config, str(file))
            local_rope = LocalRope(theta=local_theta, layers=read_local_layers(config))
        scalar = config.get("query_pre_attn_scalar")
        return ModelSpec(
            path=directory,
            family=family,
            dims=dims,
            rope_theta=float(rope["rope_theta"]),
            rope_scaling=read_rope_scaling(rope, str(file), LATENT_ROPE_TYPES if dims.latent else ROPE_TYPES),
            norm_eps=float(config["rms_norm_eps"]),
            multipliers=read_multipliers(family, config),
            max_positions=config["max_position_embeddings"],
            hf_config=config,
            local_rope=local_rope,
            score_scale=None if scalar is None else float(scalar) ** -0.5,
            score_cap=config.get("attn_logit_softcapping"),
            logit_cap=config.get("final_logit_softcapping"),
        ).with_tower(tower)
    except KeyError as error:
        raise ConfigError(f"{file}: key {error} is missing; it is needed for a {family.name} model") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file}: a number is of the wrong type ({error}); copy the model again") from error


def _require_described(file: Path, family: Family, config: Mapping[str, Any], quantized: Collection[str]) -> None:
    """Raise ConfigError if the config has options that the family's table does not describe."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if quantization and method not in quantized:
        remedy = _DEQUANTIZED.get(str(method), "use the model's weights in bfloat16").format(directory=file.parent)
        raise ConfigError(
            f"{file}: quantization_config: got quant_method {method!r}, expected none, since training on quantised "
            f"weights is not supported; {remedy}"
        )
    for key, values in family.required.items():
        if config.get(key, values[0]) not in values:
            remedy = f"other variants of {family.name} are not supported"
            if key == "model_type":
                remedy = "change it in the file: transformers and vLLM know the architecture only by this type"
            raise ConfigError(
                f"{file}: {key}: got {config[key]!r}, expected {' or '.join(map(repr, values))}; {remedy}"
            )
    options = {"sliding_window": bool(read_windows(config)), "partial_rotary_factor": read_rotary_fraction(config) < 1}
    options |= {key: key in config for key in MULTIPLIER_KEYS}
    for key, used in options.items():
        if used and key not in family.defaults:
            raise ConfigError(
                f"{file}: {key}: got {config.get(key)!r}, but {family.name} models have no such option; remove the key "
                f"if the model was trained without it"
            )
