"""Compare many sweeps: scores on their shared tasks, costs, the Pareto front and the best layer within a budget."""

from midlayer_encoders.extras.boards.sweep_board import Board, board

__all__ = ["Board", "board"]
