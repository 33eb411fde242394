"""English: short sentences in comments and docstrings, and few translated turns in pages and public docstrings.

tools/english measures the turns; test_docs.py has the length of the pages' sentences.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from helpers import REPOSITORY

# Translated turns in a thousand words.
TURNS_MOST = {"pages": 2.0, "docstrings": 2.0, "headers": 2.0}

SUFFIXES = {".py", ".c", ".cc", ".h", ".S"}
WORDS_MOST = 26
_SENTENCE_END = re.compile(r"(?<=[.!?])[*)\"]*\s+")
_C_TOKEN = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)
_LIST_ITEM = re.compile(r"[-*] |\d+\. ")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def is_python(path: Path) -> bool:
    if path.suffix:
        return path.suffix == ".py"
    with path.open("rb") as file:
        return b"python" in file.readline()


def sources() -> list[Path]:
    """Product code, tests and tools; of the tools, those in Python."""
    found = [REPOSITORY / "setup.py"]
    for folder in ("kvfs", "native", "tests", "tools"):
        for path in sorted((REPOSITORY / folder).rglob("*")):
            if path.is_file() and (
                path.suffix in (".py", ".c", ".cc", ".h", ".S") or (not path.suffix and is_python(path))
            ):
                found.append(path)
    return found


def python_comments(text: str) -> Iterator[tuple[int, str]]:
    """The line and text of each docstring, of each block of whole-line comments, and of each comment behind code."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, docstring
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, alone = token.start[0], token.line.lstrip().startswith("#")
        if block and not (alone and row == last + 1):
            yield last - len(block) + 1, "\n".join(block)
            block = []
        if alone:
            block.append(token.string.lstrip("#! "))
            last = row
        else:
            yield row, token.string.lstrip("# ")
    if block:
        yield last - len(block) + 1, "\n".join(block)


def c_comments(text: str) -> Iterator[tuple[int, str]]:
    for match in _C_TOKEN.finditer(text):
        if match.group().startswith(("/*", "//")):
            inside = match.group().removeprefix("/*").removeprefix("//").removesuffix("*/")
            words = inspect.cleandoc(re.sub(r"^ *\*(?: |$)", "", inside, flags=re.MULTILINE))
            yield text.count("\n", 0, match.start()) + 1, words


def paragraphs(text: str) -> Iterator[str]:
    """Parts that are prose: list items one by one, and no rows of tables, whose columns lie two spaces apart."""
    part: list[str] = []
    in_table = False
    for line in [*text.splitlines(), ""]:
        row = re.search(r"\S {2,}\S", line.strip()) is not None
        in_table = row or (in_table and line.startswith("    "))
        apart = in_table or not line.strip() or _LIST_ITEM.match(line.strip())
        if apart and part:
            yield " ".join(" ".join(part).split())
            part = []
        if not in_table:
            part.append(line)


def sentences(path: Path) -> Iterator[tuple[str, str]]:
    """Each sentence of a file, with its place: `kvfs/units.py:7`."""
    text = path.read_text()
    found = c_comments(text) if path.suffix in SUFFIXES - {".py"} else python_comments(text)
    for line, comment in found:
        for paragraph in paragraphs(comment):
            for sentence in _SENTENCE_END.split(paragraph):
                yield (
                    f"{path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path.name}:{line}",
                    sentence,
                )


def faults(path: Path) -> list[str]:
    return [
        f"{place}: {len(sentence.split())} words: {sentence}"
        for place, sentence in sentences(path)
        if len(sentence.split()) > WORDS_MOST
    ]


def test_sentences_of_comments_are_short() -> None:
    assert [fault for path in sources() for fault in faults(path)] == []


# ---- the measure itself: each fault is seen ----

