"""`python -m kiln cache`: what is kept on disk between processes."""

from rich.console import Console


def describe() -> str:
    """One line: where kernels are kept and how many, or why none are."""
    import kiln

    info = kiln._C.disk_cache_info()
    if info:
        return f"{info['path']}: {info['kernels']} kernels, {info['bytes'] / 1e6:.1f} MB"
    if not kiln.config.disk_cache:
        return "none: kiln.config.disk_cache is off"
    return "none: its folder cannot be used (KILN_LOGS=fallback shows why, docs/options.md where it is)"


def run(console: Console, clear: bool) -> int:
    """Shows it, or removes it first. 1 if it cannot be removed."""
    import kiln

    if clear and kiln._C.disk_cache_info() and not kiln._C.disk_cache_clear():
        console.print(f"cannot be removed: {describe()}", soft_wrap=True)
        return 1
    console.print(describe(), soft_wrap=True)
    return 0
