"""Imported by a process pool of a test: it ends when it has been idle for half a second."""

from midlayer_encoders.sweeping import process_pool

process_pool._IDLE_SECONDS = 0.5