LONG = " ".join(["word"] * (WORDS_MOST + 1))
SHORT = " ".join(["word"] * WORDS_MOST)


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.py", f'"""Fine.\n\n{LONG}.\n"""\n', [1]),
        ("a.py", f'def call():\n    """First.\n\n    {LONG}.\n    """\n', [2]),
        ("a.py", f'class A:\n    """{SHORT}\n    {SHORT}."""\n', [2]),
        ("a.py", f"a = 1\n# Fine. {SHORT}\n# is left.\n", [2]),
        ("a.py", f"a = 1  # {LONG}\nb = 2  # {LONG}\n", [1, 2]),
        ("a.py", f'# Fine.\na = "# {LONG}"\n# - fine\n# - {LONG}\n', [3]),
        ("a.py", f"# {SHORT}. {SHORT}.\n", []),
        (
            "a.py",
            f'"""Verbs:\n\n    what NAME    {SHORT}\n    that NAME    {SHORT}\n                 on two lines\n"""\n',
            [],
        ),
        ("a.c", f'/* Fine. {LONG}. */\nchar *a = "/* {LONG} */";\n', [1]),
        ("a.h", f"int a;\n\n/* {SHORT}\n * {SHORT}. */\n", [3]),
        ("a.h", f"int a;   /* {LONG} */\nint b;   // {LONG}\n", [1, 2]),
        ("a.c", f"/* Files:\n *\n * a.c    {SHORT}\n * b.c    {SHORT} */\n", []),
    ],
)
def test_a_fault_is_seen_where_it_is(tmp_path: Path, name: str, text: str, lines: list[int]) -> None:
    (tmp_path / name).write_text(text)
    assert [int(fault.split(":")[1]) for fault in faults(tmp_path / name)] == lines


def test_most_of_the_code_is_measured() -> None:
    names = {str(path.relative_to(REPOSITORY)) for path in sources()}
    assert {"kvfs/plane.py", "native/src/plane.c", "native/include/kvfs.h", "tests/helpers.py", "tools/house"} <= names


# ---- translated turns ----


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("english", str(REPOSITORY / "tools/english"))
    spec = importlib.util.spec_from_loader("english", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["english"] = module
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", TURNS_MOST)
def test_translated_turns_are_few(tool: ModuleType, kind: str) -> None:
    texts = [text for text in tool.texts(REPOSITORY) if text.kind == kind]
    assert sum(text.words for text in texts) > 10_000, "the measure sees too little"
    assert tool.rate(texts) <= TURNS_MOST[kind], tool.report(texts) + "\n" + tool.places(texts, [])


def test_each_turn_is_seen_in_its_example_and_in_no_better_sentence(tool: ModuleType) -> None:
    for turn in tool.TURNS:
        assert turn.pattern.search(turn.example), turn.name
        for other in tool.TURNS:
            assert not other.pattern.search(turn.better), f"{other.name}: {turn.better}"


def test_a_tree_with_every_turn_is_measured_where_it_has_them(tool: ModuleType, tmp_path: Path) -> None:
    examples = [turn.example for turn in tool.TURNS]
    names = {turn.name for turn in tool.TURNS}
    for folder in ("docs/internals", "kvfs", "native/include"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "README.md").write_text("# Fine\n\n" + "\n\n".join(examples) + "\n")
    (tmp_path / "docs/page.md").write_text(
        "Fine `so many` and [fine](so many.md).\n\n    so many\n\n```\nso many\n```\n\n"
        "| so | many |\n| - | so many |\n\n- so\n  many\n"
    )
    (tmp_path / "docs/internals/files.md").write_text("so many\n")
    (tmp_path / "kvfs/a.py").write_text(
        '"""A file.\n\n' + "\n\n".join(examples) + '\n"""\n\n\n'
        'def _own():\n    """So many."""\n\n\n'
        'class _Own:\n    def a(self):\n        """So many."""\n\n\n'
        'class Public:\n    """So many."""\n\n    def b(self):\n        """So many."""\n        # so many\n'
    )
    (tmp_path / "native/include/a.h").write_text(
        "/* " + "\n * ".join(examples) + '\n */\nconst char *a = "so many"; // so many\n'
    )
    found = {text.name: text for text in tool.texts(tmp_path)}
    turns = {name: text.turns() for name, text in found.items()}
    assert set(found) == {"README.md", "docs/page.md", "kvfs/a.py", "native/include/a.h"}
    for name in ("README.md", "kvfs/a.py", "native/include/a.h"):
        assert {turn for _, turn, _ in turns[name]} == names
    assert [line for line, _, _ in turns["docs/page.md"]] == [10, 12]
    outside = found["kvfs/a.py"].lines[len(examples) + 1 :]
    assert [words for _, words in outside] == ["So many.", "So many."]
    assert found["kvfs/a.py"].turns()[-1][0] == (tmp_path / "kvfs/a.py").read_text().count("\n") - 1
    assert tool.rate([found["docs/page.md"]]) == pytest.approx(1000 * 2 / found["docs/page.md"].words)
    report = tool.report(list(found.values()))
    assert "docs/page.md" in report and f"{len(turns['kvfs/a.py']):5}" in report
    assert tool.places(list(found.values()), ["docs/page.md"]).startswith("docs/page.md:10: so many: ")
