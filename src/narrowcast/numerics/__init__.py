"""What a cast does to values: one definition for NumPy, PyTorch and JAX.

Every mode's file registers its stored form when it is imported: one import line a mode.
"""

from narrowcast.numerics import float8, int8
from narrowcast.numerics.error import cosine, largest_error, relative_error, sqnr_db
from narrowcast.numerics.stored_form import StoredForm, of

__all__ = ["StoredForm", "cosine", "float8", "int8", "largest_error", "of", "relative_error", "sqnr_db"]
