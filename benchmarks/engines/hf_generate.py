"""transformers' ``generate``: a single request as it is, several padded on the left into one batch."""

import time

from benchmarks.engines.ours import measure
from benchmarks.workloads import Workload


def run(workload: Workload, repeats: int) -> list[float]:
    """See ``benchmarks.engines``."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from benchmarks.demo_folder import demo_folder

    model = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=getattr(torch, workload.dtype)).eval()
    prompts = workload.prompts()
    width = max(map(len, prompts))
    input_ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])

    def seconds(output_lens: tuple[int, ...]) -> float:
        longest = max(output_lens)
        config = GenerationConfig(
            do_sample=False, max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0, eos_token_id=None
        )
        started = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(input_ids, attention_mask=mask, generation_config=config)
        elapsed = time.perf_counter() - started
        assert output.shape[1] == width + longest
        return elapsed

    seconds(tuple(min(8, n) for n in workload.output_lens))
    return [measure(workload, seconds) for _ in range(repeats)]
