"""Read the states and vectors of many layers from one forward pass."""
