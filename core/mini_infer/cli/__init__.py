"""The command line: ``mini-infer`` and ``mini-infer-serve``.

Contract: a command imports what is heavy inside itself, so ``--help`` is quick; every ``MiniInferError`` ends in its
own plain lines on stderr and exit code 2 (settings, plugins, requests) or 1 (the engine failed), never a traceback.
"""

from mini_infer.cli.main import main
from mini_infer.cli.serve import serve

__all__ = ["main", "serve"]
