"""Saved models: safetensors beside `narrowcast.json`. A killed save leaves the old files or the new ones."""

from narrowcast.checkpoint.manifest import FORMAT_VERSION, Manifest
from narrowcast.checkpoint.staging import folder_of, locate, staged
from narrowcast.checkpoint.tensors import OWNED, read_tensors, write_tensors

__all__ = ["FORMAT_VERSION", "OWNED", "Manifest", "folder_of", "locate", "read_tensors", "staged", "write_tensors"]
