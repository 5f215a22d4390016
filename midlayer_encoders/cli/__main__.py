"""``python -m midlayer_encoders.cli``."""

from midlayer_encoders.cli import main

main()
