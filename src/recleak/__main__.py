"""`python -m recleak` is `recleak`."""

from recleak.cli import main

main()
