"""`python -m fulltilt` is `fulltilt`."""

from fulltilt.cli import main

main()
