"""Makes this checkout importable as an installed package: a .pth file in the environment that runs this script, and a
dist-info folder beside the package, so that entry points (torch.compile(model, backend="kiln")) are found."""

import sysconfig
import tomllib
from pathlib import Path


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    package_dir = root / "python"
    info = package_dir / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\nSummary: {project['description']}\n"
    )
    lines = []
    for group, entries in project.get("entry-points", {}).items():
        lines += [f"[{group}]"] + [f"{name} = {target}" for name, target in entries.items()] + [""]
    lines += ["[console_scripts]"] + [f"{name} = {target}" for name, target in project.get("scripts", {}).items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    pth = Path(sysconfig.get_path("purelib")) / "kiln-dev.pth"
    text = f"{package_dir}\n"
    if not pth.exists() or pth.read_text() != text:
        pth.write_text(text)


if __name__ == "__main__":
    main()
