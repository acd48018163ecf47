"""The main job on a real model: a sentence encoder is planned, quantized, measured, saved and reloaded."""

from __future__ import annotations
