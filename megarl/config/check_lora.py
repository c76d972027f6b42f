"""Check the settings of adapters: which kinds of layers can have them, and how they reach the engines."""

from megarl.config.lora import ENGINE_RANKS, LoraConfig, sent_alone
from megarl.config.schema import ActorConfig, Config, role_settings
from megarl.errors import ConfigError
from megarl.host.device.platform import platform


def check_lora(config: Config) -> None:
    """Raise ConfigError for adapters on layers that cannot have them, and for those neither trained nor read."""
    for role, settings in role_settings(config).items():
        if settings.lora is not None:
            _check_role(f"{role}.lora", settings, settings.lora)
    frozen = {"critic": config.critic.lora if config.critic.freeze else None, "reward_model": config.reward_model.lora}
    for role, lora in frozen.items():
        if lora is not None and lora.path is None:
            raise ConfigError(
                f"{role}.lora.path: is not set, but these adapters are not trained; set it to a directory with "
                f"some, or {role}.lora=null"
            )


def _check_role(key: str, settings: ActorConfig, lora: LoraConfig) -> None:
    if "experts" in lora.targets and (etp := settings.layout.etp) > 1:
        raise ConfigError(
            f"{key}.targets: got experts with layout.etp={etp}, but ranks would have to exchange what tokens of other "
            "experts' adapters add; set etp=1 and raise ep, or leave experts out"
        )
    if settings.fp8 is not None:
        raise ConfigError(f"{key}: got adapters with actor.fp8={settings.fp8}, whose layers have no place for them")


def check_lora_sync(config: Config) -> None:
    """Raise ConfigError for adapters that `auto` would merge into bfloat16, or that cannot be sent alone."""
    lora = config.actor.lora
    if lora is None:
        return
    where = f"actor.lora.sync: got {lora.sync}"
    if sent_alone(lora) is None:
        if lora.sync == "auto" and config.model.dtype == "bfloat16":
            raise ConfigError(
                f"{where} with model.dtype=bfloat16 on {platform().name}, where adapters reach engines merged into the "
                "weights, and rounding to bfloat16 loses small updates (2% of the elements move in a first step); set "
                "model.dtype=float32, actor.lora.sync=adapter, which is slower on CPUs, or merged to accept that"
            )
        return
    if (rank := max(lora.rank, lora.expert_rank or 1)) > ENGINE_RANKS[-1]:
        raise ConfigError(
            f"actor.lora.rank: got {rank}, but vLLM makes room for ranks of at most {ENGINE_RANKS[-1]}; lower it, or "
            "set actor.lora.sync=merged"
        )
    conflicts = {
        "sync.delta=true": (config.sync.delta, "every element of an adapter changes in every step"),
        f"sync.dtype={config.sync.dtype}": (config.sync.dtype, "adapters are small, and sent as they are"),
        "rollout.engine.vllm.load_format=dummy": (
            config.rollout.engine.vllm.get("load_format") == "dummy",
            "engines have to read the base, which is never sent",
        ),
    }
    if found := [(name, why) for name, (is_set, why) in conflicts.items() if is_set]:
        name, why = found[0]
        raise ConfigError(f"{where} and {name}, but {why}; leave {name.partition('=')[0]} out, or set sync to merged")
