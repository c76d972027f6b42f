"""Define the sections `teacher` and `teachers`: models whose distributions the policy learns."""

from dataclasses import dataclass

from megarl.config.layout import LayoutConfig
from megarl.config.setting import AT_LEAST_1, POSITIVE, URL, setting
from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """Configure a teacher, for algorithms that distil it (`algo.distill`): on Megatron, or behind servers."""

    # Layout of the teacher, as for reference.layout; null: the actor's layout and processes.
    layout: LayoutConfig | None = None
    # Directory or hub id of the teacher; null with algo.distill.teacher=hint: the policy itself. With servers, its
    # tokenizer and template are compared with the policy's.
    model_path: str | None = None
    # Tokens in one micro-batch on one data-parallel rank; null: actor.micro_batch_tokens.
    micro_batch_tokens: int | None = setting(None, AT_LEAST_1)
    # Addresses of OpenAI-compatible servers that serve the teacher with log-probs of prompts, as vLLM does, such as
    # [http://host:8000/v1]; []: the teacher runs on Megatron.
    servers: tuple[str, ...] = setting((), URL, needs_trust=True)
    # Addresses of such servers that write demonstrations (algo.demonstrations.source=teacher); []: those of servers.
    writers: tuple[str, ...] = setting((), URL, needs_trust=True)
    served_name: str | None = None  # Name of the model there; null: model_path.
    # Environment variable with the key that servers ask for; null: none.
    api_key_env: str | None = setting(None, needs_trust=True)
    timeout_s: float = setting(300.0, POSITIVE)  # Time limit for an answer of a server.
    # teachers: data sources and environments whose samples it teaches; []: those of its name.
    sources: tuple[str, ...] = ()

    def check(self, key: str) -> None:
        """Raise ConfigError for settings that a teacher on Megatron, or one behind servers, does not read."""
        if self.servers:
            for name in ("layout", "micro_batch_tokens"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{key}.{name}: is set, but {key}.servers compute; remove either")
        elif not self.writers and (self.served_name is not None or self.api_key_env is not None):
            raise ConfigError(
                f"{key}: names a model or a key for servers, but {key}.servers is empty; list them, as in "
                "[http://host:8000/v1], or remove served_name and api_key_env"
            )
