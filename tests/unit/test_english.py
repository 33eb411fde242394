"""English of comments and docstrings: short sentences that begin with their subject. test_docs.py has the pages."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import REPOSITORY

SUFFIXES = {".py", ".c", ".cc", ".h", ".S"}
WORDS_MOST = 26
_BEGINNING = re.compile(r"(?:[-*] |\d+\. )?[*\"'(]*(?:What|Who|Whoever|That|None)\b", re.IGNORECASE)
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
        if len(sentence.split()) > WORDS_MOST or _BEGINNING.match(sentence)
    ]


def test_sentences_of_comments_are_short_and_begin_with_their_subject() -> None:
    assert [fault for path in sources() for fault in faults(path)] == []


# ---- the measure itself: each fault is seen ----

LONG = " ".join(["word"] * (WORDS_MOST + 1))
SHORT = " ".join(["word"] * WORDS_MOST)


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.py", '"""Fine.\n\nWhat it holds.\n"""\n', [1]),
        ("a.py", f'def call():\n    """First.\n\n    {LONG}.\n    """\n', [2]),
        ("a.py", f'class A:\n    """{SHORT}\n    {SHORT}."""\n', [2]),
        ("a.py", "a = 1\n# Fine. None of it\n# is left.\n", [2]),
        ("a.py", f"a = 1  # {LONG}\nb = 2  # {LONG}\n", [1, 2]),
        ("a.py", "a = 1  # who reads it\n", [1]),
        ("a.py", '# Fine.\na = "# What is no comment."\n# - fine\n# - Whoever comes\n', [3]),
        ("a.py", f"# {SHORT}. {SHORT}.\n", []),
        (
            "a.py",
            '"""Verbs:\n\n    what NAME    says it\n    that NAME    says that\n                 on two lines\n"""\n',
            [],
        ),
        ("a.c", '/* Fine. That one is not. */\nchar *a = "/* What */";\n', [1]),
        ("a.h", f"int a;\n\n/* {SHORT}\n * {SHORT}. */\n", [3]),
        ("a.h", "int a;   /* what it is */\nint b;   // None of it\n", [1, 2]),
        ("a.c", "/* Files:\n *\n * a.c    what is read\n * b.c    who reads */\n", []),
    ],
)
def test_a_fault_is_seen_where_it_is(tmp_path: Path, name: str, text: str, lines: list[int]) -> None:
    (tmp_path / name).write_text(text)
    assert [int(fault.split(":")[1]) for fault in faults(tmp_path / name)] == lines


def test_most_of_the_code_is_measured() -> None:
    names = {str(path.relative_to(REPOSITORY)) for path in sources()}
    assert {"kvfs/plane.py", "native/src/plane.c", "native/include/kvfs.h", "tests/helpers.py", "tools/house"} <= names
