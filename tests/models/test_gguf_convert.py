"""GGUF files against transformers: weights, logits, token ids; and files that are wrong."""

from __future__ import annotations

import itertools
import json
import random
import sys
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import regex
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config

from mini_infer.errors import ConfigError
from mini_infer.interfaces import ModelConfig
from mini_infer.model.demo import demo_gguf_path, demo_path
from mini_infer.model.generation_config import load_generation_config
from mini_infer.text.hf_tokenizer import load_tokenizer
from mini_infer_models.gguf import loader as loader_module
from mini_infer_models.gguf.convert import convert_gguf
from mini_infer_models.gguf.hf_weights import hf_tensors, unpermuted
from mini_infer_models.gguf.loader import GGUFLoader
from mini_infer_models.gguf.reader import GGUFFile, open_reader

if TYPE_CHECKING:
    from pathlib import Path

HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WORDS = ["a", "b", "Ġ", "1", "2", "Ġa", "ab", "12", "123", "1234"]
CONTROL = ["<|end|>", "<|start|>"]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


# ------------------------------------------------------------------------------------------------- the demo model


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_gguf(demo_gguf_path(), tmp_path_factory.mktemp("demo") / "llama-float32")


@pytest.fixture(scope="module")
def demo_raw() -> gguf.GGUFReader:
    return open_reader(demo_gguf_path())


def test_demo_answers_paris_in_transformers(demo: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(demo), AutoTokenizer.from_pretrained(demo)
    assert model.dtype == torch.float32
    assert (model.config.head_dim, model.config.rope_parameters["rope_theta"]) == (64, 1e5)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = load_tokenizer(demo).apply_chat_template(messages)
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with torch.inference_mode():
        out = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0].tolist()
    assert tokenizer.decode(out[len(ids) :]) == "The capital of France is Paris.<|im_end|>"
    assert load_generation_config(demo).eos_token_ids == (2,)


def test_demo_weights_are_bit_equal(demo: Path, demo_raw: gguf.GGUFReader) -> None:
    converted = load_file(demo / "model.safetensors")
    assert len(converted) == len(demo_raw.tensors) == 272
    for tensor in demo_raw.tensors:
        values = converted[hf_name_of(tensor.name)].numpy()
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            values = permuted(values, 9 if ".attn_q." in tensor.name else 3)
        assert np.array_equal(values, gguf.dequantize(tensor.data, tensor.tensor_type)), tensor.name


def test_demo_tokens_are_those_of_the_original_rules(demo: Path, demo_raw: gguf.GGUFReader) -> None:
    tokenizer, reference = AutoTokenizer.from_pretrained(demo), BytePairEncoding(demo_raw)
    draw = random.Random(0)
    alphabet = "0123456789 019  abcde'st\n\t.,!é日½²٣Ⅷ😀_-"
    for _ in range(400):
        text = "".join(draw.choice(alphabet) for _ in range(draw.randrange(40)))
        assert tokenizer.encode(text) == reference.encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("2026") == [tokenizer.encode(digit)[0] for digit in "2026"]
    assert tokenizer.encode("<|im_start|>x")[0] == 1


class BytePairEncoding:
    """The tokenizer as its definition says: digits apart, GPT-2's pieces, merges by rank."""

    def __init__(self, file: gguf.GGUFReader) -> None:
        self._ids = {token: i for i, token in enumerate(file.fields["tokenizer.ggml.tokens"].contents())}
        merges = file.fields["tokenizer.ggml.merges"].contents()
        self._ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in printable]
        self._spelling = {byte: chr(byte) for byte in printable} | {b: chr(256 + i) for i, b in enumerate(hidden)}

    def encode(self, text: str) -> list[int]:
        runs = regex.findall(r"\p{N}|[^\p{N}]+", text)
        return [i for run in runs for piece in regex.findall(GPT2, run) for i in self._merged(piece)]

    def _merged(self, piece: str) -> list[int]:
        parts = [self._spelling[byte] for byte in piece.encode()]
        while pairs := [pair for pair in itertools.pairwise(parts) if pair in self._ranks]:
            left, right = min(pairs, key=self._ranks.__getitem__)
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == (left, right):
                    parts[i : i + 2] = [left + right]
                i += 1
        return [self._ids[part] for part in parts]


