"""The named workloads: rows of the project's table of targets, each a fixed list of requests.

Contract: a workload is the same tokens for every engine: random ids from a fixed seed (never zeros), greedy decoding,
end-of-text ignored, no detokenising. Lengths are in tokens.
"""

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["decode", "batch", "streams"]
DEMO_VOCAB = 49_152


@dataclass(frozen=True, slots=True)
class Workload:
    """What is run and what is reported.

    Attributes:
        name: what the command line calls it.
        kind: ``decode``: time a token at a fixed batch, from the difference of two output lengths, so that prompt and
            start-up cancel; ``batch``: all requests at once, output tokens a second; ``streams``: so many HTTP clients,
            each sending its next request when the last is answered.
        model: ``demo`` (SmolLM2-135M-Instruct).
        dtype: of weights and activations.
        prompt_lens: one a request.
        output_lens: one a request; for ``decode`` the longer of the two lengths.
        clients: for ``streams``.
        target: least ratio to the best peer.
        peers: engines that it is compared with, besides ours.
        seed: of the token ids.
    """

    name: str
    kind: Kind
    model: str
    dtype: str
    prompt_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    clients: int = 0
    target: float = 1.0
    peers: tuple[str, ...] = ("transformers",)
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        """Token ids of each request."""
        rng = random.Random(self.seed)
        return [[rng.randrange(1, DEMO_VOCAB - 100) for _ in range(n)] for n in self.prompt_lens]

    @property
    def num_output_tokens(self) -> int:
        """Tokens that all requests generate."""
        return sum(self.output_lens)


_MIXED = random.Random(7)
_MIXED_PROMPTS = tuple(_MIXED.randint(16, 256) for _ in range(8))
_MIXED_OUTPUTS = tuple(_MIXED.randint(16, 128) for _ in range(8))


def _decode(dtype: str) -> Workload:
    return Workload(f"cpu-decode-{dtype}", "decode", "demo", dtype, (32,), (96,), target=1.5)


def _streams(clients: int, target: float) -> Workload:
    count = max(2, clients) * 2
    prompts, outputs = (64,) * count, (64,) * count
    name = f"cpu-streams-{clients}"
    return Workload(
        name, "streams", "demo", "float32", prompts, outputs, clients, target, peers=("transformers-serve",)
    )


WORKLOADS = {
    workload.name: workload
    for workload in (
        _decode("float32"),
        _decode("bfloat16"),
        Workload(
            "cpu-mixed-8",
            "batch",
            "demo",
            "float32",
            _MIXED_PROMPTS,
            _MIXED_OUTPUTS,
            target=2.0,
            peers=("transformers", "transformers-batch"),
        ),
        _streams(1, 1.5),
        _streams(4, 2.0),
        _streams(8, 3.0),
    )
}
