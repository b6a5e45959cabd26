"""The demo's page: one HTML file with its drawings inside."""

import io
import re
from pathlib import Path

import jinja2
import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from kiln.drawing import dot_to_svg

PAGE = jinja2.Template(
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kiln: training report</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem; color: #1f2937; }
 table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .25rem 1rem; text-align: right; border-bottom: 1px solid #e5e7eb; }
 td:first-child, th:first-child { text-align: left; padding-left: 0; }
 figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; }
 .graph { max-height: 32rem; overflow: auto; border: 1px solid #e5e7eb; border-radius: 6px; padding: .5rem; }
 .bar { background: #2563eb; height: .7rem; display: inline-block; border-radius: 2px; min-width: 1px; }
 .stages td { padding: .1rem .75rem; } .stages td:last-child { text-align: left; width: 24rem; }
 pre { background: #f8fafc; padding: .75rem; overflow: auto; } summary { cursor: pointer; margin: .5rem 0; }
</style></head><body>
<h1>Training in eager and in kiln</h1>
<p>Both runs of a task start from the same seed and see the same batches and the same dropout masks. They took turns on one
machine, step by step.</p>
{% for task in tasks %}
<h2>{{ task.title }}</h2>
<table><tr><th></th><th>eager</th><th>kiln</th><th>eager / kiln</th></tr>
{% for row in task.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>
<figure>{{ task.curves }}</figure>
<h3>Time of the compiler's stages</h3>
{% if task.stages %}<table class="stages">{% for name, ms, share in task.stages %}
<tr><td>{{ name }}</td><td>{{ "%.2f"|format(ms) }} ms</td><td><span class="bar" style="width: {{ share }}%"></span></td></tr>{% endfor %}</table>
{% else %}<p>No stage was recorded.</p>{% endif %}
<h3>Captured graphs</h3>
<p>{{ task.summary }}</p>
{% for text in task.breaks %}<pre>{{ text }}</pre>{% endfor %}
{% for svg in task.graphs %}<details {% if loop.first %}open{% endif %}><summary>graph {{ loop.index }} of {{ loop.length }}</summary>
<div class="graph">{{ svg }}</div></details>{% endfor %}
{% endfor %}
</body></html>
""",
    autoescape=True,
)


def inline(svg: str) -> jinja2.utils.markupsafe.Markup:
    """An SVG document as an element of the page."""
    return jinja2.utils.markupsafe.Markup(svg[svg.index("<svg") :])


def curves(runs: dict) -> str:
    """Losses over steps, both runs laid over each other, and the difference below."""
    pyplot.rcParams["svg.hashsalt"] = "kiln"
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 4.5), height_ratios=[3, 1], sharex=True)
    eager, ours = runs["eager"].losses, runs["kiln"].losses
    top.plot(eager, color="#9ca3af", linewidth=4, label="eager")
    top.plot(ours, color="#2563eb", linewidth=1.2, label="kiln")
    top.set_ylabel("loss")
    top.legend(frameon=False)
    bottom.plot([abs(a - b) for a, b in zip(eager, ours)], color="#dc2626", linewidth=1)
    bottom.set_yscale("symlog", linthresh=1e-7)
    bottom.set_ylabel("difference")
    bottom.set_xlabel("step")
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    text = io.StringIO()
    figure.savefig(text, format="svg")
    pyplot.close(figure)
    return text.getvalue()


def stage_rows(stages: dict[str, float]) -> list[tuple[str, float, float]]:
    longest = max(stages.values(), default=0.0) or 1.0
    return [(name, seconds * 1e3, round(100 * seconds / longest, 1)) for name, seconds in stages.items()]


def unique_ids(svg: str, prefix: str) -> str:
    """Drawings on one page must not share ids."""
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', svg)
    return re.sub(r'(xlink:href="#|href="#|url\(#)', rf"\1{prefix}", svg)


def write_report(folder: Path, results: dict) -> Path:
    """Writes folder/report.html; results: title -> (runs, rows of the table). Returns the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = []
    for index, (title, (runs, rows)) in enumerate(results.items()):
        ours = runs["kiln"]
        drawings = [dot_to_svg(dot) for dot in ours.graphs]
        for number, svg in enumerate(drawings):
            (folder / f"graph_{index}_{number}.svg").write_text(svg)
        tasks.append(
            {
                "title": title,
                "rows": rows,
                "curves": inline(unique_ids(curves(runs), f"c{index}")),
                "stages": stage_rows(ours.stages),
                "summary": ours.summary,
                "breaks": ours.breaks,
                "graphs": [inline(unique_ids(svg, f"g{index}_{n}")) for n, svg in enumerate(drawings)],
            }
        )
    path = folder / "report.html"
    path.write_text(PAGE.render(tasks=tasks))
    return path
