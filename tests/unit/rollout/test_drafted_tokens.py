"""What replaces two of vLLM's functions on CPUs, and that vLLM calls it."""

import inspect

import torch

# vLLM is imported in the tests alone: every process of a parallel session collects this file.


def test_each_request_s_value_is_repeated_for_its_drafted_tokens() -> None:
    """The first has two, the second none, the third three."""
    from megarl.rollout.cpu_patches import expand_to_tokens

    values, ends = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert expand_to_tokens(values, ends, 5).tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]
    some = expand_to_tokens(torch.tensor([0.0, 2.0]), torch.tensor([1, 3]), 3, replace_from=0, replace_to=1)
    assert some.tolist() == [1.0, 2.0, 2.0]
    assert expand_to_tokens(torch.tensor([5, 7]), torch.tensor([0, 0]), 0).tolist() == []


def test_logits_of_no_token_stay_as_they_are() -> None:
    from megarl.rollout.cpu_patches import truncate_drafted

    logits, top_k = torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([2])
    assert truncate_drafted(logits.clone(), top_k, None).tolist() == [[-torch.inf, 3.0, 2.0]]
    assert truncate_drafted(torch.zeros(0, 3), top_k[:0], None).shape == (0, 3)


def test_vllm_calls_them() -> None:
    from vllm.v1.sample import rejection_sampler

    from megarl.rollout.cpu_patches import expand_to_tokens, truncate_drafted

    assert rejection_sampler.expand_batch_to_tokens is expand_to_tokens
    assert rejection_sampler.apply_top_k_top_p is truncate_drafted
    caller = inspect.getsource(rejection_sampler.apply_sampling_constraints)
    assert "expand_batch_to_tokens(" in caller
    assert "apply_top_k_top_p(" in caller
