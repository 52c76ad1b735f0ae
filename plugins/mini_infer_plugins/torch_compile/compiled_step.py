"""CompiledStepRunner: the forward pass compiled as a whole, three times at most.

::

    decode, one row            [embed ... logits]          of one token
    decode, verify             [embed ... logits]          of any number of tokens from two on
    steps with prompts         [embed ... final norm]      of any number of tokens from two on

Contract: each graph is compiled once, in full and before the first request; a second compilation, a part that cannot
be compiled and a compiler that fails are PluginErrors, never a step that runs uncompiled. Tokens are those without it.
"""

from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from mini_infer.errors import PluginError
from mini_infer.forward_batch import StepShape
from mini_infer.interfaces import StepRunner
from mini_infer_plugins.torch_compile.opaque_attention import Step, compiled_step, layers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mini_infer.forward_batch import ForwardBatch
    from mini_infer.interfaces import AttentionBackend, BatchLimits
    from mini_infer.layers import Attention

    Forward = Callable[[ForwardBatch], torch.Tensor]

_SHAPES = {"logits": StepShape.of([1], 1), "hidden": StepShape.of([2], 0)}
"""What the model is told of a step's shape: what its output is, so that nothing else can be compiled in."""


class CompiledStepRunner(StepRunner):
    """Compiles a graph when its first step comes, which is a rehearsal's.

    Args:
        mode: torch.compile's.
        rehearse: compile before the first request.
    """

    def __init__(self, mode: str = "default", *, rehearse: bool = True) -> None:
        self._mode = mode
        self._rehearses = rehearse
        self._backends: Sequence[AttentionBackend] = ()
        self._layers: Mapping[int, Attention] = {}
        self._graphs: dict[tuple[str, bool], _Graph] = {}

    def bind(self, backends: "Sequence[AttentionBackend]") -> None:
        self._backends = backends

    def limits(self, limits: "BatchLimits") -> "BatchLimits":
        return replace(limits, max_num_rows=limits.max_num_rows + 1, max_num_tokens=max(2, limits.max_num_tokens))

    def rehearsals(self) -> "Sequence[StepShape]":
        if not self._rehearses:
            return ()
        return [StepShape.of([2], 0), StepShape.of([1, 1], 1), StepShape.of([1], 1)]

    def shape(self, shape: "StepShape") -> "StepShape":
        """Prompts of one token get a row of padding, for a graph of one token is a graph of its own."""
        if shape.gives == "logits" or shape.num_tokens > 1:
            return replace(shape, last_only=False)
        return replace(shape, num_rows=2, num_tokens=2, last_only=False)

    def run(self, forward: "Forward", batch: "ForwardBatch") -> torch.Tensor:
        key = batch.shape.gives, batch.shape.num_tokens > 1
        if key not in self._graphs:
            self._graphs[key] = _Graph(forward, _SHAPES[batch.shape.gives], self._mode, any_number=key[1])
        if not self._layers:
            self._layers = layers_of(self._backends)  # which are bound to them after ``bind``
        return self._graphs[key](Step(batch, self._layers))


class _Graph:
    """One compiled forward pass.

    Args:
        forward: as ``StepRunner.run`` gets it.
        shape: what the model is told.
        mode: torch.compile's.
        any_number: it serves any number of tokens from two on, else one.
    """

    def __init__(self, forward: "Forward", shape: StepShape, mode: str, *, any_number: bool) -> None:
        self._shape, self._any_number = shape, any_number
        self._options = torch._inductor.list_mode_options(mode)
        self._is_compiled = False

        def run(batch: "ForwardBatch") -> torch.Tensor:
            return forward(batch)

        # Dynamo counts compilations by code object: a copy for each graph keeps engines of one process apart.
        own = FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)
        self._run = torch.compile(own, fullgraph=True, dynamic=False, backend=self._compile)

    def __call__(self, step: Step) -> torch.Tensor:
        """What ``forward(step.batch)`` gives."""
        # The host's lists differ from step to step; the compiler must not see them.
        seen = replace(step.batch, shape=self._shape, query_lens_host=[], seq_lens_host=[])
        if self._any_number and not self._is_compiled:
            for tensor in (seen.input_ids, seen.positions):
                torch._dynamo.mark_dynamic(tensor, 0)
        try:
            with compiled_step(step):
                out: torch.Tensor = self._run(seen)
                return out
        except (TorchDynamoException, FailOnRecompileLimitHit) as e:
            reason = str(e).partition("\n\nSet TORCH")[0]  # what follows is for who debugs the compiler
            raise PluginError(f"torch-compile cannot compile this model: {' '.join(reason.split())}") from e

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if self._is_compiled:
            raise PluginError("a step does not fit the graph that was compiled for its kind")
        compiled = torch._inductor.compile(graph, inputs, options=self._options)
        self._is_compiled = True
        return compiled
