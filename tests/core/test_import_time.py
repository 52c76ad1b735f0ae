"""Nothing heavy at import: ``import mini_infer``, the settings, plugin modules' imports and ``mini-infer --help``."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "jinja2", "gguf", "triton")
TOOLS = ("pydantic", "pydantic_settings", "pluggy", "msgspec", "click", "rich", "litestar", "uvicorn")
AROUND = ("mini_infer_plugins", "mini_infer_models", "mini_infer_server")

REPORT = """
import sys, time
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
print(f"{{seconds:.3f}}", *sorted({{name.partition(".")[0] for name in sys.modules}}))
"""


def modules_after(statement: str) -> set[str]:
    """What a fresh interpreter has imported after a statement; the time that it took is printed, not judged."""
    command = [sys.executable, "-c", REPORT.format(statement=statement)]
    seconds, *modules = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    print(f"{statement}: {seconds} s")
    return set(modules)


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import mini_infer", set()),
        ("import mini_infer.errors", set()),
        ("from mini_infer import SamplingParams", {"msgspec"}),
        ("from mini_infer.plugins import hookimpl", {"pluggy"}),
        ("import mini_infer.interfaces", {"msgspec"}),
        ("import mini_infer.settings.schema", {"pydantic", "pydantic_settings"}),
        ("import mini_infer.plugin_system.manager", {"pydantic", "pluggy", "msgspec"}),
        ("import mini_infer.cli", {"click"}),
    ],
)
def test_importing_brings_nothing_heavy(statement: str, allowed: set[str]) -> None:
    assert modules_after(statement) & {*HEAVY, *TOOLS, *AROUND} <= allowed


def test_help_needs_no_engine() -> None:
    statement = "from click.testing import CliRunner; from mini_infer.cli import main; CliRunner().invoke(main, ['-h'])"
    assert modules_after(statement) & {*HEAVY, *TOOLS, *AROUND} <= {"click"}
