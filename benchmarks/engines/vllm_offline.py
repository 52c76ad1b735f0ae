"""vLLM's offline API, where it is installed."""

import time

from benchmarks.engines.ours import measure
from benchmarks.workloads import Workload


def run(workload: Workload, repeats: int) -> list[float]:
    """See ``benchmarks.engines``."""
    from vllm import LLM, SamplingParams

    from benchmarks.demo_folder import demo_folder

    llm = LLM(
        demo_folder(), dtype=workload.dtype, skip_tokenizer_init=True, enable_prefix_caching=False, max_model_len=2048
    )
    prompts = [{"prompt_token_ids": ids} for ids in workload.prompts()]

    def seconds(output_lens: tuple[int, ...]) -> float:
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n, detokenize=False) for n in output_lens]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - started
        assert [len(o.outputs[0].token_ids) for o in outputs] == list(output_lens)
        return elapsed

    seconds(tuple(min(8, n) for n in workload.output_lens))
    return [measure(workload, seconds) for _ in range(repeats)]
