"""The documentation is true: snippets run, commands and settings exist, links and names lead somewhere.

What a page's fences mean here::

    python     run in order, in one namespace a page; one that begins with "# some/file.py" is that file's own text
    toml       read as settings, or as somebody's pyproject.toml
    bash       each command is parsed by what it calls; curl is run against a server
    console    run; what it prints holds the lines below "$ ..." in order, "..." standing for any lines

``<!-- not run: why -->`` before a fence leaves it at being parsed.
"""

import ast
import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
from benchmarks.__main__ import main as benchmarks
from click.testing import CliRunner
from tests.server.serving import Served, serving

from mini_infer.cli import main as mini_infer
from mini_infer.cli import serve as mini_infer_serve
from mini_infer.cli.common import read_settings
from mini_infer.model.demo import demo_path
from mini_infer.plugin_system.index import discover
from mini_infer.plugin_system.sets import PLUGIN_SETS
from mini_infer.settings import Settings, load_settings
from mini_infer.testing.models import tiny_checkpoint

ROOT = Path(__file__).parents[1]
PATTERNS = ("README.md", "docs/*.md", "plugins/**/*.md", "models/**/*.md", "server/**/*.md", "tests/**/*.md")
PAGES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
SOURCES = [path for root in ("core", "plugins", "models", "server") for path in sorted((ROOT / root).rglob("*.py"))]
BASE_URL = "http://127.0.0.1:8000"
OTHERS_COMMANDS = {"source", "cd", "git", "hf", "cp"}
OUR_COMMANDS = (
    "mini-infer ",
    "mini-infer-serve ",
    "make ",
    "python -m benchmarks",
    "pip install",
    "pytest ",
    "MINI_INFER_",
)
MOST_README_LINES = 130


@dataclass(frozen=True)
class Block:
    """A fence, or one line of an indented block (``language`` is then "bash" if it is a command of ours)."""

    page: Path
    line: int
    language: str
    text: str
    run: bool = True

    def __str__(self) -> str:
        return f"{page_name(self.page)}:{self.line}"


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def read(page: Path) -> tuple[list[Block], str]:
    """A page's blocks, and its text without them."""
    found: list[Block] = []
    prose: list[str] = []
    fence: list[str] | None = None
    language, start, run = "", 0, True
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if fence is not None:
            if line.strip() != "```":
                fence.append(line)
                continue
            found.append(Block(page, start, language, textwrap.dedent("\n".join(fence)) + "\n", run))
            fence = None
        elif line.lstrip().startswith("```"):
            fence, language, start = [], line.strip().strip("`"), number
            run = not any(note.startswith("<!-- not run:") for note in [p for p in prose if p.strip()][-1:])
        elif line.startswith("    ") and line.strip().startswith(OUR_COMMANDS):
            found.append(Block(page, number, "bash", line.strip() + "\n"))
        else:
            prose.append(line)
    assert fence is None, f"{page_name(page)}:{start}: the fence does not end"
    return found, "\n".join(prose)


def blocks(language: str) -> list[Block]:
    return [block for page in PAGES for block in read(page)[0] if block.language == language]


# -- python -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """What pages call the server at port 8000; it repeats what it is told."""
    with serving(app={"model": "demo"}, max_model_len=1024) as served:
        yield served


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.language == "python" for b in read(p)[0])], ids=page_name)
def test_python(page: Path, server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if page.name != "README.md":  # one page with the real model is enough
        stand_in = small_demo(tmp_path)
        monkeypatch.setattr("mini_infer.model.checkpoint.demo_gguf_path", lambda: stand_in)
    namespace: dict[str, Any] = {"__name__": "a_page"}
    for block in read(page)[0]:
        if block.language != "python":
            continue
        quoted = re.match(r"# ([\w./]+\.py)\n", block.text)
        if quoted is not None and (ROOT / quoted[1]).is_file():
            source = textwrap.dedent(block.text.removeprefix(quoted[0])).strip()
            assert _without_indent(source) in _without_indent((ROOT / quoted[1]).read_text()), f"{block}: not its text"
            continue
        code = compile(block.text.replace(BASE_URL, server.url), str(block), "exec")
        if block.run:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, namespace)


def small_demo(tmp_path: Path) -> Path:
    """A tiny random model with the demo's tokenizer."""
    folder = tiny_checkpoint(tmp_path / "demo", vocab_size=49152, max_position_embeddings=8192, num_hidden_layers=1)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo_path() / file, folder)
    return folder


def _without_indent(source: str) -> str:
    return "\n".join(line.strip() for line in source.splitlines())


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_toml(block: Block, tmp_path: Path) -> None:
    content = tomllib.loads(block.text)
    if content.keys() & {"project", "tool", "build-system"}:
        return
    file = tmp_path / "mini-infer.toml"
    file.write_text(block.text)
    check_settings(load_settings(config=file, environ={}))


