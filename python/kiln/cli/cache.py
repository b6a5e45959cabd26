"""`python -m kiln cache`: what is kept on disk between processes."""

from rich.console import Console


def run(console: Console, clear: bool) -> int:
    import kiln

    info = kiln._C.disk_cache_info()
    if not info:
        why = "its folder cannot be used" if kiln.config.disk_cache else "kiln.config.disk_cache is off"
        console.print(f"nothing is kept on disk: {why} (KILN_LOGS=fallback shows why, docs/options.md where it is)")
        return 0
    if clear:
        if not kiln._C.disk_cache_clear():
            console.print(f"cannot write to {info['path']}")
            return 1
        info = kiln._C.disk_cache_info()
    console.print(f"{info['path']}: {info['kernels']} kernels, {info['bytes'] / 1e6:.1f} MB", soft_wrap=True)
    return 0
