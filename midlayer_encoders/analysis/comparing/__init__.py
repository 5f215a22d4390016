"""Models side by side: metrics, differences with intervals, CKA between layers."""
