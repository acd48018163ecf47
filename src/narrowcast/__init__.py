"""narrowcast: the precision policy for the life of a model."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
