"""``python -m mini_infer`` is ``mini-infer``."""

from mini_infer.cli import main

if __name__ == "__main__":
    main()
