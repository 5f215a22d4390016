"""Callbacks that watch every layer while a model learns."""