# ---------------------------------------------------------------------------------------------- small files made here


def permuted(rows: Any, num_heads: int) -> Any:
    """Q and K as llama.cpp's conversion script stores them for Llama."""
    return rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def hf_name_of(name: str) -> str:
    to_hf = {new: old for old, new in HF_TO_GGUF.items()}
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{to_hf[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{to_hf[part]}.{kind}"


def gguf_name_of(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{HF_TO_GGUF[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{HF_TO_GGUF[part]}.{kind}"


def tiny_model(family: str, *, tied: bool = False, **options: Any) -> Any:
    config_class = {"llama": LlamaConfig, "qwen2": Qwen2Config}[family]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=268,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        **options,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.normal_(1, 0.3)
    return model.eval()


def write_gguf(
    path: Path,
    model: Any,
    *,
    leave_out: str = "",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre: str = "gpt-2",
    extra: Any = None,
) -> Path:
    """What llama.cpp's conversion script writes for a small model."""
    config, family = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if (head_dim := getattr(config, "head_dim", None)) is not None:
        writer.add_key_length(head_dim)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_tokenizer(writer, pre)
    if extra:
        extra(writer)
    for name, parameter in model.state_dict().items():
        if (name == "lm_head.weight" and config.tie_word_embeddings) or name == leave_out:
            continue
        values = parameter.float().numpy()
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            values = permuted(values, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        tensor_kind = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            gguf_name_of(name), gguf.quantize(np.ascontiguousarray(values), tensor_kind), raw_dtype=tensor_kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    spelling = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144)]
    words = [word for word in WORDS if len(word) > 1]
    tokens = [*map(chr, spelling), *words, *CONTROL, "<tool>", "[PAD0]"]
    normal, control, user, unused = 1, 3, 4, 5
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([normal] * (len(tokens) - 4) + [control, control, user, unused])
    writer.add_token_merges(["Ġ a", "a b", "1 2", "12 3", "123 4"])
    writer.add_bos_token_id(len(tokens) - 3)
    writer.add_eos_token_id(len(tokens) - 4)
    writer.add_chat_template("{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}")


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(3, 60)[None]).logits


def test_llama_logits_are_those_of_the_original(tmp_path: Path) -> None:
    for tied in (False, True):
        model = tiny_model("llama", tied=tied)
        folder = convert_gguf(write_gguf(tmp_path / f"{tied}.gguf", model), tmp_path / f"{tied}")
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert loaded.config.tie_word_embeddings is tied
        assert torch.equal(logits(loaded), logits(model))


def test_qwen2_logits_are_those_of_the_original(tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    folder = convert_gguf(write_gguf(tmp_path / "q.gguf", model), tmp_path / "q")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model))


def test_a_llama_file_as_qwen2_has_the_same_logits(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = convert_gguf(write_gguf(tmp_path / "l.gguf", model), tmp_path / "q", family="qwen2")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded).__name__ == "Qwen2ForCausalLM"
    assert not any(value.any() for name, value in loaded.state_dict().items() if name.endswith("bias"))
    assert torch.equal(logits(loaded), logits(model))


def test_quantised_tensors_are_those_of_gguf_rounded_once(tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = write_gguf(tmp_path / "q8.gguf", model, kind=gguf.GGMLQuantizationType.Q8_0)
    raw = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    for dtype in ("float32", "bfloat16"):
        folder = convert_gguf(path, tmp_path / dtype, dtype=dtype)
        assert AutoModelForCausalLM.from_pretrained(folder).dtype == getattr(torch, dtype)
        for name, values in load_file(folder / "model.safetensors").items():
            expected = torch.from_numpy(raw[gguf_name_of(name)].copy())
            if ".q_proj" in name or ".k_proj" in name:
                expected = torch.from_numpy(unpermuted(expected.numpy(), 4 if ".q_proj" in name else 2))
            assert torch.equal(values, expected.to(getattr(torch, dtype))), name


def test_unpermuted_undoes_llama_cpp(tmp_path: Path) -> None:
    rows = np.arange(4 * 6 * 5, dtype=np.float32).reshape(24, 5)
    assert np.array_equal(unpermuted(permuted(rows, 4), 4), rows)
    assert np.array_equal(unpermuted(permuted(rows[:, 0], 4), 4), rows[:, 0]), "biases too"


def test_tensors_outlive_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "l.gguf", tiny_model("llama"))
    file = GGUFFile(path)
    config = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    tensors = dict(hf_tensors(file, config | {"tie_word_embeddings": False}, torch.float32))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    path.write_bytes(b"\xff" * path.stat().st_size)  # in place: a mapping would see it
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    assert all(tensor.is_contiguous() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("scaling", "extra"),
    [
        ({"rope_type": "linear", "factor": 4.0}, "linear"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, "yarn"),
    ],
)
def test_rope_scaling(tmp_path: Path, scaling: dict[str, Any], extra: str) -> None:
    model = tiny_model("llama", rope_parameters={"rope_theta": 1e4, **scaling})

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(extra))
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling.get("original_max_position_embeddings", 256))

    folder = convert_gguf(write_gguf(tmp_path / "l.gguf", model, extra=add), tmp_path / "l")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model))


