"""``python -m dynscope`` is the command ``dynscope``."""

from dynscope.cli import main

if __name__ == "__main__":
    main()
