"""The contract suites of Mini-Infer, on what this distribution brings."""

from mini_infer_example.shortest_first import shortest_prompt_first

from mini_infer.testing.contracts import scheduler_suite

TestShortestPromptFirst = scheduler_suite(lambda: shortest_prompt_first(ageing=100.0))
