"""Our model families keep the contract that third parties are held to."""

from mini_infer.testing import tiny_model
from mini_infer.testing.contracts import model_adapter_suite
from mini_infer.testing.dense import DenseModel
from mini_infer_models.llama.model import LlamaAdapter
from mini_infer_models.qwen2.model import Qwen2Adapter
from mini_infer_models.qwen3.model import Qwen3Adapter

REFUSES = {"hidden_act": "gelu", "quantization_config": {"quant_method": "gptq"}}
WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}

TestLlama = model_adapter_suite(
    LlamaAdapter,
    lambda: tiny_model("llama", attention_bias=True),
    reference=lambda folder: DenseModel(folder).logits,
    refuses=REFUSES,
)
TestQwen2 = model_adapter_suite(
    Qwen2Adapter,
    lambda: tiny_model("qwen2", tie_word_embeddings=True, **WINDOWS),
    reference=lambda folder: DenseModel(folder).logits,
    refuses=REFUSES,
)
TestQwen3 = model_adapter_suite(
    Qwen3Adapter,
    lambda: tiny_model("qwen3"),
    reference=lambda folder: DenseModel(folder).logits,
    refuses=REFUSES,
)
