"""Watching models run: what a policy does to values, and how long it takes."""

from __future__ import annotations
