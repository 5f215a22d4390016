"""Models of transformers: where their parts are, where their files lie, how they are read and cut."""
