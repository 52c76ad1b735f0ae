"""The layers that models are made of: plain at world size 1, replaced in place by transforms.

Contract: a layer holds no global state and takes its dtype and rank as arguments; it may be built on the meta device,
and its parameters are unset until they are loaded.
"""

from mini_infer.layers.activation import SiluAndMul
from mini_infer.layers.attention import Attention
from mini_infer.layers.decoder import DecoderConfig, DecoderForCausalLM
from mini_infer.layers.embedding import LMHead, VocabParallelEmbedding
from mini_infer.layers.linear import (
    ColumnParallelLinear,
    Linear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    StackedLinear,
)
from mini_infer.layers.loading import load_weights
from mini_infer.layers.norm import RMSNorm
from mini_infer.layers.rope_scaling import rope_frequencies, rope_parameters
from mini_infer.layers.rotary import RotaryEmbedding, rope_from_config

__all__ = [
    "Attention",
    "ColumnParallelLinear",
    "DecoderConfig",
    "DecoderForCausalLM",
    "LMHead",
    "Linear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "RowParallelLinear",
    "SiluAndMul",
    "StackedLinear",
    "VocabParallelEmbedding",
    "load_weights",
    "rope_frequencies",
    "rope_from_config",
    "rope_parameters",
]
