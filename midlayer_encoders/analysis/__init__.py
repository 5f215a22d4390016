"""What is asked of a model's layers beyond one number each: probes, training, prompts, correlations."""
