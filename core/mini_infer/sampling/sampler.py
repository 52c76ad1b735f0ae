"""The reference sampler: batched PyTorch for any device, in which no row's token depends on another row.

Contract: a row's token is x_t = argmax over v of (l_t(v) / T + g), the definition of ``Sampler``; l after penalties,
logit bias and invalid ids (``penalties``), then temperature, then top-k, top-p and min-p (``truncation``); ties go to
the lowest id. Everything is computed on (l - max l) / T, which no temperature overflows and which moves no argmax.

Noise is computed only for rows with a temperature, and only for tokens that may be drawn. Which rows need what is known
on the host, so nothing waits for a GPU. On a CPU, where looking at values costs nothing, short cuts look at them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mini_infer.interfaces.sampler import Sampler, SamplingRows
from mini_infer.sampling.greedy import argmax
from mini_infer.sampling.noise import NOISE_MAX, gumbel
from mini_infer.sampling.penalties import adjust_logits
from mini_infer.sampling.state import to_device
from mini_infer.sampling.truncation import truncate

if TYPE_CHECKING:
    from mini_infer.sampling.state import SamplingState

# A top-k up to that many is drawn from as many candidates. On a CPU, top-p tries as many before it sorts all tokens.
_NUM_CANDIDATES = 1024

# On a CPU, vocabularies from here on are looked through for tokens that cannot win before noise is made for the others.
_LARGE_VOCAB = 8192

_FLOAT32 = torch.finfo(torch.float32)


class ReferenceSampler(Sampler):
    """Temperature, top-k, top-p, min-p, penalties, logit bias and seeds."""

    def sample(self, logits: torch.Tensor, rows: SamplingRows, state: "SamplingState") -> torch.Tensor:
        """See ``Sampler.sample``."""
        logits = adjust_logits(logits, rows, state)
        tokens = argmax(logits)
        if not state.sampled_slots:
            return tokens
        small_top_k, nucleus, whole = _groups(rows.slots_host, state)
        if small_top_k:
            draws = _Draws.of(small_top_k, logits, rows, state)
            widest = max(state.top_k_slots[rows.slots_host[i]] for i in small_top_k)
            tokens[draws.index], _ = _draw_truncated(draws, state, widest)
        if nucleus:
            draws = _Draws.of(nucleus, logits, rows, state)
            tokens[draws.index] = _draw_nucleus(draws, state)
        if whole:
            draws = _Draws.of(whole, logits, rows, state)
            look_first = logits.device.type == "cpu" and state.vocab_size >= _LARGE_VOCAB
            tokens[draws.index] = _draw_possible(draws, state) if look_first else _draw_whole(draws, state)
        return tokens


def _groups(slots_host: list[int], state: "SamplingState") -> tuple[list[int], list[int], list[int]]:
    """Rows with a temperature: those with a small top-k, others with top-k or top-p, and those with neither."""
    small_top_k: list[int] = []
    nucleus: list[int] = []
    whole: list[int] = []
    for i, slot in enumerate(slots_host):
        if slot not in state.sampled_slots:
            continue
        top_k = state.top_k_slots.get(slot)
        if top_k is not None and top_k <= _NUM_CANDIDATES:
            small_top_k.append(i)
        elif top_k is not None or slot in state.top_p_slots:
            nucleus.append(i)
        else:
            whole.append(i)
    return small_top_k, nucleus, whole


@dataclass(frozen=True, slots=True)
class _Draws:
    """Rows that draw in one way: their row numbers, slots, positions, and z = (l - max l) / T."""

    index: torch.Tensor  # [num_draws] int64, into the step's rows
    slots: torch.Tensor  # [num_draws] int64
    positions: torch.Tensor  # [num_draws] int64
    scaled: torch.Tensor  # [num_draws, vocab_size] float32

    @classmethod
    def of(cls, mine: list[int], logits: torch.Tensor, rows: SamplingRows, state: "SamplingState") -> "_Draws":
        index = to_device(mine, torch.int64, logits.device)
        slots = rows.slots[index]
        scaled = logits.index_select(0, index)
        # A row of which nothing is left stays as it is instead of becoming NaN, and draws token 0.
        largest = scaled.amax(dim=1, keepdim=True).clamp_(_FLOAT32.min, _FLOAT32.max)
        scaled.sub_(largest).div_(state.temperature[slots, None])
        return cls(index, slots, rows.positions[index], scaled)

    def take(self, index: torch.Tensor) -> "_Draws":
        return _Draws(self.index[index], self.slots[index], self.positions[index], self.scaled.index_select(0, index))


def _draw_truncated(draws: _Draws, state: "SamplingState", num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [num_draws], and whether each was drawn from all tokens that it might be drawn from."""
    slots = draws.slots
    token_ids, values, complete = truncate(
        draws.scaled, state.top_k[slots], state.top_p[slots], state.min_p[slots], num_candidates=num_candidates
    )
    if values.device.type == "cpu":  # what may be drawn is a prefix
        width = max(1, int((values > -torch.inf).sum(dim=1).amax()))
        token_ids, values = token_ids[:, :width], values[:, :width]
    scores = values + gumbel(state.seeds[slots], draws.positions, state.choices[slots], token_ids=token_ids)
    wins = scores == scores.amax(dim=1, keepdim=True)
    return torch.where(wins, token_ids, state.vocab_size - 1).amin(dim=1), complete


def _draw_nucleus(draws: _Draws, state: "SamplingState") -> torch.Tensor:
    """Tokens [num_draws] of rows whose candidates cannot be counted beforehand."""
    vocab_size = state.vocab_size
    if draws.scaled.device.type != "cpu" or vocab_size <= _NUM_CANDIDATES:
        return _draw_truncated(draws, state, vocab_size)[0]
    tokens, complete = _draw_truncated(draws, state, _NUM_CANDIDATES)
    rest = complete.logical_not().nonzero()[:, 0]
    if rest.shape[0]:
        tokens[rest] = _draw_truncated(draws.take(rest), state, vocab_size)[0]
    return tokens


def _draw_whole(draws: _Draws, state: "SamplingState") -> torch.Tensor:
    """Tokens [num_draws] from the whole vocabulary, less what min-p drops."""
    slots, scaled = draws.slots, draws.scaled
    scaled.masked_fill_(scaled < state.min_p[slots, None].log(), -torch.inf)
    noise = gumbel(state.seeds[slots], draws.positions, state.choices[slots], vocab_size=state.vocab_size)
    return argmax(scaled.add_(noise))


def _draw_possible(draws: _Draws, state: "SamplingState") -> torch.Tensor:
    """As ``_draw_whole``, without the tokens that would lose to the most likely one with the largest noise there is."""
    slots, scaled = draws.slots, draws.scaled
    seeds, positions, choices = state.seeds[slots], draws.positions, state.choices[slots]
    to_beat = gumbel(seeds, positions, choices, token_ids=argmax(scaled)[:, None])  # the score of z = 0
    possible = (scaled >= torch.maximum(to_beat - NOISE_MAX, state.min_p[slots, None].log())).view(-1).nonzero()[:, 0]
    if 2 * possible.shape[0] > scaled.numel():
        return _draw_whole(draws, state)
    row = possible // state.vocab_size
    token_ids = (possible - row * state.vocab_size)[:, None]
    scores = scaled.view(-1)[possible] + gumbel(seeds[row], positions[row], choices[row], token_ids=token_ids)[:, 0]
    scaled.fill_(-torch.inf).view(-1)[possible] = scores
    return argmax(scaled)
