"""What the metric classes share: their layers, what they keep between updates, the products they take."""
