"""The most likely token of each row, and whether the row is fit to be drawn from."""

import torch

_BLOCK = 64


def argmax(values: torch.Tensor) -> torch.Tensor:
    """[num_rows] int64, the lowest id of each row's maximum. On a CPU, maxima of blocks are far quicker than ids."""
    if values.device.type != "cpu" or values.shape[1] % _BLOCK:
        return values.argmax(dim=1)
    blocks = values.reshape(values.shape[0], -1, _BLOCK)
    best = blocks.amax(dim=2).argmax(dim=1)
    return best * _BLOCK + blocks[torch.arange(len(blocks)), best].argmax(dim=1)


def all_finite(logits: torch.Tensor) -> torch.Tensor:
    """[num_rows] bool. NaN and both infinities show in the extremes: no mask of the logits' size is made."""
    return torch.isfinite(logits.amax(dim=-1)) & torch.isfinite(logits.amin(dim=-1))


def greedy(logits: torch.Tensor, invalid_token_ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``Sampler.greedy``, in PyTorch."""
    logits = logits.float()
    ok = all_finite(logits)
    if invalid_token_ids is not None:
        logits.index_fill_(1, invalid_token_ids, float("-inf"))
    return argmax(logits), ok
