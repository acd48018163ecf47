"""A character model trained on Shakespeare under six recipes: float32, mixed precision and float8.

`make train` runs it. `loop.py` and `checkpoint.py` are written to be copied into one's own training.
"""
