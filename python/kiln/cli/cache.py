"""`python -m kiln cache`: what is kept on disk between processes."""

from rich.console import Console


def run(console: Console, clear: bool) -> int:
    import kiln

    info = getattr(kiln._C, "disk_cache_info", None)
    if info is None:
        console.print("this build keeps nothing on disk")
        return 0
    if clear:
        kiln._C.disk_cache_clear()
    for name, value in info().items():
        console.print(f"{name}: {value}")
    return 0
