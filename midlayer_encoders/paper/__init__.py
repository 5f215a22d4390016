"""The paper's experiments: what each claims, how it is run here, and what came out."""
