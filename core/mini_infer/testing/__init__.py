"""What a third party needs to prove a plugin right. Nothing heavy is imported when this is.

::

    make_llm, make_engine, tiny_model     engines on tiny random models, and on the model "script"
    run_engine, assert_idle               requests through an engine, step by step
    assert_same_tokens                    two sets of answers
    reference                             what any request must get, and the rule of equality
    traffic                               random requests over time on an engine too small for them
    plan_check                            an executor that proves every plan; around every engine made here
    models, toy_model, script_model, tokenizers, dense, batches    what these are made of
    pytest_plugin                         the fixtures ``make_llm`` and ``tiny_model``, there once pytest is
"""

from mini_infer.testing.engines import (
    EngineOutput,
    assert_idle,
    assert_same_tokens,
    make_engine,
    make_llm,
    run_engine,
    tiny_model,
)

__all__ = [
    "EngineOutput",
    "assert_idle",
    "assert_same_tokens",
    "make_engine",
    "make_llm",
    "run_engine",
    "tiny_model",
]
