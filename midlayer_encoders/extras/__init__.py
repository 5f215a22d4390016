"""Features beside the core, which imports one only when it is used."""
