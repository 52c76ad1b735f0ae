"""Text in and out of the engine: tokenizer, chat template, incremental detokeniser, stop strings.

Contract: nothing here imports torch or transformers when it is imported, and nothing here keeps state between two
requests except caches whose content depends on the tokenizer alone.
"""
