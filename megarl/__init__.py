"""Train language models by reinforcement learning (post-training) on Megatron-Core, vLLM and Ray."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.run.session import Session

__version__ = "0.1.0"
__all__ = ["Session", "__version__"]

if not TYPE_CHECKING:  # with it, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Import what needs torch and Ray on first use."""
        if name != "Session":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from megarl.run.session import Session

        return Session
