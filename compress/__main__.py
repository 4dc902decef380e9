"""python -m compress"""

from compress.cli import main

main()