def check_settings(settings: Settings) -> None:
    """The plugins named are there, unless they lie in a folder of the reader's own, and take these settings."""
    if settings.plugin_dirs:
        return
    index = discover(())
    for name in (*settings.plugins, *settings.without):
        assert name in index or name in PLUGIN_SETS, f"there is no plugin or set {name!r}"
    for name, table in settings.plugin.items():
        model = getattr(index.get(name).load(), "Settings", None)  # its library may be missing here
        assert model is not None, f"the plugin {name!r} has no settings"
        model(**{key: _plain(value) for key, value in table.items()})


def _plain(value: Any) -> Any:
    """Text of ``--set`` or the environment as TOML reads it, where it does."""
    with contextlib.suppress(tomllib.TOMLDecodeError):
        return tomllib.loads(f"value = {value}")["value"] if isinstance(value, str) else value
    return value


# -- commands ---------------------------------------------------------------------------------------------------------


def commands(text: str) -> list[str]:
    lines = text.replace("\\\n", " ").splitlines()
    return [part.strip() for line in lines for part in line.split("&&") if part.strip() and not line.startswith("#")]


SHOWN = [(f"{b}: {c}", c) for b in blocks("bash") for c in commands(b.text)]
INLINE = [
    (f"{page_name(page)}: {command}", command)
    for page in PAGES
    for command in re.findall(r"`([^`\n]+)`", read(page)[1])
    if command.removeprefix(".venv/bin/").startswith(OUR_COMMANDS) and "..." not in command
]


@pytest.mark.parametrize("command", [c for _, c in SHOWN + INLINE], ids=[i for i, _ in SHOWN + INLINE])
def test_command(command: str, server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command, comments=True)
    while words and (assigned := re.fullmatch(r"([A-Z_]+)=(.*)", words[0])):
        monkeypatch.setenv(assigned[1], assigned[2])
        words.pop(0)
    if not words:  # a variable alone
        load_settings()
        return
    match [words[0].removeprefix(".venv/bin/"), *words[1:]]:
        case ["mini-infer", *rest]:
            check_click(mini_infer, rest)
        case ["mini-infer-serve", *rest]:
            check_click(mini_infer_serve, rest)
        case ["python", "-m", "benchmarks", *rest]:
            check_click(benchmarks, [word for word in rest if "*" not in word])
        case ["python", "-m", "pytest", *rest] | ["pytest", *rest]:
            paths = [word.partition("::")[0] for word in rest if "/" in word]
            assert paths and all((ROOT / path).exists() for path in paths)
        case ["python", script, *_] if script.endswith(".py"):
            assert (ROOT / script).is_file()
        case ["make", *rest]:
            check_make(rest)
        case ["pip", "install", *rest]:
            check_extras(rest)
        case ["curl", *rest]:
            check_curl(server, rest)
        case [other, *_]:
            assert other in OTHERS_COMMANDS, f"nobody knows how to check {other!r}"


def check_click(command: click.Command, words: list[str]) -> None:
    """The command exists and takes these arguments; settings among them are settings there are."""
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no command {words[0]!r} in {sorted(command.commands)}"
        command, words = command.commands[words[0]], words[1:]
    if isinstance(command, click.Group):
        return
    try:
        params = command.make_context(command.name, list(words)).params
    except click.exceptions.Exit:  # --help and --version say their word and leave
        return
    if "sets" in params:
        given = {name: params[name] for name in ("sets", "model", "plugin_names")}
        check_settings(read_settings(config=None, **given))


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, assigns, _ = word.partition("=")
        pattern = rf"^{name} \?=" if assigns else rf"^{name}:"
        assert re.search(pattern, makefile, re.MULTILINE), f"the Makefile has no {name!r}"


