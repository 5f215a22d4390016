"""The one place that runs a model for its layers: one forward pass, every wanted layer handed on as it is made."""