def test_rope_scaling_of_llama_3_is_found_from_its_factors(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
    model = tiny_model("llama", rope_parameters=scaling, head_dim=64)
    plain = 1 / 5e5 ** (torch.arange(0, 64, 2) / 64)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert (factors.min(), factors.max()) == (1, 8)
    assert len(set(factors.round(3))) > 3, "some lie between"

    def add(factors: Any) -> Any:
        return lambda writer: writer.add_tensor("rope_freqs.weight", factors)

    folder = convert_gguf(write_gguf(tmp_path / "l.gguf", model, extra=add(factors)), tmp_path / "l")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model))
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight is not"):
        convert_gguf(write_gguf(tmp_path / "m.gguf", model, extra=add(factors[::-1].copy())), tmp_path / "m")


@pytest.mark.parametrize(
    ("pre", "pieces", "starts_with_bos"),
    [
        ("smollm", ["1", "2", "3", "4", "Ġa"], False),
        ("gpt-2", ["1234", "Ġa"], False),
        ("qwen2", ["1", "2", "3", "4", "Ġa"], False),
        ("llama-bpe", ["123", "4", "Ġa"], True),
    ],
)
def test_pre_tokenizers(tmp_path: Path, pre: str, pieces: list[str], starts_with_bos: bool) -> None:
    folder = convert_gguf(write_gguf(tmp_path / "m.gguf", tiny_model("llama"), pre=pre), tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("1234 a") == pieces
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a"))[:-1] == (["<|start|>"] if starts_with_bos else [])
    assert (tokenizer.encode("e\u0301") == tokenizer.encode("é")) is (pre == "qwen2"), "NFC"
    assert tokenizer.tokenize("<tool><|end|>[PAD0]")[:2] == ["<tool>", "<|end|>"]
    assert "[PAD0]" not in tokenizer.get_vocab()
    assert tokenizer.decode(tokenizer.encode("a<|end|><tool>"), skip_special_tokens=True) == "a<tool>"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")
    chat = load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "a"}])
    assert tokenizer.convert_ids_to_tokens(chat) == ["<|start|>", "a", "<|end|>"]


def test_every_end_of_text_is_kept(tmp_path: Path) -> None:
    folder = convert_gguf(
        write_gguf(tmp_path / "m.gguf", tiny_model("llama"), extra=lambda writer: writer.add_eot_token_id(7)),
        tmp_path / "m",
    )
    assert load_generation_config(folder).eos_token_ids == (261, 7)


# ------------------------------------------------------------------------------------------------- in the engine


