"""Graphviz text to SVG, by the `dot` program."""

import shutil
import subprocess
from pathlib import Path

from kiln import exc

LARGE = 50_000  # characters of a graph's text from which on it is drawn quickly rather than best


def dot_to_svg(dot: str) -> str:
    """The SVG drawing of a graph in Graphviz's language. Raises kiln.exc.UserError if there is no `dot` program."""
    if shutil.which("dot") is None:
        raise exc.UserError("drawing graphs needs Graphviz' `dot` program (Debian package graphviz)")
    command = ["dot", "-Tsvg"]
    if len(dot) > LARGE:
        # The best ranks, order and curves of a whole training step take `dot` ten minutes; good ones take seconds.
        command += ["-Gnslimit=0.2", "-Gnslimit1=0.2", "-Gmclimit=0.1", "-Gsplines=line"]
    done = subprocess.run(command, input=dot, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise exc.UserError(f"dot: {done.stderr.strip()[:500]}")
    return done.stdout


def save_svg(dot: str, path: str | Path) -> Path:
    """Draws `dot` into the file `path`."""
    path = Path(path)
    path.write_text(dot_to_svg(dot))
    return path


def draw_fx(gm: object, path: str | Path, name: str = "graph") -> Path:
    """Draws a torch.fx.GraphModule into an SVG file: one box a node, with its target and shape."""
    return save_svg(fx_to_dot(gm, name), path)


COLORS = {
    "placeholder": "#dbeafe",
    "get_attr": "#fde68a",
    "call_function": "#f1f5f9",
    "call_method": "#f1f5f9",
    "call_module": "#e9d5ff",
    "output": "#bbf7d0",
}


def fx_to_dot(gm: object, name: str = "graph") -> str:
    """Graphviz text of a torch.fx.GraphModule."""

    def quote(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'

    lines = [
        f"digraph {quote(name)} {{",
        '  node [shape=box, style="filled,rounded", fontname=Helvetica, fontsize=10];',
    ]
    for node in gm.graph.nodes:
        label = f"{node.name}\n{describe_target(node)}"
        value = node.meta.get("val", node.meta.get("example_value"))
        if hasattr(value, "shape"):
            label += f"\n{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        lines.append(f"  {quote(node.name)} [label={quote(label)}, fillcolor={quote(COLORS[node.op])}];")
        for used in node.all_input_nodes:
            lines.append(f"  {quote(used.name)} -> {quote(node.name)};")
    return "\n".join([*lines, "}"])


def describe_target(node: object) -> str:
    if node.op == "call_function":
        target = node.target
        module = getattr(target, "__module__", "") or ""
        text = getattr(target, "__name__", str(target))
        return str(target) if not isinstance(text, str) else f"{module}.{text}" if module and "." not in text else text
    return str(node.target)
