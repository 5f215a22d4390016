"""Load transformers models from a folder or the hub, locate their parts, and cut them at a layer."""
