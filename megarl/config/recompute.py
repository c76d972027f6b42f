"""Define which activations of a model are computed again in backward instead of kept."""

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from megarl.config.setting import AT_LEAST_1, setting
from megarl.errors import ConfigError

RecomputedModule: TypeAlias = Literal[
    "core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"
]
# The kind of recompute that each further setting belongs to.
_BELONGS = {"recompute_modules": "selective", "recompute_layers": "full", "recompute_unit": "full"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfig:
    """Say what backward computes again, which saves memory and costs time."""

    # Activations that backward computes again: none, those of parts of a layer (selective), or of whole layers (full).
    # auto: the least with which the plan fits the devices, 80 GiB each if theirs are unknown; full on CPUs. Runs save
    # what was chosen.
    recompute: Literal["auto", "none", "selective", "full"] = "none"
    # With selective: the parts, by Megatron's names. mlp: the MLP of dense layers; moe: all of a layer's experts, with
    # their communication; shared_experts; moe_act: the products of gate and up in experts, with grouped GEMMs;
    # layernorm: norms that are not part of a matrix product; mla_up_proj: heads of latent attention; core_attn: scores,
    # which flash attention never keeps. null: mlp and moe.
    recompute_modules: tuple[RecomputedModule, ...] | None = None
    # With full: how many layers of each model chunk are recomputed, while the others keep everything; null: all.
    recompute_layers: int | None = setting(None, AT_LEAST_1)
    # With full: consecutive layers of which only the input of the first is kept; a divisor of a model chunk's layers.
    recompute_unit: int = setting(1, AT_LEAST_1)

    def check_recompute(self, key: str) -> None:
        """Raise ConfigError for settings that the kind of recompute does not use, or that do not combine."""
        # A critic has its own kind, which may use what the actor's does not.
        for each in (each for each in fields(self) if self.recompute != "none" and each.name in _BELONGS):
            value, kind = getattr(self, each.name), _BELONGS[each.name]
            if value != each.default and self.recompute != kind:
                raise ConfigError(
                    f"{key}.{each.name}: got {value} with {key}.recompute={self.recompute}, which does not use it; set "
                    f"{key}.recompute={kind}, or remove it"
                )
        if self.recompute_layers is not None and self.recompute_unit > 1:
            raise ConfigError(
                f"{key}.recompute_unit: got {self.recompute_unit} with {key}.recompute_layers={self.recompute_layers}, "
                "whose layers are recomputed one by one; remove one of them"
            )
        modules = self.recompute_modules or ()
        if "moe" in modules and (inner := [name for name in ("moe_act", "shared_experts") if name in modules]):
            raise ConfigError(
                f"{key}.recompute_modules: got moe and {' and '.join(inner)}, which moe includes; remove one of them"
            )

    def recompute_settings(self) -> dict[str, Any]:
        """Return the settings of this section by name, also when called on a section that inherits them."""
        return {each.name: getattr(self, each.name) for each in fields(RecomputeConfig)}

    def in_words(self) -> str:
        """Write what is recomputed, as in `full, 5 layers` or `moe_act, layernorm`."""
        if self.recompute == "selective":
            return ", ".join(self.recompute_modules or ("mlp", "moe"))
        if (count := self.recompute_layers) is not None and self.recompute == "full":
            return f"full, {count} layer{'s' if count > 1 else ''}"
        return self.recompute

    def modules_of(self, *, has_dense: bool, has_experts: bool) -> tuple[RecomputedModule, ...]:
        """Return which parts of layers are recomputed in a model with dense layers, with experts, or both."""
        if self.recompute != "selective":
            return ()
        present: dict[RecomputedModule, bool] = {"mlp": has_dense, "moe": has_experts}
        return self.recompute_modules or tuple(name for name, is_there in present.items() if is_there)
