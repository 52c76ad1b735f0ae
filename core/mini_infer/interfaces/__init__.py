"""The contract. What this package exports is what ``api_version`` covers; nothing else is promised."""

from mini_infer.forward_batch import ForwardBatch, StepShape
from mini_infer.interfaces.attention import AttentionBackend, AttentionCapabilities, BatchLimits, GraphSupport
from mini_infer.interfaces.cache_policy import BlockKey, CachedBlock, CachePolicy, CacheView, Demote, Promote
from mini_infer.interfaces.executor import Executor, PendingOutput, StepWorker
from mini_infer.interfaces.model import CausalLM, KVCacheSpec, ModelAdapter, ModelConfig
from mini_infer.interfaces.model_transform import ModelTransform
from mini_infer.interfaces.observer import Observer, RequestEvent, StepEvents
from mini_infer.interfaces.proposer import DraftRequest, Proposer
from mini_infer.interfaces.sampler import LateLogitsProcessor, LateRequest, LogitsProcessor, Sampler, SamplingRows
from mini_infer.interfaces.scheduler import (
    ChunkPolicy,
    OrderPolicy,
    RequestView,
    Schedule,
    Scheduler,
    SchedulerView,
    SchedulingPolicy,
    VictimPolicy,
    Wish,
)
from mini_infer.interfaces.server_extension import ServerExtension
from mini_infer.interfaces.step_runner import StepRunner
from mini_infer.interfaces.weight_loader import WeightLoader
from mini_infer.plan import (
    BlockRef,
    Copy,
    Grant,
    LateInputs,
    NewRow,
    RowOutput,
    StepOutput,
    StepPlan,
    TokenLogprobs,
)
from mini_infer.sampling_params import SamplingParams

API_VERSION = 0

__all__ = [
    "API_VERSION",
    "AttentionBackend",
    "AttentionCapabilities",
    "BatchLimits",
    "BlockKey",
    "BlockRef",
    "CachePolicy",
    "CacheView",
    "CachedBlock",
    "CausalLM",
    "ChunkPolicy",
    "Copy",
    "Demote",
    "DraftRequest",
    "Executor",
    "ForwardBatch",
    "Grant",
    "GraphSupport",
    "KVCacheSpec",
    "LateInputs",
    "LateLogitsProcessor",
    "LateRequest",
    "LogitsProcessor",
    "ModelAdapter",
    "ModelConfig",
    "ModelTransform",
    "NewRow",
    "Observer",
    "OrderPolicy",
    "PendingOutput",
    "Promote",
    "Proposer",
    "RequestEvent",
    "RequestView",
    "RowOutput",
    "Sampler",
    "SamplingParams",
    "SamplingRows",
    "Schedule",
    "Scheduler",
    "SchedulerView",
    "SchedulingPolicy",
    "ServerExtension",
    "StepEvents",
    "StepOutput",
    "StepPlan",
    "StepRunner",
    "StepShape",
    "StepWorker",
    "TokenLogprobs",
    "VictimPolicy",
    "WeightLoader",
    "Wish",
]
