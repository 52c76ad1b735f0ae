"""Mini-Infer, in process, with the default plugins but prefix-cache: the same prompts are run again and again."""

import time

from benchmarks.workloads import Workload


def run(workload: Workload, repeats: int) -> list[float]:
    """See ``benchmarks.engines``."""
    from mini_infer import LLM, SamplingParams

    longest = max(p + o for p, o in zip(workload.prompt_lens, workload.output_lens, strict=True))
    engine = {"dtype": workload.dtype, "max_model_len": max(512, longest), "skip_tokenizer": True}
    prompts = workload.prompts()

    with LLM(workload.model, without=["prefix-cache"], engine=engine) as llm:

        def seconds(output_lens: tuple[int, ...]) -> float:
            params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in output_lens]
            started = time.perf_counter()
            outputs = llm.generate(prompts, params)
            elapsed = time.perf_counter() - started
            assert [len(o.outputs[0].token_ids) for o in outputs] == list(output_lens)
            return elapsed

        seconds(tuple(min(8, n) for n in workload.output_lens))
        return [measure(workload, seconds) for _ in range(repeats)]


def measure(workload: Workload, seconds) -> float:  # type: ignore[no-untyped-def]
    """One repeat, given a function from output lengths to seconds."""
    if workload.kind == "batch":
        return seconds(workload.output_lens)
    (longer,) = workload.output_lens
    shorter = longer // 4
    return (seconds((longer,)) - seconds((shorter,))) / (longer - shorter)
