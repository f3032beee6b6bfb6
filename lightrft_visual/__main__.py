"""`python -m lightrft_visual` is the command `lightrft-visual`."""

import sys


def main() -> None:
    """The command; Ctrl-C ends it with a line and code 130, also while its modules are imported."""
    try:
        from .cli import main as command

        command()
    except KeyboardInterrupt:
        sys.stderr.write("error: ended by Ctrl-C\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
