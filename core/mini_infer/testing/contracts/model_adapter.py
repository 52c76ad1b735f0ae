"""The contract of ``ModelAdapter``: every weight in its place, and the same logits however a sequence is cut and mixed.

A checkpoint's tensors are given in any order, and with one missing, one too many, one of a wrong shape. The module then
runs over paged blocks with the core's reference attention: whole prompts, chunks, token by token, beside others, in any
blocks. What is computed is right only if it is also what the checkpoint's authors compute: a ``reference`` says that.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from mini_infer.errors import ConfigError
from mini_infer.interfaces import CausalLM, ModelAdapter, ModelConfig
from mini_infer.layers import Attention
from mini_infer.model.config import make_model_config, read_hf_config
from mini_infer.model.loading import load_module
from mini_infer.reference.attention import ReferenceAttention
from mini_infer.testing.batches import bind_caches, block_tables, pack_batch, run
from mini_infer.testing.contracts.model_watchers import Given, Sealed, Watching

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from mini_infer.interfaces import AttentionBackend

LENGTH = 24
NUM_BLOCKS = 128


def model_adapter_suite(
    make: Callable[[], ModelAdapter],
    checkpoint: Callable[[], Path],
    *,
    reference: Callable[[Path], Callable[[Sequence[int]], torch.Tensor]] | None = None,
    refuses: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> type[ModelAdapterSuite]:
    """Tests of a model family: ``TestMine = model_adapter_suite(MyAdapter, lambda: tiny_model("mine"))``.

    Args:
        make: a fresh adapter.
        checkpoint: a small checkpoint of random weights, standard deviation 0.2 or more: config.json and safetensors.
        reference: from that folder to a function from token ids to logits [num_tokens, vocab_size], by other code.
        refuses: values of config.json that ``check`` must refuse, each by itself, naming the key.
        device: where the model runs.
    """
    attributes = {
        "make": staticmethod(make),
        "checkpoint": staticmethod(checkpoint),
        "reference": staticmethod(reference or (lambda folder: None)),
        "refuses": dict(refuses or {}),
        "device": device,
    }
    return type("ModelAdapterSuite", (ModelAdapterSuite,), attributes)


class ModelAdapterSuite:
    """The tests; ``model_adapter_suite`` fills in what they are about."""

    refuses: ClassVar[dict[str, Any]]
    device: ClassVar[str]

    @staticmethod
    def make() -> ModelAdapter:
        raise NotImplementedError

    @staticmethod
    def checkpoint() -> Path:
        raise NotImplementedError

    @staticmethod
    def reference(folder: Path) -> Callable[[Sequence[int]], torch.Tensor] | None:
        raise NotImplementedError

    def config(self, dtype: str = "float32", **changes: Any) -> ModelConfig:
        """The checkpoint's config, with some keys changed."""
        folder = self.checkpoint()
        return make_model_config(read_hf_config(folder) | changes, device=self.device, dtype=dtype, path=folder)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All of the checkpoint's, by name."""
        from safetensors.torch import load_file

        return {n: t for file in sorted(self.checkpoint().glob("*.safetensors")) for n, t in load_file(file).items()}

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]] | None = None, dtype: str = "float32") -> nn.Module:
        """The module with the checkpoint's tensors, or with those given."""
        loader = Given(self.tensors.items() if tensors is None else tensors)
        return load_module(self.make(), loader, self.checkpoint(), self.config(dtype))

    def tokens(self, seed: int = 0, length: int = LENGTH) -> list[int]:
        """A random sequence."""
        rng = Random(seed)
        return [rng.randrange(self.config().vocab_size) for _ in range(length)]

    def whole(self, module: nn.Module, tokens: list[int], block_size: int = 4, seed: int = 0) -> torch.Tensor:
        """Logits of a sequence in one step, in random blocks."""
        backends = self.backends(module, block_size)
        tables = block_tables([len(tokens)], block_size, NUM_BLOCKS, seed)
        rows = [(len(tokens), len(tokens))]
        batch = pack_batch(rows, tables, block_size, token_ids=[tokens], device=self.device)
        return run(module, backends, batch)

    def backends(
        self, module: nn.Module, block_size: int = 4, backend: type[AttentionBackend] = Watching
    ) -> list[AttentionBackend]:
        """Caches full of NaN for each layer."""
        return bind_caches(module, backend, num_blocks=NUM_BLOCKS, block_size=block_size, device=self.device)

    def close(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Raise unless two logits are equal but for rounding."""
        assert found.shape == expected.shape, f"{what}: logits are {tuple(found.shape)}, not {tuple(expected.shape)}"
        found, expected = found.cpu(), expected.cpu()
        worst = ((found - expected).abs().max() / expected.std()).item()
        assert worst < 1e-4, f"{what}: logits are off by {worst:.3g} standard deviations"

    # -- what it says of itself ---------------------------------------------------------------------------------------

    def test_it_serves_its_checkpoint(self) -> None:
        adapter, config = self.make(), self.config()
        served = set(config.hf["architectures"]) & set(adapter.architectures)
        assert served, f"config.json has {config.hf['architectures']}, the adapter serves {adapter.architectures}"
        adapter.check(config)

    def test_it_refuses_what_it_cannot_honour(self) -> None:
        for key, value in self.refuses.items():
            with pytest.raises(ConfigError) as caught:
                self.make().check(self.config(**{key: value}))
            assert key in str(caught.value), f"the error for {key} = {value!r} does not name it: {caught.value}"

    # -- weights ------------------------------------------------------------------------------------------------------

    def test_it_is_built_without_memory(self) -> None:
        with torch.device("meta"):
            module = self.make().build(self.config())
        assert isinstance(module, CausalLM), f"{type(module).__name__} is no CausalLM"
        heavy = [name for name, parameter in module.named_parameters() if parameter.device.type != "meta"]
        assert not heavy, f"these took memory before they were wanted: {heavy}"
        layers = [layer for layer in module.modules() if isinstance(layer, Attention)]
        assert layers, "there is no mini_infer.layers.Attention in it, so nothing would be cached"

    def test_every_parameter_is_set_whatever_the_order(self) -> None:
        expected = dict(self.load().named_parameters())
        unset = [name for name, parameter in expected.items() if not parameter.isfinite().all()]
        assert not unset, f"these were never set, or not wholly: {unset}"
        shuffled = list(self.tensors.items())
        Random(0).shuffle(shuffled)
        for name, parameter in self.load(shuffled).named_parameters():
            assert torch.equal(parameter, expected[name]), f"{name} depends on the order of the checkpoint's tensors"

    def test_each_tensor_that_is_missing_is_named(self) -> None:
        for name in self.tensors:
            with pytest.raises(ConfigError) as caught:
                self.load((n, t) for n, t in self.tensors.items() if n != name)
            assert name in str(caught.value), f"{name} is missing, the error does not say so: {caught.value}"

    def test_each_tensor_of_a_wrong_shape_is_named_with_both_shapes(self) -> None:
        for name, tensor in self.tensors.items():
            wrong = tensor[:-1].clone()
            with pytest.raises(ConfigError) as caught:
                self.load((n, wrong if n == name else t) for n, t in self.tensors.items())
            said = str(caught.value)
            assert name in said, f"{name} has a wrong shape, the error does not say so: {said}"
            for shape in (wrong.shape, tensor.shape):
                assert str(shape[0]) in said, f"the error for {name} leaves out the shape {list(shape)}: {said}"

    def test_a_tensor_that_has_no_place_is_named(self) -> None:
        name = "model.layers.0.no_such_part.weight"
        with pytest.raises(ConfigError) as caught:
            self.load([*self.tensors.items(), (name, torch.zeros(3))])
        assert "no_such_part" in str(caught.value), f"the error does not name {name}: {caught.value}"

    # -- logits -------------------------------------------------------------------------------------------------------

    def test_logits_are_those_of_the_reference(self) -> None:
        reference, tokens = self.reference(self.checkpoint()), self.tokens()
        if reference is None:
            pytest.skip("no reference was given")
        self.close(self.whole(self.load(), tokens), reference(tokens), "against the reference")

    def test_neither_blocks_nor_their_size_matter(self) -> None:
        module, tokens = self.load(), self.tokens()
        expected = self.whole(module, tokens)
        for block_size in (1, 3, 16):
            for seed in (1, 2):
                self.close(self.whole(module, tokens, block_size, seed), expected, f"blocks of {block_size}")

    @pytest.mark.parametrize("chunks", [[1] * LENGTH, [5, 1, 1, 9, 8], [LENGTH - 1, 1]], ids=str)
    def test_a_prompt_can_be_cut_anywhere(self, chunks: list[int]) -> None:
        module, tokens = self.load(), self.tokens()
        expected = self.whole(module, tokens)
        backends = self.backends(module)
        tables = block_tables([LENGTH], 4, NUM_BLOCKS)
        done, parts = 0, []
        for count in chunks:
            ids = [tokens[done : done + count]]
            done += count
            batch = pack_batch([(count, done)], tables, 4, token_ids=ids, device=self.device)
            parts.append(run(module, backends, batch))
        self.close(torch.cat(parts), expected, f"in chunks of {chunks}")

    @pytest.mark.parametrize("seed", range(4))
    def test_rows_do_not_notice_each_other(self, seed: int) -> None:
        """Rows decode, others bring prompts or parts of them, padding behind."""
        module, rng = self.load(), Random(seed)
        sequences = [self.tokens(seed * 10 + index, rng.randint(2, LENGTH)) for index in range(5)]
        expected = [self.whole(module, tokens) for tokens in sequences]
        backends = self.backends(module)
        tables = block_tables([LENGTH] * 5, 4, NUM_BLOCKS, seed)
        done = [0] * 5
        while unfinished := [i for i in range(5) if done[i] < len(sequences[i])]:
            chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
            step = [(min(rng.choice([1, 1, 3, LENGTH]), len(sequences[i]) - done[i]), i) for i in chosen]
            step.sort(key=lambda pair: pair[0] > 1)  # uniform rows first
            batch = pack_batch(
                [(count, done[i] + count) for count, i in step],
                [tables[i] for _, i in step],
                4,
                token_ids=[sequences[i][done[i] : done[i] + count] for count, i in step],
                num_padding_rows=rng.randint(0, 2),
                device=self.device,
            )
            logits, start = run(module, backends, batch), 0
            for count, i in step:
                wants = expected[i][done[i] : done[i] + count]
                self.close(logits[start : start + count], wants, f"row {i} beside {len(step) - 1} others")
                start, done[i] = start + count, done[i] + count

    def test_the_batch_is_handed_on_unopened(self) -> None:
        module, tokens = self.load(), self.tokens()
        expected = self.whole(module, tokens)
        inner = Attention.forward

        def open_and_attend(layer: Attention, query: Any, key: Any, value: Any, batch: Any) -> torch.Tensor:
            return inner(layer, query, key, value, batch._batch)

        backends = self.backends(module)
        tables = block_tables([LENGTH], 4, NUM_BLOCKS)
        batch = pack_batch([(LENGTH, LENGTH)], tables, 4, token_ids=[tokens], device=self.device)
        for backend in backends:
            backend.prepare(batch)
        assert isinstance(module, CausalLM)
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(Attention, "forward", open_and_attend)
            sealed: Any = Sealed(batch, shows_shape=module.leaves_out)
            hidden = module.forward(batch.input_ids, batch.positions, sealed)
            assert hidden.shape[0] == LENGTH and hidden.ndim == 2, f"hidden states are {tuple(hidden.shape)}"
            rows = torch.tensor([LENGTH - 1, 3], device=self.device)
            self.close(module.logits(hidden[rows]), expected[rows], "logits of two rows")

    def test_what_it_leaves_out_nobody_wanted(self) -> None:
        module, tokens = self.load(), self.tokens()
        assert isinstance(module, CausalLM)
        if not module.leaves_out:
            return
        backends = self.backends(module, backend=ReferenceAttention)
        lens = [LENGTH, 3, 1]
        batch = pack_batch(
            [(n, n) for n in lens],
            block_tables(lens, 4, NUM_BLOCKS),
            4,
            token_ids=[tokens[:n] for n in lens],
            device=self.device,
        )
        batch = replace(batch, shape=replace(batch.shape, last_only=True))
        for backend in backends:
            backend.prepare(batch)
        with torch.inference_mode():
            hidden = module.forward(batch.input_ids, batch.positions, batch)
            assert hidden.shape[0] == len(lens), f"it gave {hidden.shape[0]} rows for {len(lens)} last tokens"
            for row, length in enumerate(lens):
                self.close(module.logits(hidden[row : row + 1]), self.whole(module, tokens[:length])[-1:], f"row {row}")

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_it_runs_in_the_dtype_that_the_core_chose(self, dtype: str) -> None:
        module = self.load(dtype=dtype)
        expected = getattr(torch, dtype)
        others = {str(parameter.dtype) for parameter in module.parameters()} - {str(expected)}
        assert not others, f"the core chose {dtype}, but there are parameters of {others}"
        logits = self.whole(module, self.tokens())
        assert logits.dtype == expected, f"logits are {logits.dtype}, not {dtype}"
        assert logits.isfinite().all(), f"logits in {dtype} are not finite"