def check_extras(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words:
        wanted = re.fullmatch(r"(?:\.|mini-infer)\[([\w,]+)\]", word)
        assert wanted is None or set(wanted[1].split(",")) <= set(project["optional-dependencies"])


def check_curl(server: Served, words: list[str]) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    told = [word.replace(BASE_URL, server.url) for word in words]
    environment = {**os.environ, "no_proxy": "127.0.0.1"}
    done = subprocess.run(["curl", "-sS", "--fail", *told], capture_output=True, text=True, env=environment, timeout=20)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "-N" not in words or done.stdout.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize("block", blocks("console"), ids=str)
def test_console(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("the pages show what a CPU prints")
    monkeypatch.chdir(tmp_path)
    for shown in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, expected = shown.partition("\n")
        program, *words = shlex.split(command)
        assert program == "mini-infer"
        done = CliRunner().invoke(mini_infer, words)
        assert done.exit_code == 0, done.output
        printed = [" ".join(line.split()) for line in done.stdout.splitlines()]
        for line in expected.splitlines():
            wanted = " ".join(line.split())
            if wanted and wanted != "...":
                matching = re.compile(re.escape(wanted).replace(r"\.\.\.", ".*"))
                at = next((i for i, text in enumerate(printed) if matching.fullmatch(text)), None)
                assert at is not None, f"{block}: {wanted!r} is not in\n" + "\n".join(printed)
                printed = printed[at + 1 :]


# -- links and names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", read(page)[1]):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page_name(page)} links to {target}, which is not there"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page_name(page)} links to {target}: no such heading"


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_names(page: Path) -> None:
    """Files, modules and members of classes that a page names are there."""
    for name in set(re.findall(r"`([^`\n]+)`", read(page)[1])):
        if re.fullmatch(r"mini_infer\w*(\.\w+)+", name):
            assert is_known(name), f"{page_name(page)}: there is no {name}"
        elif re.fullmatch(r"[A-Z]\w+\.[a-z_]\w*", name):
            assert name in members(), f"{page_name(page)}: there is no {name}"
        elif re.fullmatch(r"[\w./]+\.(py|cpp|h)|[\w.]+/[\w./]*/", name) and not name.startswith(("my_", "path/")):
            places = [place / name for place in (ROOT, ROOT / "core/mini_infer", page.parent)]
            if "/" not in name:
                places += [
                    path for root in ("core", "plugins", "models", "server") for path in ROOT.glob(f"{root}/**/{name}")
                ]
            assert any(place.exists() for place in places), f"{page_name(page)}: there is no {name}"


def is_known(dotted: str) -> bool:
    """Whether it is a module, a name in one, or a group of entry points."""
    if dotted in (ROOT / "pyproject.toml").read_text():
        return True
    parts = dotted.split(".")
    for root in ("core", "plugins", "models", "server"):
        for depth in range(len(parts), 0, -1):
            base = ROOT.joinpath(root, *parts[:depth])
            file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
            if file.is_file():
                words = re.findall(r"\w+", file.read_text())
                return all(part in words for part in parts[depth:])
    return False


@cache
def members() -> set[str]:
    """``Class.member`` of every class."""
    found: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                        found.add(f"{node.name}.{item.name}")
                    elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        found.add(f"{node.name}.{item.target.id}")
    return found


def test_each_auto_is_decided_where_the_page_says() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    table = text[text.index("### Where each") :].split("\n\n")[1]
    for row in table.splitlines()[2:]:
        _, deciders, files = (re.findall(r"`([^`]+)`", cell) for cell in row.strip("|").split("|"))
        source = "".join((ROOT / "core/mini_infer" / file).read_text() for file in files)
        for decider in deciders:
            assert re.search(rf"^(def|class) {decider}\b|^{decider}\b.* =", source, re.MULTILINE), row


@pytest.mark.parametrize("page", ["quickstart", "troubleshooting"])
def test_the_errors_of_a_page_are_said_so(page: str) -> None:
    """Each message in its table is one that the code can give."""
    text = (ROOT / f"docs/{page}.md").read_text()
    table = text[text.index("| it says |") :].split("\n\n")[0]
    for row in table.splitlines()[2:]:
        cell = row.strip("|").split("|")[0]
        for message in re.findall(r"`([^`]+)`", cell):
            if "(pip)" not in cell:
                parts = [re.escape(part.strip()) for part in re.split(r"\.\.\.|\b\d[\d.]*\b", message)]
                pattern = re.compile(".*".join(parts))
                assert any(pattern.search(known) for known in messages()), f"nobody says {message!r}"


@cache
def messages() -> list[str]:
    """Every text in the code, with a gap where a value stands."""
    found: list[str] = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                pieces = [p.value if isinstance(p, ast.Constant) else " … " for p in node.values]
                found.append("".join(map(str, pieces)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


# -- what has to be there ----------------------------------------------------------------------------------------------


PLUGIN_FOLDERS = sorted(path.parent for root in ("plugins", "models") for path in (ROOT / root).rglob("plugin.py"))


@pytest.mark.parametrize("folder", PLUGIN_FOLDERS, ids=lambda folder: folder.name)
def test_each_plugin_has_a_readme_and_an_entry_point(folder: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    package = f"{folder.parent.name}.{folder.name}.plugin"
    points = {**project["entry-points"]["mini_infer"], **project["entry-points"]["mini_infer.models"]}
    assert points.get(folder.name.replace("_", "-")) == package
    readme = (folder / "README.md").read_text()
    for part in ("When it hurts", "Measured"):
        assert part in readme, f"{folder.name}/README.md does not say {part!r}"
    assert folder.name in (ROOT / "docs/README.md").read_text(), "docs/README.md does not list it"


def test_the_readme_is_a_page_and_the_index_lists_all() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_README_LINES
    index = (ROOT / "docs/README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, f"docs/README.md does not list {page.name}"
