"""GGUF files: a file becomes a cached folder and weights, and an encoder becomes a file."""
