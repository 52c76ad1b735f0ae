"""transformers' continuous batching, by its manager, so that each request has an output length of its own."""

import time

from benchmarks.engines.ours import measure
from benchmarks.workloads import Workload


def run(workload: Workload, repeats: int) -> list[float]:
    """See ``benchmarks.engines``."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    from benchmarks.demo_folder import demo_folder

    model = AutoModelForCausalLM.from_pretrained(
        demo_folder(), dtype=getattr(torch, workload.dtype), attn_implementation="sdpa"
    ).eval()
    prompts = workload.prompts()
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=512, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(page_size=32, num_blocks=256, max_batch_tokens=512),
    )
    manager.start()

    def seconds(output_lens: tuple[int, ...]) -> float:
        started = time.perf_counter()
        for prompt, length in zip(prompts, output_lens, strict=True):
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
        generated = 0
        for _ in prompts:
            result = manager.get_result(timeout=300)
            generated += len(result.generated_tokens)
        elapsed = time.perf_counter() - started
        assert generated == sum(output_lens), f"{generated} tokens for {sum(output_lens)}"
        return elapsed

    try:
        seconds(tuple(min(8, n) for n in workload.output_lens))
        return [measure(workload, seconds) for _ in range(repeats)]
    finally:
        manager.stop(block=True)
