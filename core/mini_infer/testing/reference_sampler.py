"""The next token by the definitions, for one request at a time: what every sampler is compared with.

Contract: numpy only, no code shared with the engine. Logits are adjusted in float32, as the definition
of the logits that are sampled from; probabilities and scores are float64. A sampler that adds in float32 may differ
where two scores are closer than rounding: compare tokens, and where they differ ask ``margin`` how close it was.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from mini_infer.sampling_params import SamplingParams

    Word = np.uint64 | NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's scores.

    Attributes:
        token_id: the token drawn.
        scores: [vocab_size] float64, l + T * g, in the logits' unit; -inf where a token may not be drawn.
        slack: how close top-k, top-p or min-p came to allowing other tokens, in the logits' unit.
    """

    token_id: int
    scores: "NDArray[np.float64]"
    slack: float = math.inf


def reference_next_token(
    logits: "NDArray[np.floating]",
    history: "Sequence[int]",
    num_prompt: int,
    params: "SamplingParams",
    seed: int,
    t: int,
    choice: int = 0,
    valid_vocab: int | None = None,
) -> int:
    """The token that a request draws.

    Args:
        logits: [vocab_size], raw, of the position before.
        history: prompt, output so far, and the drafts that precede the position.
        num_prompt: how many of them are the prompt.
        params: the request's.
        seed: unsigned, 64 bits.
        t: index in prompt + output of the token to be drawn; ``len(history)``.
        choice: which of the request's ``n`` choices.
        valid_vocab: ids from here on are unknown to the tokenizer; None if all are known.
    """
    return draw(logits, history, num_prompt, params, seed, t, choice, valid_vocab).token_id


def margin(
    logits: "NDArray[np.floating]",
    history: "Sequence[int]",
    num_prompt: int,
    params: "SamplingParams",
    seed: int,
    t: int,
    choice: int = 0,
    valid_vocab: int | None = None,
    other: int | None = None,
) -> float:
    """By how much the token drawn beats the second best, or ``other``, noise included, in the logits' unit (l + T * g).

    Two correct engines may part where this is less than 1e-5 of the logits' standard deviation. It is also less where
    the last token that top-k, top-p or min-p keeps is about as likely as they ask for. Infinite if nothing else may be
    drawn.
    """
    drawn = draw(logits, history, num_prompt, params, seed, t, choice, valid_vocab)
    rest = np.delete(drawn.scores, drawn.token_id) if other is None else drawn.scores[other : other + 1]
    lead = float(drawn.scores[drawn.token_id] - rest.max()) if rest.size else math.inf
    return min(lead, drawn.slack)


def draw(
    logits: "NDArray[np.floating]",
    history: "Sequence[int]",
    num_prompt: int,
    params: "SamplingParams",
    seed: int,
    t: int,
    choice: int = 0,
    valid_vocab: int | None = None,
) -> Draw:
    """As ``reference_next_token``, with every token's score."""
    adjusted = adjusted_logits(logits, history[:num_prompt], history[num_prompt:], params)
    if valid_vocab is not None:
        adjusted[valid_vocab:] = -np.inf
    if params.temperature == 0.0:
        return Draw(int(np.argmax(adjusted)), adjusted.astype(np.float64))
    relative = adjusted.astype(np.float64) - float(adjusted.max())
    with np.errstate(over="ignore"):  # a tiny temperature leaves -inf, which never wins
        scaled = relative / params.temperature
    allowed, slack = allowed_tokens(scaled, params)
    scores = np.where(allowed, scaled + gumbel(seed, np.arange(len(scaled)), t, choice), -np.inf)
    return Draw(int(np.argmax(scores)), scores * params.temperature, slack * params.temperature)


def adjusted_logits(
    logits: "NDArray[np.floating]", prompt: "Sequence[int]", output: "Sequence[int]", params: "SamplingParams"
) -> "NDArray[np.float32]":
    """[vocab_size] float32 after repetition, frequency and presence penalties and bias, in that order."""
    adjusted = np.array(logits, dtype=np.float32)
    repetition = np.float32(params.repetition_penalty)
    frequency, presence = np.float32(params.frequency_penalty), np.float32(params.presence_penalty)
    for token in {*prompt, *output}:
        value = adjusted[token]
        adjusted[token] = value / repetition if value > 0 else value * repetition
    for token, count in Counter(output).items():
        adjusted[token] -= np.float32(count) * frequency
        adjusted[token] -= presence
    for token, bias in params.logit_bias.items():
        adjusted[token] += np.float32(bias)
    return adjusted


def allowed_tokens(scaled: "NDArray[np.float64]", params: "SamplingParams") -> "tuple[NDArray[np.bool_], float]":
    """Which tokens [vocab_size] top-k, top-p and min-p leave, in that order, and how close that was.

    Args:
        scaled: [vocab_size], (l - max l) / T.
        params: the request's.
    """
    order = np.lexsort((np.arange(len(scaled)), -scaled))  # falling, among equals the lower id first
    order = order[np.isfinite(scaled[order])]
    slack = math.inf
    if 0 < params.top_k < len(order):
        slack = scaled[order[params.top_k - 1]] - scaled[order[params.top_k]]
        order = order[: params.top_k]
    if params.top_p < 1.0:
        up_to = np.cumsum(np.exp(scaled[order])) / np.exp(scaled[order]).sum()
        num_kept = 1 + int((up_to[:-1] < params.top_p - 1e-12).sum())
        slack = min(slack, *np.abs(up_to[max(0, num_kept - 2) : num_kept] - params.top_p))
        order = order[:num_kept]
    if params.min_p > 0.0:
        distance = scaled[order] - math.log(params.min_p)
        slack = min(slack, *np.abs(distance[1:]), math.inf)
        order = order[distance >= 0.0]
    allowed = np.zeros(len(scaled), dtype=np.bool_)
    allowed[order] = True
    return allowed, float(slack)


def gumbel(seed: int, token_ids: "NDArray[np.int64]", t: int, choice: int) -> "NDArray[np.float64]":
    """g = -ln(-ln u) of each token, rounded to float32."""
    counter = (token_ids.astype(np.uint64), np.uint64(t), np.uint64(choice), np.uint64(0))
    word = philox4x32_10(counter, (np.uint64(seed % 2**32), np.uint64(seed // 2**32)))[0]
    u = (word.astype(np.float64) + 0.5) / 2**32
    return (-np.log(-np.log(u))).astype(np.float32).astype(np.float64)


def philox4x32_10(
    counter: "tuple[Word, Word, Word, Word]", key: "tuple[Word, Word]"
) -> "tuple[Word, Word, Word, Word]":
    """Philox4x32-10 as its paper gives it (Salmon et al., SC'11); 32-bit words in uint64, whose products are exact."""
    low_word, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1 = (product1 >> half) ^ c1 ^ k0, product1 & low_word
        c2, c3 = (product0 >> half) ^ c3 ^ k1, product0 & low_word
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low_word, (k1 + np.uint64(0xBB67AE85)) & low_word
    return c0, c1, c2, c3
