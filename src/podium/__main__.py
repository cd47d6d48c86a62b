"""`python -m podium` is `podium`."""

from podium.cli import main

main()
