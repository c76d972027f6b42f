"""Rewards of a whole rollout batch."""

from collections.abc import Callable, Sequence

from megarl.errors import DataError
from megarl.rewards.sources import score
from megarl.types import Prompt, Reward, RolloutBatch, Sample


class RewardManager:
    """Scores the text of every sample, whatever made it stop, with the scorer of its prompt's data source."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode` turns response token ids into text; see `megarl.data.chat.response_decoder`."""
        self._decode = decode

    def score(self, batch: RolloutBatch) -> list[Reward]:
        """Rewards in the order of `batch.samples`; DataError names a sample with a bad ground truth."""
        return [self._score_sample(batch.prompts[sample.uid], sample) for sample in batch.samples]

    def _score_sample(self, prompt: Prompt, sample: Sample) -> Reward:
        response = self._decode(sample.response_token_ids.tolist())
        try:
            return score(prompt.data_source, response, prompt.ground_truth, prompt.extra_info)
        except DataError as error:
            raise DataError(f"sample {sample.uid}/{sample.sample_index}: {error}") from error
