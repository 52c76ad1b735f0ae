"""``mini_infer.flash_attention`` calls every build alike, picks the right one, and says why there is none."""

import sys
from typing import Any

import pytest
import torch
from tests.plugins.flash_attention.fake_libraries import CONTENT, attend, only, pages, varlen_3_beta

from mini_infer.errors import ConfigError
from mini_infer.flash_attention import find_build, find_flash_attention, missing_flash_attention
from mini_infer.interfaces import KVCacheSpec

BUILDS = {"vfa3": (9, 0), "flash_attn_interface": (9, 0), "flash_attn": (8, 0)}
SPEC = KVCacheSpec("full", 2, 16, 16, "bfloat16")


def install(monkeypatch: pytest.MonkeyPatch, *names: str, capability: tuple[int, int] = (9, 0)) -> None:
    for module, content in only(*names).items():
        monkeypatch.setitem(sys.modules, module, content)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


class Step:
    """Three rows between tokens of others; keys of rows lie in blocks, those of this step beside the query."""

    query_lens = (3, 1, 5)
    seq_lens = (9, 4, 5)

    def __init__(self, block_size: int, uniform: bool = False) -> None:
        torch.manual_seed(0)
        self.uniform = uniform
        if uniform:
            self.query_lens = (3, 3, 3)
        before = 0 if uniform else 2
        self.starts = torch.tensor([before, *self.query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        num_tokens = int(self.starts[-1]) + before
        self.query = torch.randn(num_tokens, 4 * 16 + 7)[:, : 4 * 16].unflatten(1, (4, 16))  # gaps between tokens
        self.fresh = torch.randn(2, num_tokens, 2, 16)
        self.cache = torch.randn(2, 9, block_size, 2, 16)
        self.table = torch.tensor([[5, 2, 7], [3, 0, 0], [8, 6, 0]], dtype=torch.int32)
        self.out = torch.full(self.query.shape, -7.0)

    def call(self, attention: Any, window: int, *, paged: bool = True) -> torch.Tensor:
        keys, values = self.cache if paged else self.fresh
        lens = self.seq_lens if paged else self.query_lens
        attention(
            self.query,
            keys,
            values,
            self.out,
            cu_seqlens_q=self.starts,
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            max_query_len=max(self.query_lens),
            max_seq_len=self.table.shape[1] * self.cache.shape[2],
            block_table=self.table if paged else None,
            scale=0.3,
            window=window,
            uniform=self.uniform,
        )
        return self.out

    def expected(self, window: int, *, paged: bool = True) -> torch.Tensor:
        out = torch.full(self.query.shape, -7.0)
        for row, length in enumerate(self.seq_lens):
            tokens = slice(int(self.starts[row]), int(self.starts[row + 1]))
            keys, values = (pages(x, self.table[row], length) for x in self.cache)
            if not paged:
                keys, values = self.fresh[:, tokens]
            out[tokens] = attend(self.query[tokens], keys, values, 0.3, True, (window, 0))
        return out


@pytest.mark.parametrize("window", [-1, 2])
@pytest.mark.parametrize("build", BUILDS)
def test_each_build_writes_its_rows_and_no_others(build: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, build, capability=BUILDS[build])
    attention = find_build("cuda").load()
    block_size = 256 if build == "flash_attn" else 4
    for step, paged in ((Step(block_size), True), (Step(block_size, uniform=True), True), (Step(4), False)):
        torch.testing.assert_close(step.call(attention, window, paged=paged), step.expected(window, paged=paged))


def test_an_answer_of_several_things(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn_interface")
    monkeypatch.setattr(sys.modules["flash_attn_interface"], "flash_attn_varlen_func", varlen_3_beta)
    step = Step(4)
    torch.testing.assert_close(step.call(find_build("cuda").load(), -1, paged=False), step.expected(-1, paged=False))


@pytest.mark.parametrize(
    ("installed", "capability", "module"),
    [
        (tuple(BUILDS), (9, 0), "vfa3"),
        (("flash_attn", "flash_attn_interface"), (9, 0), "flash_attn_interface"),
        (tuple(BUILDS), (8, 0), "flash_attn"),
        (("flash_attn",), (9, 0), "flash_attn"),
        (("vfa3", "flash_attn"), (12, 0), "flash_attn"),
    ],
)
def test_the_build_that_suits_the_card(
    installed: tuple[str, ...], capability: tuple[int, int], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *installed, capability=capability)
    assert find_build("cuda").module == module
    takes_any_block = find_flash_attention(SPEC, "cuda") is not None
    assert takes_any_block == (module != "flash_attn")


def test_none_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    said = (
        "it needs one of FlashAttention-3's kernels (module vfa3), FlashAttention-3 (module flash_attn_interface), "
        "flash-attn 2 (module flash_attn): pip install 'mini-infer[flash]'"
    )
    assert missing_flash_attention() == said
    with pytest.raises(ConfigError) as caught:
        find_build("cuda")
    assert str(caught.value) == said
    assert find_flash_attention(SPEC, "cuda") is None


def test_none_runs_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vfa3", capability=(8, 9))
    assert missing_flash_attention() is None
    with pytest.raises(ConfigError, match=r"\(module vfa3\) does not run on compute capability 8\.9"):
        find_build("cuda")


def test_a_broken_build_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vfa3")
    monkeypatch.delattr(sys.modules["vfa3"], "fwd")
    with pytest.raises(ConfigError, match="is installed but cannot be used: module 'vfa3' has no attribute 'fwd'"):
        find_build("cuda").load()
    with pytest.raises(ConfigError, match="is installed but cannot be used"):
        find_flash_attention(SPEC, "cuda")


@pytest.mark.parametrize(
    "spec", [KVCacheSpec("full", 2, 16, 16, "float32"), KVCacheSpec("full", 2, 20, 20, "bfloat16")]
)
def test_caches_that_no_build_serves(spec: KVCacheSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *CONTENT)
    assert find_flash_attention(spec, "cuda") is None
