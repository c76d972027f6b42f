"""Check the policy's model against the configuration without torch, as first checks come before libraries load."""

from megarl.config.check_model import check_model
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.host.device.platform import platform
from megarl.parallel.backend import flex_obstacle, packs_attention
from megarl.weights.families import ModelSpec, read_model_spec
from megarl.weights.safetensors_headers import check_tensors


def open_model(config: Config, *, for_sft: bool = False) -> ModelSpec:
    """Read config.json and the checkpoint's headers; ConfigError for a model that family or layout cannot take, or
    that cannot read the data's images.
    """
    tower = None if config.data.image_key is None else config.actor.vision.train
    spec = read_model_spec(config.model.path, tower=tower)
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


def check_image_engines(config: Config) -> None:
    """Raise ConfigError for images that engines on this device would read otherwise than the trainer."""
    if config.data.image_key is None or platform().name != "cpu":
        return
    family = read_model_spec(config.model.path).family
    if family.sees_whole_images:
        raise ConfigError(
            f"data.image_key: got {config.data.image_key}, but tokens of an image attend to later ones in a model of "
            f"the family {family.name}, and vLLM's attention on CPUs is causal; sample on GPUs, or train on "
            "demonstrations, preferences or a teacher's log-probs, which needs no engine"
        )
