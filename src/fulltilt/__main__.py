"""`python -m fulltilt` is `fulltilt`."""

from fulltilt.cli import main

if __name__ == "__main__":
    main()