def test_the_loader_converts_once_into_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tiny_model("llama")
    path = write_gguf(tmp_path / "m.gguf", model)
    loader = GGUFLoader(dtype="bfloat16")
    assert loader.accepts(path)
    assert not loader.accepts(tmp_path)
    folder = loader.prepare(path)
    assert folder.parent.parent == tmp_path / "cache" / "mini-infer" / "converted"
    before = (folder / "model.safetensors").stat().st_mtime_ns
    copy = tmp_path / "elsewhere" / "m.gguf"
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    assert loader.prepare(copy) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    config = ModelConfig({}, torch.bfloat16, "cpu", 256, 268)
    weights = dict(loader.weights(path, config))
    assert all(torch.equal(weights[name], value.bfloat16()) for name, value in model.state_dict().items())
    assert GGUFLoader("qwen2").prepare(path) != folder != GGUFLoader().prepare(path)
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ConfigError, match="is damaged"):
        dict(loader.weights(path, config))


def test_demo_path_asks_this_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Path, str, str]] = []
    monkeypatch.setattr(loader_module, "converted", lambda *asked: made.append(asked) or tmp_path)
    assert demo_path("qwen2", "bfloat16") == tmp_path
    assert made == [(demo_gguf_path(), "qwen2", "bfloat16")]


# ------------------------------------------------------------------------------------------------- what is wrong


def refuse(path: Path, out_dir: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as info:
        convert_gguf(path, out_dir, **options)
    assert not out_dir.exists()
    assert list(out_dir.parent.glob(f".{out_dir.name}*")) == [], "nothing half-made is left"
    return str(info.value)


def test_broken_files(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny_model("llama")).read_bytes()
    broken = tmp_path / "broken.gguf"
    assert "cannot open" in refuse(broken, tmp_path / "out")
    for content in (b"", b"not gguf at all", whole[:20], whole[:9000], whole[:-4000]):
        broken.write_bytes(content)
        assert f"{broken} is no whole GGUF file" in refuse(broken, tmp_path / "out")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), leave_out=name)
    assert f"tensor {name} is missing" in refuse(path, tmp_path / "out")


def test_what_cannot_be_honoured_is_named(tmp_path: Path) -> None:
    model = tiny_model("llama")

    def with_extra(extra: Any) -> str:
        return refuse(write_gguf(tmp_path / "m.gguf", model, extra=extra), tmp_path / "out")

    assert "expert_count" in with_extra(lambda writer: writer.add_expert_count(4))
    assert "rope.dimension_count 8" in with_extra(lambda writer: writer.add_rope_dimension_count(8))
    longrope = gguf.RopeScalingType.LONGROPE
    assert "'longrope' is not supported" in with_extra(lambda writer: writer.add_rope_scaling_type(longrope))
    odd = np.zeros((4, 4), dtype=np.float32)
    assert "tensor blk.0.odd.weight" in with_extra(lambda writer: writer.add_tensor("blk.0.odd.weight", odd))
    path = write_gguf(tmp_path / "m.gguf", model, pre="tekken")
    assert "'tekken' is not known (known: gpt-2, llama-bpe, qwen2, smollm)" in refuse(path, tmp_path / "out")


def test_families_that_do_not_suit(tmp_path: Path) -> None:
    qwen2 = write_gguf(tmp_path / "q.gguf", tiny_model("qwen2"))
    assert "cannot become 'llama'" in refuse(qwen2, tmp_path / "out", family="llama")
    assert "dtype must be one of" in refuse(qwen2, tmp_path / "out", dtype="float8")
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "'bert' is not supported (supported: llama, qwen2)" in refuse(tmp_path / "b.gguf", tmp_path / "out")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        convert_gguf(path, tmp_path / "file" / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        convert_gguf(path, tmp_path / "full")
    assert (tmp_path / "full" / "precious").exists()


def test_a_whole_folder_is_kept(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    folder = convert_gguf(path, tmp_path / "out")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    path.unlink()
    assert convert_gguf(path, folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_without_the_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'mini-infer[gguf]'" in refuse(tmp_path / "m.gguf", tmp_path / "out")
