"""`python -m fulltilt` and the command `fulltilt`."""

import sys


def main() -> None:
    try:
        from fulltilt.cli import main as run_command  # takes a third of a second, in which Ctrl-C may come
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    run_command()


if __name__ == "__main__":
    main()
