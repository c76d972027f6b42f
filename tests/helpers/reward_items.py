"""Samples as judges get them."""

from collections.abc import Mapping
from typing import Any

from megarl.types import FinishReason, Prompt, Sample, prompt_segment
from megarl.types.judged import FinishedSample


def item(
    prompt: str, response: str, label: str, *, source: str = "d", extra_info: Mapping[str, Any] | None = None
) -> FinishedSample:
    """A response whose prompt's text is its uid too."""
    asked = Prompt(uid=prompt, token_ids=(1,), data_source=source, ground_truth=label, extra_info=extra_info or {})
    sample = Sample(
        uid=prompt, sample_index=0, seed=0, segments=(prompt_segment([1]),), finish_reason=FinishReason.STOP
    )
    return FinishedSample(prompt=asked, sample=sample, prompt_text=prompt, response=response)
