"""Probe: an attention backend for two KV groups, keys and values in one and latent vectors in the other.

All that a step needs lies in buffers made at start, and nothing is read from the host: it could be captured in a graph.
"""

import torch

from mini_infer.interfaces import AttentionBackend, AttentionCapabilities
from mini_infer.plugins import hookimpl


class FixedAttention(AttentionBackend):
    """Each token gathers its row's whole block table. ``kv_cache`` is [num_blocks, block_size, heads, numbers]."""

    name = "fixed"
    capabilities = AttentionCapabilities(("cpu",), ("float32",), kinds=("full", "latent"), graphs="mixed")

    def kv_cache_shape(self, num_blocks):
        return num_blocks, self.block_size, self.spec.num_kv_heads, self.numbers

    @property
    def numbers(self):
        return self.spec.numbers_per_token // self.spec.num_kv_heads

    def buffers(self, limits):
        self.table = torch.zeros(limits.max_num_tokens, limits.max_blocks_per_row, dtype=torch.int64)  # of each token
        self.last = torch.zeros(limits.max_num_tokens, 1, dtype=torch.int64)  # the last slot that it may see

    def prepare(self, batch):
        num_tokens = batch.shape.num_tokens
        rows = torch.searchsorted(batch.cu_seqlens_q[1:], torch.arange(num_tokens), right=True)
        self.table[:num_tokens] = batch.block_table[rows]
        tokens_after = batch.cu_seqlens_q[rows + 1] - 1 - torch.arange(num_tokens)
        self.last[:num_tokens, 0] = batch.seq_lens[rows] - 1 - tokens_after

    def write_kv(self, layer, query, key, value, batch):
        both = key if self.spec.kind == "latent" else torch.cat((key, value), dim=-1)
        layer.kv_cache.view(-1, *both.shape[1:])[batch.slot_mapping] = both
        return query

    def attend(self, layer, query, batch, out=None):
        num_tokens = batch.shape.num_tokens
        seen = layer.kv_cache[self.table[:num_tokens]].flatten(1, 2)  # [num_tokens, slots, heads, numbers]
        unseen = torch.arange(seen.shape[1]) > self.last[:num_tokens]
        group = layer.num_heads // self.spec.num_kv_heads
        seen = seen.masked_fill(unseen[..., None, None], 0).repeat_interleave(group, 2)
        key, value = seen[..., : self.spec.head_dim], seen[..., -self.spec.v_head_dim :]
        value = seen[..., : self.spec.v_head_dim] if self.spec.kind == "latent" else value
        scores = torch.einsum("thd,tshd->ths", query, key) * layer.scale
        answer = torch.einsum("ths,tshd->thd", scores.masked_fill(unseen[:, None], -torch.inf).softmax(-1), value)
        return answer if out is None else out.copy_(answer)


name = "two-groups"
api_version = 0


@hookimpl
def attention_backends(context):
    return [FixedAttention]
