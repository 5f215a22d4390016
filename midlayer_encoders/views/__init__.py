"""Seeded views (augmented copies) of texts, images and audio."""
