"""Check the policy's model against the configuration, without torch: first checks come before libraries load."""

from collections.abc import Iterator
from pathlib import Path

from megarl.config.check_model import check_model
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.parallel.backend import flex_obstacle, packs_attention
from megarl.weights.families import ModelSpec, read_model_spec
from megarl.weights.safetensors_headers import check_tensors


def adapter_warnings(config: Config) -> Iterator[str]:
    """Yield a warning for each role whose given adapters were trained on a base of another name."""
    for key in ("actor", "critic", "reward_model"):
        section = getattr(config, key)
        if section.lora is not None and section.lora.path is not None:
            from megarl.weights.peft_files import read_peft

            model = config.model.path if key == "actor" else section.model_path or config.model.path
            if named := read_peft(Path(section.lora.path), spec := read_model_spec(model)).other_base(spec):
                yield f"{key}.lora.path: the adapters were trained on {named}, by adapter_config.json; is that {model}?"


def open_model(config: Config, *, for_sft: bool = False) -> ModelSpec:
    """Read config.json and the checkpoint's headers; ConfigError for a model that family or layout cannot take."""
    spec = read_model_spec(config.model.path)
    check_model(config, spec.hf_config, for_sft=for_sft, biased_experts=spec.family.linear_biases)
    layers, cp, chosen = range(spec.dims.num_layers), config.actor.layout.cp, config.actor.prefix_attention
    own = chosen == "flex" or any(packs_attention(spec.attention_of(layer), cp=cp) for layer in layers)
    if config.run.batch_invariant and own:
        raise ConfigError(
            f"run.batch_invariant: got true, but with actor.layout.cp={cp} and actor.prefix_attention="
            f"{chosen or 'null'} Transformer Engine does not compute this model's attention, and the results of "
            "megarl's own depend on the rows beside; set it to false"
        )
    if chosen == "flex" and (obstacle := flex_obstacle(spec)) is not None:
        raise ConfigError(
            f"actor.prefix_attention: got flex for a model with {obstacle}; set actor.prefix_attention=null"
        )
    check_tensors(spec.path, spec.expected_tensors(), ignored=spec.ignored_tensors(), copies=spec.copies())
    if config.actor.lora is not None and config.actor.lora.path is not None:
        from megarl.weights.adapter_files import read_adapters

        read_adapters(spec, config.actor.lora)
    return spec
