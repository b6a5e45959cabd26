"""`kiln.explain`: what was captured of a program, where its graphs break and why, and what each stage took."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

from kiln import _C


@dataclasses.dataclass
class Break:
    """Why a graph ended: id and hint from the table of graph breaks, and the user's stack."""

    id: str
    cause: str
    hint: str
    stack: str
    file: str
    line: int

    def __str__(self) -> str:
        text = f"{self.id}: {self.cause}\n  at {self.file}:{self.line}"
        if self.hint:
            text += f"\n  hint: {self.hint}"
        if self.stack.strip():
            text += "\n" + "\n".join("    " + line for line in self.stack.rstrip().splitlines())
        return text


@dataclasses.dataclass
class Entry:
    """One captured region: a whole function, or the part of one up to a graph break."""

    function: str
    file: str
    line: int
    graph: str | None
    ops: list[str]
    guards: list[str]
    graph_break: Break | None
    stages: list[tuple[str, float]]
    aten: list[str]
    bytecode: str | None
    artifact: str | None
    dot: list[str]

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Entry":
        cause = record.get("break")
        return cls(
            function=record.get("function", "?"),
            file=record.get("file", "?"),
            line=record.get("line", 0),
            graph=record.get("graph"),
            ops=list(record.get("ops") or []),
            guards=list(record.get("guards") or []),
            graph_break=Break(**{f.name: cause.get(f.name, "") for f in dataclasses.fields(Break)}) if cause else None,
            stages=[(name, float(seconds)) for name, seconds in record.get("stages") or []],
            aten=list(record.get("aten") or []),
            bytecode=record.get("bytecode"),
            artifact=record.get("artifact"),
            dot=list(record.get("dot") or []),
        )


@dataclasses.dataclass
class Explanation:
    """The result of kiln.explain: printable, and readable part by part."""

    entries: list[Entry]
    result: Any = None

    @property
    def graph_count(self) -> int:
        return sum(1 for e in self.entries if e.graph)

    @property
    def graph_break_count(self) -> int:
        return len(self.break_reasons)

    @property
    def op_count(self) -> int:
        return sum(len(e.ops) for e in self.entries)

    @property
    def break_reasons(self) -> list[Break]:
        return [e.graph_break for e in self.entries if e.graph_break]

    @property
    def graphs(self) -> list[str]:
        return [e.graph for e in self.entries if e.graph]

    @property
    def ops_per_graph(self) -> list[list[str]]:
        return [e.ops for e in self.entries if e.graph]

    @property
    def guards(self) -> list[str]:
        return [guard for e in self.entries for guard in e.guards]

    @property
    def stage_times(self) -> dict[str, float]:
        """Seconds per stage over all graphs, in the order in which the stages first ended."""
        total: dict[str, float] = {}
        for entry in self.entries:
            for name, seconds in entry.stages:
                total[name] = total.get(name, 0.0) + seconds
        return total

    def __str__(self) -> str:
        lines = [
            f"{plural(self.graph_count, 'graph')}, {plural(self.graph_break_count, 'break')}, {plural(self.op_count, 'op')}, "
            f"{plural(len(self.guards), 'guard')}"
        ]
        for number, entry in enumerate(self.entries, 1):
            lines.append(f"\n[{number}] {entry.function} ({entry.file}:{entry.line})")
            if entry.graph:
                counts = Counter(entry.ops).most_common()
                lines.append("  ops: " + ", ".join(f"{op} x{n}" if n > 1 else op for op, n in counts))
                lines += ["  graph:"] + ["    " + text for text in entry.graph.rstrip().splitlines()]
            else:
                lines.append("  no tensor ops")
            if entry.guards:
                lines += ["  guards:"] + ["    " + guard for guard in entry.guards]
            if entry.graph_break:
                lines += ["  break:"] + ["    " + text for text in str(entry.graph_break).splitlines()]
        if self.stage_times:
            lines.append("\nstage times (ms)")
            for name, seconds in self.stage_times.items():
                lines.append(f"  {seconds * 1e3:9.2f}  {name}")
        return "\n".join(lines)


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


class recording:
    """While entered, every finished compile is recorded; `entries` holds them afterwards."""

    def __enter__(self) -> "recording":
        _C.take_records()
        _C.set_record(True)
        self.entries: list[Entry] = []
        return self

    def __exit__(self, *error: object) -> None:
        _C.set_record(False)
        self.entries = [Entry.from_record(record) for record in _C.take_records()]


def explain(f: Callable[..., Any], **arguments: Any) -> Callable[..., Explanation]:
    """explain(f)(*args) compiles and runs f(*args) once and returns an Explanation. arguments: kiln.compile's.

    It is compiled anew, whatever is compiled of f already, and forgotten afterwards.
    """
    from kiln import api

    def run(*args: Any, **kwargs: Any) -> Explanation:
        compiled = api.compile_any(api.original(f), api.checked(**arguments, alone=True))
        with recording() as record:
            result = compiled(*args, **kwargs)
        return Explanation(record.entries, result)

    return run
