"""Writes the reference pages that are made from the C++ tables: options, logs, graph breaks, ops.

Usage: gen_docs.py [--check]. With --check nothing is written; exits with 1 if a page is not what the table says.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"


def rows(path: Path, macro: str) -> list[list[str]]:
    """The arguments of each `macro(...)` row of a table: strings joined and unquoted, other arguments as written."""
    text = re.sub(r"^\s*(//|#).*$", "", path.read_text(), flags=re.M)
    found = []
    for match in re.finditer(rf"\b{macro}\(", text):
        args, depth, start, position, quoted = [], 1, match.end(), match.end(), False
        while depth:
            char = text[position]
            if quoted:
                if char == "\\":
                    position += 1
                elif char == '"':
                    quoted = False
            elif char == '"':
                quoted = True
            elif char in "({[":
                depth += 1
            elif char in ")}]":
                depth -= 1
            if not quoted and ((char == "," and depth == 1) or depth == 0):
                args.append(text[start:position].strip())
                start = position + 1
            position += 1
        found.append([unquote(a) for a in args])
    return found


def unquote(arg: str) -> str:
    pieces = re.findall(r'"(?:[^"\\]|\\.)*"', arg)
    if arg.startswith('"') and pieces:
        return "".join(ast.literal_eval(p) for p in pieces)
    return re.sub(r"\s+", " ", arg)


def table(header: list[str], body: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in body]
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def options_page() -> str:
    names = {"int64_t": "int", "std::string": "str", "double": "float"}
    body = []
    for kind, name, default, env, text in rows(CSRC / "base/options.def", "KILN_OPTION"):
        body.append([code(name), names.get(kind, kind), code(default), code(env), text])
    return (
        "# Options\n\nRead and written as attributes of `kiln.config`, for a while with `kiln.config.patch(...)`, for one\n"
        "compiled callable with `kiln.compile(f, options={...})`, or for the process by the environment variable.\n"
        "This page is made from `csrc/base/options.def` by `tools/gen_docs.py`.\n\n"
        + table(["option", "type", "default", "environment", "meaning"], body)
    )


def logs_page() -> str:
    text = (CSRC / "base/log.h").read_text()
    block = text[text.index("#define KILN_LOG_TOPICS") :]
    block = block[: block.index("\n\n")]
    body = [[code(n), h] for n, h in re.findall(r'X\((\w+),\s*"([^"]*)"\)', block)]
    return (
        '# Logs\n\n`KILN_LOGS=graph,guards` in the environment, or `kiln.set_logs("graph,guards")`, switches topics on.\n'
        "A topic prints whole texts to stderr. This page is made from `csrc/base/log.h` by `tools/gen_docs.py`.\n\n"
        + table(["topic", "prints"], body)
    )


def graph_breaks_page() -> str | None:
    path = CSRC / "python/capture/graph_breaks.def"
    if not path.exists():
        return None
    found = re.search(r"^\s*(KILN_\w+)\(", path.read_text(), flags=re.M)
    body = []
    for row in rows(path, found.group(1)):
        body.append([code(row[0]), *row[1:]])
    width = max(len(r) for r in body)
    header = ["id", "what helps"] + ["more"] * (width - 2)
    return (
        "# Graph breaks\n\nWhere a program leaves the graph, and what helps. The id is printed with every break, with the line\n"
        "of the user's program. This page is made from `csrc/python/capture/graph_breaks.def` by `tools/gen_docs.py`.\n\n"
        + table(header[:width], [r + [""] * (width - len(r)) for r in body])
    )


def ops_page() -> str | None:
    tables = sorted((CSRC / "ops").glob("*.def"))
    body = []
    for path in tables:
        for macro in sorted(set(re.findall(r"^\s*(KILN_\w*OP\w*)\(", path.read_text(), flags=re.M))):
            for row in rows(path, macro):
                body.append([code(row[0]), ", ".join(code(c) for c in row[1:]), path.name])
    if not body:
        return None
    return (
        f"# Ops\n\n{len(body)} ATen ops have a row in kiln's op tables: traits, shape rule and lowering. An op without a row runs\n"
        "as an ATen call inside the graph. This page is made from `csrc/ops/*.def` by `tools/gen_docs.py`.\n\n"
        + table(["op", "traits and rules", "table"], sorted(body))
    )


PAGES = {
    "options.md": options_page,
    "logs.md": logs_page,
    "graph_breaks.md": graph_breaks_page,
    "ops.md": ops_page,
}


def main() -> int:
    check = "--check" in sys.argv
    stale = []
    for name, make in PAGES.items():
        text = make()
        if text is None:
            continue
        path = ROOT / "docs" / name
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not check:
            path.write_text(text)
    if stale:
        print(f"gen_docs: {'out of date, run make docs' if check else 'wrote'}: {', '.join(stale)}")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
