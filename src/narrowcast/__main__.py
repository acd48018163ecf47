"""``python -m narrowcast`` is the command line."""

from __future__ import annotations

from narrowcast.cli import main

if __name__ == "__main__":
    main()
