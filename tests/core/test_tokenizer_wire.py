"""A tokenizer sent to another process is the same tokenizer."""

from typing import Any

import msgspec
import pytest

from mini_infer.errors import ConfigError
from mini_infer.testing.tokenizers import byte_tokenizer, sentencepiece_tokenizer
from mini_infer.text.hf_tokenizer import HFTokenizer
from mini_infer.text.tokenizer_wire import TokenizerState

CHAT = [{"role": "user", "content": "hi <s> there<|stop|>"}, {"role": "assistant", "content": "well"}]


@pytest.mark.parametrize("make", [byte_tokenizer, sentencepiece_tokenizer])
def test_the_same_tokenizer_on_the_other_side(make: Any) -> None:
    ours = HFTokenizer(make().hf())
    wire = msgspec.msgpack.encode(TokenizerState.of(ours))
    theirs = msgspec.msgpack.decode(wire, type=TokenizerState).open()
    for text in ("hello  there", "héllo 😀<|u|>x", "", "<s> a"):
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.encode_plain(text) == ours.encode_plain(text)
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    assert theirs.apply_chat_template(CHAT) == ours.apply_chat_template(CHAT)
    for name in ("vocab_size", "valid_ids", "eos_token_ids", "bos_token_id", "has_chat_template"):
        assert getattr(theirs, name) == getattr(ours, name), name


def test_a_tokenizer_of_another_kind_cannot_be_sent() -> None:
    with pytest.raises(ConfigError, match="HFTokenizer"):
        TokenizerState.of(object())  # type: ignore[arg-type]
