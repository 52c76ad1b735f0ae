"""What a client may ask of sampling: one frozen, serialisable value, checked when it is made.

Field names and meanings are those of the OpenAI API and of vLLM's offline API. Everything that can be checked
without a model is checked here; token ids are checked against the vocabulary when a request is admitted.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from mini_infer.errors import RequestError

MAX_STOPS = 4
MAX_CHOICES = 128
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are drawn and when it ends.

    Attributes:
        n: number of choices; each counts as a request of its own with its own derived noise.
        temperature: 0 is greedy. 0 to 2 over HTTP; any finite value >= 0 here.
        top_p: smallest set of most likely tokens whose probability reaches it; 0 keeps the most likely alone.
        top_k: that many most likely tokens; 0 or -1 is off.
        min_p: drops tokens less likely than ``min_p`` times the most likely one.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output (CTRL).
        presence_penalty: subtracted from logits of tokens in the output.
        frequency_penalty: subtracted times the token's count in the output.
        logit_bias: token id -> value added to its logit, -100 to 100.
        seed: a signed 64-bit integer; None draws one at admission.
        max_tokens: most tokens to generate; None is all room left. 0 only scores the prompt.
        min_tokens: before that many tokens neither stop strings, stop ids nor EOS end the request.
        stop: up to four non-empty strings that end the text; cut from it unless ``include_stop_str_in_output``.
        stop_token_ids: ids that end the request.
        ignore_eos: EOS does not end the request; ``stop_token_ids`` still do.
        logprobs: that many most likely tokens with every generated one (0: the generated alone); None is off.
        prompt_logprobs: the same for the prompt's tokens.
        skip_special_tokens: control tokens leave no trace in the text.
        extensions: values for logits processors of plugins, by the processor's name.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    extensions: dict[str, Any] = {}

    def __post_init__(self) -> None:
        # Normalised once: everything downstream sees tuples and dicts; None, as in vLLM's API, is nothing of it.
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            listed = () if value is None else (value,) if isinstance(value, str) else value
            _check(isinstance(listed, Collection) and not isinstance(listed, bytes), name, "must be a list")
            msgspec.structs.force_setattr(self, name, tuple(listed))
        for name in ("logit_bias", "extensions"):
            value = getattr(self, name)
            _check(value is None or isinstance(value, dict), name, "must be a dict")
            msgspec.structs.force_setattr(self, name, value or {})
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            _check(isinstance(getattr(self, name), bool), name, "must be true or false")
        _check_integers(self)
        _check_numbers(self)
        _check_stops(self)
        _check_bias(self)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, however they were given."""
        return tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether no noise is added."""
        return self.temperature == 0.0


def _check(holds: bool, param: str, message: str) -> None:
    if not holds:
        raise RequestError(f"{param} {message}", param=param)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_integers(params: SamplingParams) -> None:
    _check(_is_int(params.n) and 1 <= params.n <= MAX_CHOICES, "n", f"must be an integer from 1 to {MAX_CHOICES}")
    _check(_is_int(params.top_k) and params.top_k >= -1, "top_k", "must be an integer >= 0, or -1 for off")
    seed = params.seed
    in_range = seed is None or (_is_int(seed) and -(2**63) <= seed < 2**63)
    _check(in_range, "seed", "must be an integer of 64 bits (from -2^63 to 2^63 - 1) or null")
    longest = params.max_tokens
    _check(longest is None or (_is_int(longest) and longest >= 0), "max_tokens", "must be an integer >= 0")
    _check(_is_int(params.min_tokens) and params.min_tokens >= 0, "min_tokens", "must be an integer >= 0")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        holds = value is None or (_is_int(value) and 0 <= value <= MAX_LOGPROBS)
        _check(holds, name, f"must be an integer from 0 to {MAX_LOGPROBS}")


def _check_numbers(params: SamplingParams) -> None:
    def number(name: str, low: float, high: float, says: str) -> None:
        value = getattr(params, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        _check(is_number and low <= value <= high, name, says)

    number("temperature", 0.0, 1e6, "must be a finite number >= 0")
    number("top_p", 0.0, 1.0, "must be a number from 0 to 1")
    number("min_p", 0.0, 1.0, "must be a number from 0 to 1")
    number("presence_penalty", -2.0, 2.0, "must be a number from -2 to 2")
    number("frequency_penalty", -2.0, 2.0, "must be a number from -2 to 2")
    number("repetition_penalty", 1e-3, 1e3, "must be a number from 0.001 to 1000")


def _check_stops(params: SamplingParams) -> None:
    _check(len(params.stop) <= MAX_STOPS, "stop", f"takes at most {MAX_STOPS} strings")
    _check(all(isinstance(s, str) and s for s in params.stop), "stop", "must hold non-empty strings")
    _check(all(_is_int(i) and i >= 0 for i in params.stop_token_ids), "stop_token_ids", "must hold token ids >= 0")


def _check_bias(params: SamplingParams) -> None:
    bias = params.logit_bias
    _check(len(bias) <= MAX_LOGIT_BIAS, "logit_bias", f"takes at most {MAX_LOGIT_BIAS} entries")
    _check(all(_is_int(i) and i >= 0 for i in bias), "logit_bias", "must map token ids >= 0")
    _check(
        all(isinstance(v, int | float) and -100 <= v <= 100 for v in bias.values()),
        "logit_bias",
        "values must be -100 to 100",
    )
