"""Transformers models from outside: where their parts are, how they are cut, where their files lie, how they are read."""
