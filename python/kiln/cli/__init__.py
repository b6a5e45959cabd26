"""`python -m kiln`: doctor, bench, explain, bisect, autotune, cache."""


def main() -> None:
    """Runs the command line; imports the commands only now, so that `import kiln` stays quick."""
    from kiln.cli.app import app

    app()
