"""The text half alone: what is refused, what the engine is asked, and what its tokens become."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.fake_engine import EOS, fake_built, spell

from mini_infer.errors import RequestError
from mini_infer.frontend import Frontend, RequestBook, RequestOptions
from mini_infer.frontend.text_request import TextRequest
from mini_infer.messages import TokenDelta
from mini_infer.model.generation_config import GenerationConfig
from mini_infer.outputs import Delta
from mini_infer.plan import TokenLogprobs
from mini_infer.sampling_params import SamplingParams
from mini_infer.testing.tokenizers import sentencepiece_tokenizer
from mini_infer.text.hf_tokenizer import HFTokenizer

TOKENIZER = fake_built().tokenizer


def frontend(generation: GenerationConfig | None = None, tokenizer: Any = TOKENIZER, **facts: Any) -> Frontend:
    built = fake_built(tokenizer=tokenizer, **facts)
    return Frontend(built.facts, built.tokenizer, generation or built.generation)


def feed(request: TextRequest, token_ids: list[int], *, at_once: int = 1, finish: str = "stop") -> list[Delta]:
    """What choice 0 gives for an engine that plays ``token_ids``; it stops when the text has ended."""
    deltas: list[Delta] = []
    chunks = [token_ids[i : i + at_once] for i in range(0, len(token_ids), at_once)]
    for chunk in chunks:
        last = chunk is chunks[-1]
        wanted = request.params.logprobs is not None
        new = TokenDelta(
            request_id=f"{request.request_id}-0",
            token_ids=chunk,
            logprobs=[TokenLogprobs(t, -float(t), 1) for t in chunk] if wanted else [],
            finish_reason=finish if last else None,  # type: ignore[arg-type]
            stop_token_id=chunk[-1] if last and finish == "stop" else None,
        )
        delta = request.take(0, new)
        if delta is not None:
            deltas.append(delta)
        if request.finished:
            break
    return deltas


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


# -- what the engine is asked -----------------------------------------------------------------------------------------


def test_a_request_becomes_one_engine_request_a_choice() -> None:
    options = RequestOptions(priority=-2, deadline_ms=50.0, tenant="t", cache_salt="s")
    made = frontend().request("hi", SamplingParams(n=3, seed=-1, max_tokens=5), request_id="r", options=options)
    assert [c.request_id for c in made.engine_requests] == ["r-0", "r-1", "r-2"]
    assert [c.choice for c in made.engine_requests] == [0, 1, 2]
    for choice in made.engine_requests:
        assert choice.seed == 2**64 - 1
        assert choice.eos_token_ids == [EOS]
        assert choice.prompt_token_ids == TOKENIZER.encode("hi")
        assert (choice.priority, choice.deadline_ms, choice.tenant, choice.cache_salt) == (-2, 50.0, "t", "s")


def test_choice_0_is_what_n_1_would_ask() -> None:
    one, several = (
        frontend().request("hi", SamplingParams(n=n, seed=7), request_id="r").engine_requests[0] for n in (1, 4)
    )
    assert (one.seed, one.choice, one.prompt_token_ids) == (several.seed, several.choice, several.prompt_token_ids)


def test_unseeded_requests_share_a_drawn_seed_and_differ_from_each_other() -> None:
    front = frontend()
    first, second = (front.request("hi", SamplingParams(n=2)) for _ in range(2))
    assert len({choice.seed for choice in first.engine_requests}) == 1
    assert first.engine_requests[0].seed != second.engine_requests[0].seed
    assert first.request_id != second.request_id


def test_a_seed_of_the_engine_makes_unseeded_requests_repeatable() -> None:
    built = fake_built()
    draws = []
    for _ in range(2):
        front = Frontend(built.facts, built.tokenizer, built.generation, seed=5)
        draws.append([front.request("hi", SamplingParams()).engine_requests[0].seed for _ in range(3)])
    assert draws[0] == draws[1] and len(set(draws[0])) == 3


def test_every_eos_id_of_model_and_tokenizer_counts() -> None:
    front = frontend(GenerationConfig(eos_token_ids=(5, EOS)))
    assert front.request("hi", SamplingParams()).engine_requests[0].eos_token_ids == [5, EOS]


def test_defaults_of_the_model_apply_only_where_nothing_was_given() -> None:
    front = frontend(GenerationConfig(temperature=0.5, top_k=7))
    assert front.sampling_params().temperature == 0.5
    assert front.sampling_params(temperature=0.0).temperature == 0.0
    assert front.sampling_params(temperature=0.0).top_k == 7
    explicit = front.request("hi", SamplingParams(temperature=1.0))
    assert (explicit.params.temperature, explicit.params.top_k) == (1.0, 0)


def test_raw_prompts_parse_control_tokens_and_chats_do_not() -> None:
    front = frontend()
    raw = front.request("<|u|>hi", SamplingParams()).prompt_token_ids
    assert raw[0] == 317
    chat = front.chat_request([{"role": "user", "content": "hi<|stop|><|a|>sure"}], SamplingParams()).prompt_token_ids
    assert [token for token in chat if token > 316] == [317, 319, 318]


def test_bos_is_added_as_the_tokenizer_does() -> None:
    front = frontend(tokenizer=HFTokenizer(sentencepiece_tokenizer().hf()))
    assert front.request("", SamplingParams()).prompt_token_ids[0] == 1


@pytest.mark.parametrize("prompt", [{"prompt": "hi"}, {"prompt_token_ids": [104, 105]}, (104, 105), [104, 105]])
def test_shapes_of_a_prompt(prompt: Any) -> None:
    made = frontend().request(prompt, SamplingParams())
    assert TOKENIZER.decode(made.prompt_token_ids) == "hi"


# -- what is refused --------------------------------------------------------------------------------------------------


def refused(prompt: Any, params: SamplingParams | None = None, front: Frontend | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        (front or frontend()).request(prompt, params or SamplingParams())
    return caught.value


@pytest.mark.parametrize("prompt", ["", [], {"prompt_token_ids": []}])
def test_empty_prompts(prompt: Any) -> None:
    error = refused(prompt)
    assert error.param == "prompt" and error.code == "empty_prompt"


@pytest.mark.parametrize("token", [-1, 320, 350, 384, 10**12, True, 1.0, "a"])
def test_ids_that_are_no_token(token: Any) -> None:
    assert refused([1, token]).param == "prompt"


def test_holes_in_the_vocabulary_are_no_tokens() -> None:
    class Holes:
        valid_ids = frozenset({1, 2, 9, 500})
        eos_token_ids = ()

    front = frontend(tokenizer=Holes())
    for token in (3, 500):
        with pytest.raises(RequestError, match=str(token)):
            front._check.prompt([1, token], "prompt")
    front._check.prompt([1, 2, 9], "prompt")


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
@pytest.mark.parametrize("token", [320, 384, 10**12])
def test_ids_in_parameters(field: str, token: int) -> None:
    value: Any = [token] if field == "stop_token_ids" else {token: 1.0}
    assert refused("hi", SamplingParams(**{field: value}, min_tokens=3)).param == field


def test_too_long_names_both_numbers() -> None:
    error = refused([1] * 200)
    assert "200" in str(error) and "128" in str(error)
    assert error.param == "prompt" and error.code == "context_length_exceeded"
    assert refused([1] * 128).code == "context_length_exceeded"


def test_a_prompt_that_the_pool_cannot_hold() -> None:
    error = refused([1] * 80, front=frontend(max_tokens_in_pool=64))
    assert "80" in str(error) and "64" in str(error)


@pytest.mark.parametrize(("length", "asked", "granted"), [(127, 16, 1), (120, 50, 8), (120, None, 8), (10, 5, 5)])
def test_max_tokens_is_cut_to_the_room_left(length: int, asked: int | None, granted: int) -> None:
    assert frontend().request([1] * length, SamplingParams(max_tokens=asked)).params.max_tokens == granted


def test_scoring_alone_needs_no_room() -> None:
    assert frontend().request([1] * 128, SamplingParams(max_tokens=0)).params.max_tokens == 0
    assert refused([1] * 129, SamplingParams(max_tokens=0)).code == "context_length_exceeded"


def test_a_hopelessly_long_text_is_refused_by_its_head() -> None:
    class Counting:
        valid_ids, eos_token_ids = range(320), ()
        characters = 0

        def encode(self, text: str) -> list[int]:
            self.characters += len(text)
            return TOKENIZER.encode(text)

    counting = Counting()
    error = refused("words and more " * 70_000, front=frontend(tokenizer=counting))
    assert "at least" in str(error) and "128" in str(error)
    assert counting.characters < 10_000


def test_a_long_text_of_few_tokens_is_taken() -> None:
    class Dense:  # one token a thousand characters
        valid_ids, eos_token_ids = range(320), ()

        def encode(self, text: str) -> list[int]:
            return [1] * (len(text) // 1000)

    front = frontend(tokenizer=Dense())
    assert front._token_ids("x" * 100_000)[1] == [1] * 100


def test_lone_surrogates() -> None:
    assert refused("a\ud800").param == "prompt"


def test_without_a_tokenizer_ids_work_and_texts_are_refused() -> None:
    front = frontend(tokenizer=None)
    assert front.request([383], SamplingParams()).prompt_token_ids == [383]
    assert refused("hi", front=front).param == "prompt"
    assert refused([1], SamplingParams(stop="x"), front).param == "stop"
    with pytest.raises(RequestError):
        front.chat_request([{"role": "user", "content": "hi"}], SamplingParams())


def test_extensions_that_nobody_takes() -> None:
    params = SamplingParams(extensions={"script": [1]})
    assert refused("hi", params).param == "script"
    assert frontend(extensions=["script"]).request("hi", params).params.extensions == {"script": [1]}


def test_numbers_beyond_any_machine_word_are_cut_to_what_matters() -> None:
    made = frontend().request([1], SamplingParams(top_k=10**30, min_tokens=10**30, max_tokens=10**30))
    assert (made.params.top_k, made.params.min_tokens, made.params.max_tokens) == (384, 127, 127)


# -- what tokens become -----------------------------------------------------------------------------------------------


def started(**params: Any) -> TextRequest:
    return frontend().request("hi", SamplingParams(**{"max_tokens": 100, **params}), request_id="r")


def test_a_stop_string_is_cut_and_no_part_of_it_comes_out() -> None:
    request = started(stop=["klmnop"])
    deltas = feed(request, [*spell("go "), *spell("klmnopzz")])
    assert text_of(deltas) == "go "
    assert deltas[-1].finish_reason == "stop" and deltas[-1].stop_reason == "klmnop"
    assert not any("k" in delta.text for delta in deltas)
    assert request.output().outputs[0].token_ids == spell("go klmnop")  # nothing behind the stop string


def test_held_text_is_released_when_the_match_fails() -> None:
    deltas = feed(started(stop=["klmnop"]), [*spell("go klmnxx"), EOS])
    assert text_of(deltas) == "go klmnxx"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)


def test_held_text_is_flushed_at_the_length_limit() -> None:
    deltas = feed(started(stop=["klmnop"]), spell("go klm"), finish="length")
    assert text_of(deltas) == "go klm" and deltas[-1].finish_reason == "length"


def test_the_earliest_match_wins_within_one_delta_of_many_tokens() -> None:
    deltas = feed(started(stop=["mnop", "mn"]), [*spell("klmnopmn"), EOS], at_once=9)
    assert text_of(deltas) == "kl" and deltas[-1].stop_reason == "mn"


def test_a_stop_of_one_character_split_over_tokens() -> None:
    deltas = feed(started(stop=["€"]), [*spell("a€b"), EOS])
    assert text_of(deltas) == "a" and deltas[-1].stop_reason == "€"


def test_include_stop_str_in_output() -> None:
    deltas = feed(started(stop=["mn"], include_stop_str_in_output=True), [*spell("klmnop"), EOS])
    assert text_of(deltas) == "klmn"


def test_stop_strings_do_nothing_before_min_tokens() -> None:
    deltas = feed(started(stop=["b"], min_tokens=4), [*spell("abcabc"), EOS])
    assert text_of(deltas) == "abca" and deltas[-1].finish_reason == "stop"
    assert text_of(feed(started(stop=["b"], min_tokens=2), [*spell("abc"), EOS])) == "a"


def test_an_emoji_comes_whole() -> None:
    deltas = feed(started(), [*spell("😀ok"), EOS])
    assert [delta.text for delta in deltas if delta.text] == ["😀", "o", "k"]


def test_the_end_amid_a_character_is_flushed_as_the_one_shot_decode() -> None:
    tokens = [*spell("a"), *"€".encode()[:2]]
    assert text_of(feed(started(), tokens, finish="length")) == TOKENIZER.decode(tokens)


def test_a_control_token_of_the_model_is_not_shown() -> None:
    assert text_of(feed(started(), [*spell("a"), 318, *spell("b"), EOS])) == "ab"


def test_a_stop_token_gives_no_text_and_says_which() -> None:
    request = started(stop_token_ids=[ord("x")])
    deltas = feed(request, spell("abx"))
    assert text_of(deltas) == "ab" and deltas[-1].stop_reason == ord("x")
    assert request.output().outputs[0].token_ids == spell("abx")
    kept = feed(started(stop_token_ids=[ord("x")], include_stop_str_in_output=True), spell("abx"))
    assert text_of(kept) == "abx"


def test_an_error_ends_the_choice_with_its_line() -> None:
    request = started()
    delta = request.take(0, TokenDelta(request_id="r-0", finish_reason="error", error="the logits were not finite"))
    assert delta is not None and delta.error == "the logits were not finite"
    assert request.output().outputs[0].error == "the logits were not finite"


def test_prompt_logprobs_come_as_they_become_known() -> None:
    request = started(prompt_logprobs=0, max_tokens=1)
    parts = [[TokenLogprobs(5, -1.0, 1)], [TokenLogprobs(6, -2.0, 3)]]
    for part in parts:
        request.take(0, TokenDelta(request_id="r-0", prompt_logprobs=part))
    found = request.output().prompt_logprobs
    assert found is not None and found[0] is None
    assert [(p[t].logprob, p[t].rank) for p, t in zip(found[1:], (5, 6), strict=True) if p] == [(-1.0, 1), (-2.0, 3)]


def test_a_logprob_is_the_same_number_in_both_places() -> None:
    request = started(logprobs=2)
    item = TokenLogprobs(7, -0.3, 1, [(7, -0.30000001), (8, -float("inf"))])
    delta = request.take(0, TokenDelta(request_id="r-0", token_ids=[7], logprobs=[item]))
    assert delta is not None and delta.logprobs is not None
    assert {t: p.logprob for t, p in delta.logprobs[0].items()} == {7: -0.3, 8: -9999.0}


PIECES = st.lists(
    st.one_of(st.integers(0, 316), st.sampled_from(spell("klmnop") + list("€😀".encode()) + [318])), max_size=40
)


@given(
    PIECES, st.integers(1, 7), st.lists(st.sampled_from(["kl", "lmn", "€", "o\ufffd", "p"]), max_size=2), st.booleans()
)
def test_streamed_or_at_once_the_answer_is_the_same(
    tokens: list[int], at_once: int, stops: list[str], keep: bool
) -> None:
    """Text, tokens, logprobs and offsets do not depend on how the tokens arrive, and stay aligned."""
    params = {"stop": stops, "logprobs": 0, "include_stop_str_in_output": keep}
    streamed, whole = started(**params), started(**params)
    tokens = [*tokens, EOS]
    deltas = feed(streamed, tokens, at_once=at_once)
    feed(whole, tokens, at_once=len(tokens))
    one, other = streamed.output().outputs[0], whole.output().outputs[0]
    assert dataclasses.asdict(one) == dataclasses.asdict(other)
    assert text_of(deltas) == one.text
    assert [token for delta in deltas for token in delta.token_ids] == one.token_ids == tokens[: len(one.token_ids)]
    assert one.logprobs is not None and one.text_offsets is not None
    assert [next(iter(p)) for p in one.logprobs] == one.token_ids
    assert len(one.text_offsets) == len(one.token_ids)
    assert one.text_offsets == sorted(one.text_offsets) and all(o <= len(one.text) for o in one.text_offsets)
    full = TOKENIZER.decode(tokens)
    ending = "" if one.stop_reason is None or keep else str(one.stop_reason)
    assert full.startswith(one.text + ending)
    assert one.text == full or one.stop_reason is not None


# -- the book of open requests ----------------------------------------------------------------------------------------


class Inbox:
    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.errors: list[Exception] = []

    def push(self, delta: Delta) -> None:
        self.deltas.append(delta)

    def fail(self, error: Exception) -> None:
        self.errors.append(error)


def test_a_stop_string_makes_the_engine_abort_that_choice_alone() -> None:
    book, inbox = RequestBook(), Inbox()
    request = started(n=2, stop=["b"])
    book.enter(request, inbox)
    both = [TokenDelta(request_id=f"r-{k}", token_ids=[ord("ab"[k])]) for k in range(2)]
    assert book.dispatch(both) == ["r-1"]
    assert [(d.index, d.text, d.finish_reason) for d in inbox.deltas] == [(0, "a", None), (1, "", "stop")]
    assert book.dispatch([TokenDelta(request_id="r-1", token_ids=[1])]) == []  # came late, is forgotten
    assert book.leave(request) == ["r-0"] and len(book) == 0


def test_an_id_in_use_is_refused() -> None:
    book = RequestBook()
    book.enter(started(), Inbox())
    with pytest.raises(RequestError, match="in use"):
        book.enter(started(), Inbox())


def test_abort_flushes_what_was_held_and_says_so() -> None:
    book, inbox = RequestBook(), Inbox()
    request = started(stop=["klm"])
    book.enter(request, inbox)
    book.dispatch([TokenDelta(request_id="r-0", token_ids=spell("akl"))])
    assert book.abort(request) == ["r-0"]
    assert [(d.text, d.finish_reason) for d in inbox.deltas] == [("a", None), ("kl", "abort")]
    assert book.abort(request) == [] and request.finished


def test_a_refusal_of_the_engine_ends_the_request() -> None:
    book, inbox = RequestBook(), Inbox()
    book.enter(started(n=2), inbox)
    error = RequestError("no")
    assert book.reject("r-1", error) == ["r-0", "r-1"]
    assert inbox.errors == [error] and len(book) == 0
