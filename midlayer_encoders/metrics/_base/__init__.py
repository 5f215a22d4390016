"""What the metric classes share: the layers they are told, what they keep between updates, and the products they take."""
