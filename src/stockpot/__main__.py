"""`python -m stockpot` is the command `stockpot`.

Python puts the current folder in front of everything else it imports from. A stranger's folder with a `yaml.py` or
`random.py` in it must not decide what the command runs, so that entry goes before anything more is imported.
"""

import os
import sys

if __name__ == "__main__":
    if sys.path and sys.path[0] in ("", os.getcwd()):  # noqa: PTH109  (pathlib may be theirs)
        del sys.path[0]
    from stockpot.cli import main

    main()
