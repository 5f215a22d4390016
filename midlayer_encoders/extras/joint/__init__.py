"""Joint models such as CLIP: texts pass through one tower, images through another, into one space."""
