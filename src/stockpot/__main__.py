"""`python -m stockpot` is the command `stockpot`."""

from stockpot.cli import main

main()
